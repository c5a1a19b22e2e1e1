# SPDX-License-Identifier: Apache-2.0
"""Hugging Face checkpoints to sharded Orbax and back: python scripts/convert.py FOLDER_OR_ID NEW_FOLDER

The new folder has the tokenizer, templates and configs too: `python -m qwen_spmd.serve NEW_FOLDER` serves it. Stopped,
it goes on when the same command is run again. `--verify NEW_FOLDER` compares a folder with its checksums.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from qwen_spmd import checkpoint
from qwen_spmd.serve.model_folder import model_folder


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("source", help="folder of either format or Hugging Face id; with --verify, the folder to verify")
    p.add_argument("dest", nargs="?", type=Path, help="new folder, or that of the same conversion, unfinished")
    p.add_argument("--to", choices=["orbax", "huggingface"], default="orbax", help="format of DEST")
    p.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="auto: config.json's")
    p.add_argument("--revision", help="of the Hugging Face id: branch, tag or commit")
    p.add_argument("--verify", action="store_true", help="only compare SOURCE, which was converted, with its checksums")
    args = p.parse_args()
    if args.verify != (args.dest is None):
        p.error("give SOURCE and DEST, or --verify and one folder")
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of what is as it should be
    try:
        if args.verify:
            print(
                f"{args.source}: all {checkpoint.verify(Path(args.source))} pieces and files are as they were written"
            )
            return
        source = model_folder(args.source, revision=args.revision)
        report = checkpoint.convert(source, args.dest, to=args.to, dtype=args.dtype)
    except ValueError as error:
        sys.exit(f"convert.py: {error}")
    except OSError as error:  # it has a name when a file does not open, and none when the disk is full
        sys.exit(f"convert.py: {error.filename or args.dest or args.source}: {error.strerror or error}")
    kept = f", {report.reused} of them from an earlier run" if report.reused else ""
    print(f"{args.dest}: {report.num_bytes / 1e6:,.0f} MB in {report.pieces} pieces{kept}, written and verified")
    for what in report.left_out:
        print(f"left out: {what}")
    if report.rounded:
        print(f"rounded: {len(report.rounded)} tensors, such as {report.rounded[0]}")


if __name__ == "__main__":
    main()
