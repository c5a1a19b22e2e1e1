# SPDX-License-Identifier: Apache-2.0
"""What marks a converted folder: the journal while it is being written, the manifest once it is whole.

The journal's first line says what is converted into what; each further line is a piece that is on disk, with its
checksum. The manifest has all of that and lists the leaves with their formats. A folder that has a journal is
unfinished, whatever else it has. Not here: what a piece is (the formats say).
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from qwen_spmd.checkpoint.pieces import Window

MANIFEST, JOURNAL = "qwen_spmd.json", "qwen_spmd_unfinished.jsonl"
VERSION = 1


class Piece(NamedTuple):
    """Part of an array on disk: of a leaf by path, or a whole tensor by its published name."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, window: Window) -> Piece:
        return cls(name, tuple(w.start for w in window), tuple(w.stop - w.start for w in window))

    @property
    def window(self) -> Window:
        return tuple(slice(i, i + n) for i, n in zip(self.start, self.shape))

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(f'{w.start}:{w.stop}' for w in self.window)}]"


def checksum(array: np.ndarray) -> str:
    """SHA-256 of an array's dtype, shape and values, row by row."""
    digest = hashlib.sha256(f"{array.dtype.name} {list(array.shape)} ".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return digest.hexdigest()


def read(folder: Path) -> dict[str, Any] | None:
    """The manifest of a finished conversion, None for a folder that is no conversion.

    ValueError for an unfinished one, with the command that goes on, and for a manifest that this package cannot read.
    """
    if (folder / JOURNAL).is_file():
        head = _lines(folder / JOURNAL)[0]
        command = f"scripts/convert.py {head['source']} {folder} --to {head['to']} --dtype {head['dtype']}"
        raise ValueError(f"{folder}: an unfinished conversion; to finish it run: {command}")
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text())
        version = manifest["version"]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path}: not a manifest of this package ({e!r})") from e
    if version != VERSION:
        raise ValueError(f"{path}: version is {version!r}, supported is {VERSION}")
    return manifest


def write(folder: Path, manifest: dict[str, Any]) -> None:
    """The folder is whole: the manifest appears at once, then the journal goes."""
    _replace(folder / MANIFEST, json.dumps({"version": VERSION} | manifest) + "\n")
    (folder / JOURNAL).unlink()


class Journal:
    """The pieces that are on disk. Opening it starts a conversion, or goes on with the same one."""

    def __init__(self, folder: Path, head: dict[str, Any]):
        """`head` has source, identity, to, dtype. ValueError for a folder that holds anything else already."""
        self._path, self._head = folder / JOURNAL, head
        lines: list[Any] = [head]
        if self._path.is_file():
            lines = _lines(self._path)
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder}: exists already, give a new folder")
        if odd := [key for key in head if key != "source" and lines[0][key] != head[key]]:
            raise ValueError(
                f"{folder}: an unfinished conversion of another {odd[0]}, of {lines[0]['source']} to {lines[0]['to']} "
                f"in {lines[0]['dtype']}; finish that or give a new folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        self.done = {Piece(name, tuple(start), tuple(shape)): digest for name, start, shape, digest in lines[1:]}
        self.rewrite()

    def add(self, piece: Piece, digest: str) -> None:
        """`piece` is on disk."""
        self.done[piece] = digest
        with self._path.open("a") as f:
            f.write(json.dumps([*piece, digest]) + "\n")
            f.flush()
            os.fsync(f.fileno())

    def rewrite(self) -> None:
        """Write what is in `done`, and no line that was cut short."""
        lines = [self._head, *([*piece, digest] for piece, digest in self.done.items())]
        _replace(self._path, "".join(json.dumps(line) + "\n" for line in lines))


def _lines(path: Path) -> list[Any]:
    """The whole lines; the last one is left out if the process was killed while it wrote it."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    with new.open("w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    new.replace(path)
