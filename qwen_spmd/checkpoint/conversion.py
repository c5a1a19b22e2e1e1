# SPDX-License-Identifier: Apache-2.0
"""Converting a checkpoint from one format to the other, piece by piece, and checking that it is still what it was.

A conversion that was stopped goes on where it was: a piece that the journal names is not made again. When all are
there, each is read back and compared with the checksum of what was written; only then is the folder marked as whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp

from qwen_spmd import params as P
from qwen_spmd.checkpoint import huggingface, manifest, orbax
from qwen_spmd.checkpoint.manifest import MANIFEST, MARKS, Journal, Piece, checksum
from qwen_spmd.checkpoint.pieces import Tensor, bar, some
from qwen_spmd.checkpoint.source import open_source
from qwen_spmd.checkpoint.table import form, parts
from qwen_spmd.config import ModelConfig, load_config

FORMATS = {"orbax": orbax, "huggingface": huggingface}
DTYPES = ("auto", "bfloat16", "float32")
BESIDE = ("*.json", "*.jinja", "*.txt", "*.md", "LICENSE*")
"""Files beside the weights that are copied: config, tokenizer, chat template, generation config, texts."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What `convert` did. `reused` pieces were there from an earlier run; the lists say what the source has more."""

    pieces: int
    reused: int
    num_bytes: int
    left_out: list[str]
    rounded: list[str]


def convert(
    source: Path,
    folder: Path,
    *,
    to: Literal["orbax", "huggingface"],
    dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    progress: bool = True,
) -> Report:
    """Write the checkpoint in `source`, of either format, to the new `folder`, with all that a server needs.

    Tensors keep their names, shapes, dtypes and bytes on the way to Orbax and back, but for those of a dtype that the
    model's leaves do not hold: they are `rounded`. "auto" is the dtype that config.json names. Beside the
    interpreter the host holds one tensor or piece (PIECE_BYTES) and its windows. ValueError as `load` has them, and for
    a folder that holds anything other than this conversion, unfinished, or in which it is running.
    """
    if to not in FORMATS:
        raise ValueError(f"to is {to!r}, it must be one of {', '.join(FORMATS)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, it must be one of {', '.join(DTYPES)}")
    cfg = load_config(source)
    asked = dtype not in ("auto", cfg.dtype)
    tree = P.declare(cfg, dtype if asked else cfg.dtype)
    opened = open_source(source, cfg, tree.embed.dtype)
    tensors, rounded = _published(cfg, tree, opened.tensors, asked)
    target = orbax.Arrays(folder, tree) if to == "orbax" else huggingface.Files(folder, cfg, tensors)
    head = {"source": str(source), "identity": opened.identity(), "to": to, "dtype": tree.embed.dtype.name}
    with Journal(folder, head) as journal:
        _copy_beside(source, folder, tree.embed.dtype.name if asked else None)

        sizes = [math.prod(piece.shape) * target.dtypes[piece.name].itemsize for piece in target.pieces]
        reused = len(journal.done)
        with bar(f"convert {folder.name}", sum(sizes), progress) as shown:
            for piece, size in zip(target.pieces, sizes, strict=True):
                if piece not in journal.done:
                    content = target.content(opened.read, piece)
                    target.write(piece, content)
                    journal.add(piece, checksum(content))
                shown.update(size)
        target.finish()

        made = {
            "to": to,
            "dtype": tree.embed.dtype.name,
            "num_bytes": sum(sizes),
            "leaves": {
                path: {"format": "plain", "dtype": leaf.dtype.name, "shape": list(leaf.shape)}
                for path, leaf in P.leaves_with_path(tree)
            },
            "tensors": tensors,
            "left_out": list(opened.left_out),
            "pieces": [[*piece, journal.done[piece]] for piece in target.pieces],
            "files": {str(file.relative_to(folder)): _digest(file) for file in _small_files(folder)},
        }
        if wrong := _wrong(folder, made, progress):
            for piece in wrong:
                journal.done.pop(piece, None)
            journal.rewrite()
            raise ValueError(
                f"{folder}: {len(wrong)} pieces are not what was written: {_names(wrong)}; run again to redo them"
            )
        manifest.write(folder, made)
    return Report(len(sizes), reused, sum(sizes), list(opened.left_out), rounded)


def verify(folder: Path, *, progress: bool = True) -> int:
    """Compare a converted folder with the checksums in its manifest. ValueError with all that differs, by name.

    Covered are the dtype, shape and every value of every piece of the weights, read as loading reads them, and every
    byte of every other file, Orbax's metadata too; not the manifest itself, nor what was added to the folder. Returns
    how many pieces and files there are.
    """
    made = manifest.read(folder)
    if made is None:
        raise ValueError(f"{folder}: holds no {MANIFEST}, so it was not converted and has no checksums")
    if wrong := _wrong(folder, made, progress):
        raise ValueError(f"{folder}: {len(wrong)} pieces or files are not what was written: {_names(wrong)}")
    return len(made["pieces"]) + len(made["files"])


def _published(
    cfg: ModelConfig, tree: P.Params, tensors: Mapping[str, Tensor], asked: bool
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors as they will be when they come back from the leaves, and the names of those that lose bits."""
    leaves = dict(P.leaves_with_path(tree))
    out: dict[str, Tensor] = {}
    rounded = []
    for part in parts(cfg, cfg.dtype, form(tensors)):
        if part.name in out:
            continue
        tensor, dtype = tensors[part.name], leaves[part.path].dtype
        exact = jnp.promote_types(huggingface.DTYPES[tensor.dtype], dtype) == dtype
        if not exact:
            rounded.append(tensor.name)
        keep = exact and not asked
        out[part.name] = tensor if keep else tensor._replace(dtype=huggingface.NAMES[dtype])
    return out, rounded


def _copy_beside(source: Path, folder: Path, dtype: str | None) -> None:
    """The small files, and in config.json another dtype if that is given."""
    for pattern in BESIDE:
        for file in source.glob(pattern):
            if file.is_file() and file.name not in (*MARKS, huggingface.INDEX):
                shutil.copyfile(file, folder / file.name)
    if dtype is not None:
        hf = json.loads((folder / "config.json").read_text())
        for part in (hf, hf.get("text_config", hf)):
            part.pop("torch_dtype", None)
            part["dtype"] = dtype
        (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")


def _small_files(folder: Path) -> list[Path]:
    """All files but the weights and the marks of a conversion."""
    arrays = folder / orbax.FOLDER
    files = [*folder.iterdir(), *arrays.glob("_*"), *arrays.glob("*/.zarray")]
    return sorted(f for f in files if f.is_file() and f.suffix != ".safetensors" and f.name not in MARKS)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _names(wrong: list[Any]) -> str:
    return some([str(one) for one in wrong])


def _wrong(folder: Path, made: Mapping[str, Any], progress: bool) -> list[Any]:
    """The pieces and files that are not what the manifest says."""
    stored = FORMATS[made["to"]].stored(folder)
    wrong: list[Any] = []
    with bar(f"verify {folder.name}", made["num_bytes"], progress) as shown:
        for name, start, shape, digest in made["pieces"]:
            piece = Piece(name, tuple(start), tuple(shape))
            try:
                content = stored(piece)
                if checksum(content) != digest:
                    wrong.append(piece)
                shown.update(content.nbytes)
            except ValueError:  # not even readable
                wrong.append(piece)
    for name, digest in made["files"].items():
        if not (folder / name).is_file() or _digest(folder / name) != digest:
            wrong.append(name)
    return wrong
