# SPDX-License-Identifier: Apache-2.0
"""Train the demo model: `python scripts/train_demo.py --out DIR`, about ten minutes on one H200.

There, XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false" saves four minutes of compilation.

Writes a Hugging Face folder; copy it over qwen_spmd/demo/model to ship it. `--tokenizer SIZE` makes the tokenizer
instead (after a change of the tasks' words; the model has to be trained again after that).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any


def main() -> None:
    from qwen_spmd.demo import MODEL_DIR, train

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=int, metavar="SIZE", help="train the tokenizer with SIZE entries")
    kinds: dict[str, Any] = {
        "out": Path,
        "init": Path,
        "config": json.loads,
    }
    for field in dataclasses.fields(train.Options):
        default = field.default if field.default is not dataclasses.MISSING else {}
        flag = f"--{field.name.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
        else:
            parser.add_argument(flag, type=kinds.get(field.name, type(default)), default=default)
    arguments = vars(parser.parse_args())
    if size := arguments.pop("tokenizer"):
        from qwen_spmd.demo import export, vocabulary

        vocabulary.save(vocabulary.train(size), MODEL_DIR, export.CONTEXT)
        return
    train.train(train.Options(**arguments), log=lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
