# SPDX-License-Identifier: Apache-2.0
"""What marks a converted folder: the journal while it is being written, the manifest once it is whole.

The journal's first line says what is converted into what; each further line is a piece that is on disk, with its
checksum. The manifest has all of that and lists the leaves with their formats. A folder that has a journal is
unfinished, whatever else it has. Not here: what a piece is (the formats say).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from qwen_spmd.checkpoint.pieces import Window

MANIFEST, JOURNAL = "qwen_spmd.json", "qwen_spmd_unfinished.jsonl"
MARKS = (MANIFEST, JOURNAL, f"{MANIFEST}.new", f"{JOURNAL}.new")
"""The files that are not the model's. The last two are left by a run that was killed while it wrote one."""
VERSION = 1
HEAD = ("source", "identity", "to", "dtype")
FIELDS = {
    "to": str,
    "dtype": str,
    "num_bytes": int,
    "leaves": dict,
    "tensors": dict,
    "left_out": list,
    "pieces": list,
    "files": dict,
}
FORMATS = ("orbax", "huggingface")


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
        head, _ = _journal(folder / JOURNAL)
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
    if odd := [key for key, kind in FIELDS.items() if not isinstance(manifest.get(key), kind)]:
        raise ValueError(f"{path}: not a manifest of this package (missing, or of another type: {', '.join(odd)})")
    if manifest["to"] not in FORMATS:
        raise ValueError(f"{path}: to is {manifest['to']!r}, it must be one of {', '.join(FORMATS)}")
    return manifest


def digest(made: Mapping[str, Any]) -> str:
    """Of the arrays and the config that a manifest describes; not of when and how they were written."""
    content = [made["pieces"], made["files"].get("config.json")]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write(folder: Path, manifest: dict[str, Any]) -> None:
    """The folder is whole: the manifest appears at once, then the journal goes."""
    _replace(folder / MANIFEST, json.dumps({"version": VERSION} | manifest) + "\n").close()
    (folder / JOURNAL).unlink()


class Journal:
    """The pieces that are on disk. Opening it starts a conversion, or goes on with the same one.

    It is locked until it is closed, if the file system has locks: no two conversions write into one folder.
    """

    def __init__(self, folder: Path, head: dict[str, Any]):
        """`head` has HEAD. ValueError for a folder that holds anything else, or where another conversion is running."""
        self._path, self._head = folder / JOURNAL, head
        # A run that was killed before its first line leaves no more than these.
        first = {JOURNAL, f"{JOURNAL}.new"}
        blank = not folder.exists() or (folder.is_dir() and {file.name for file in folder.iterdir()} <= first)
        if not blank and not self._path.is_file():
            raise ValueError(f"{folder}: exists already, give a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        self._locked = _open(self._path)
        try:
            new = blank and not self._path.stat().st_size
            old, self.done = (head, {}) if new else _journal(self._path)
            if odd := [key for key in HEAD if key != "source" and old[key] != head[key]]:
                raise ValueError(
                    f"{folder}: an unfinished conversion of another {odd[0]}, of {old['source']} to {old['to']} "
                    f"in {old['dtype']}; finish that or give a new folder"
                )
            self.rewrite()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Others may go on with it."""
        self._locked.close()

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
        new = _replace(self._path, "".join(json.dumps(line) + "\n" for line in lines))
        self._locked.close()
        self._locked = new


def _journal(path: Path) -> tuple[dict[str, Any], dict[Piece, str]]:
    """Its head and its pieces; the last line is left out if the process was killed while it wrote it."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        head = {key: lines[0][key] for key in HEAD}
        return head, {Piece(name, tuple(start), tuple(shape)): digest for name, start, shape, digest in lines[1:]}
    except (ValueError, KeyError, IndexError, TypeError) as e:
        raise ValueError(
            f"{path}: does not say what was being converted; remove {path.parent} and convert again"
        ) from e


def _open(path: Path) -> TextIO:
    """A journal, locked, made if it is not there. ValueError if another process has it."""
    busy = ValueError(f"{path.parent}: another conversion into it is running")
    try:
        f = path.open("r+" if path.is_file() else "x+")
    except (FileExistsError, FileNotFoundError) as e:
        raise busy from e
    # In between, the other one may have put a new journal in the place of this one, or have finished.
    if _lock(f) and path.is_file() and os.path.samestat(os.fstat(f.fileno()), path.stat()):
        return f
    f.close()
    raise busy


def _lock(f: TextIO) -> bool:
    """Whether nobody else has it locked. Not every file system can tell."""
    try:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        return not isinstance(e, BlockingIOError)
    return True


def _replace(path: Path, text: str) -> TextIO:
    """A file that appears at once, still open, and locked before it appears."""
    new = path.with_name(f"{path.name}.new")
    f = new.open("w")
    try:
        _lock(f)
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
        new.replace(path)
    except BaseException:
        f.close()
        raise
    return f
