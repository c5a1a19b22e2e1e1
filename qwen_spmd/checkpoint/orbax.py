# SPDX-License-Identifier: Apache-2.0
"""Params as an Orbax checkpoint: the tree of the layout for one device, in the folder `params`.

It is what Orbax's PyTreeCheckpointHandler writes with `use_ocdbt=False`, a Zarr array for each leaf, and its own
restore reads it, onto any sharding. Orbax writes a leaf whole, though, and starts over when it is killed, so the
arrays are written here, piece by piece, through TensorStore as Orbax does. Orbax itself writes the tree's metadata,
last: without it nothing restores.

Chunks are one layer or part of it, cut along the letter that layouts shard. A shard is thus read without its
neighbours, except for what its first and last chunk share with them. Chunks are not compressed, weights hardly shrink.
"""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from qwen_spmd import params as P
from qwen_spmd.checkpoint.manifest import Piece, digest
from qwen_spmd.checkpoint.pieces import Source, Tensor, Window, cut, some
from qwen_spmd.config import ModelConfig
from qwen_spmd.mesh.rules import AXES_OF

FOLDER = "params"
FORMATS = ("plain",)
SMALL, LARGE = 2**18, 2**23
"""Bytes of a chunk: at least and at most, where the leaf allows it."""


def open_source(folder: Path, cfg: ModelConfig, dtype: Any, manifest: Mapping[str, Any]) -> Source:
    """A converted folder open for reading by leaf. ValueError for what is not as the config has it, by name."""
    leaves = dict(P.leaves_with_path(P.declare(cfg, dtype)))
    held = manifest["leaves"]
    if odd := [f"{path} {leaf['format']!r}" for path, leaf in held.items() if leaf["format"] not in FORMATS]:
        raise ValueError(f"{folder}: leaves of unknown format: {some(odd)}; supported: {', '.join(FORMATS)}")
    unused = ("mtp.",) * (not cfg.mtp) + ("lm_head",) * cfg.tied_embeddings
    problems = {
        "missing": [path for path in leaves if path not in held],
        "unexpected": [path for path in held if path not in leaves and not path.startswith(unused)],
        "of wrong shape": [
            f"{path} {held[path]['shape']} (expected {list(leaf.shape)})"
            for path, leaf in leaves.items()
            if path in held and held[path]["shape"] != list(leaf.shape)
        ],
    }
    if any(problems.values()):
        lines = [f"{len(names)} {what}: {some(names)}" for what, names in problems.items() if names]
        raise ValueError("\n  ".join([f"{folder}: the leaves are not those of its config.json", *lines]))
    window_of = _reader(folder)

    def read(path: str, window: Window) -> np.ndarray:
        return window_of(path, window).astype(leaves[path].dtype, copy=False)

    return Source(
        shapes={path: leaf.shape for path, leaf in leaves.items()},
        read=read,
        tensors={name: Tensor(t[0], t[1], tuple(t[2]), t[3]) for name, t in manifest["tensors"].items()},
        left_out=manifest["left_out"],
        identity=functools.partial(digest, manifest),
    )


class Arrays:
    """The leaves as chunked arrays, written a piece at a time."""

    def __init__(self, folder: Path, tree: P.Params):
        """`tree` is as `params.declare` has it for one device."""
        self._folder, self._tree = folder / FOLDER, tree
        self._leaves: dict[str, P.Leaf] = dict(P.leaves_with_path(tree))
        self.pieces = [
            Piece.of(path, window)
            for path, leaf in self._leaves.items()
            for window in cut(leaf.shape, leaf.dtype.itemsize, chunk(leaf))
        ]
        self.dtypes = {path: leaf.dtype for path, leaf in self._leaves.items()}

    def content(self, read: Callable[[str, Window], np.ndarray], piece: Piece) -> np.ndarray:
        return read(piece.name, piece.window)

    def write(self, piece: Piece, content: np.ndarray) -> None:
        """Put a piece in its place: whole chunks, each of which appears at once."""
        self._array(piece.name)[piece.window].write(content).result()

    def finish(self) -> None:
        """All arrays are there: make it a checkpoint, with the metadata of the same tree saved with tiny arrays."""
        import orbax.checkpoint as ocp  # it takes seconds, and reading needs none of it

        tiny = self._folder.with_name(f"{FOLDER}.tree")
        shutil.rmtree(tiny, ignore_errors=True)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
            checkpointer.save(tiny.absolute(), jax.tree.map(lambda leaf: np.zeros(1, leaf.dtype), self._tree))
        for file in tiny.iterdir():
            if file.is_file():
                file.replace(self._folder / file.name)
        shutil.rmtree(tiny)

    def _array(self, path: str) -> Any:
        leaf = self._leaves[path]
        metadata = {
            "shape": list(leaf.shape),
            "chunks": chunk(leaf),
            "dtype": "bfloat16" if leaf.dtype == "bfloat16" else leaf.dtype.newbyteorder("<").str,
            "compressor": None,
            "fill_value": None,
            "filters": None,
            "order": "C",
        }
        return ts.open(_spec(self._folder / path) | {"metadata": metadata}, create=True, open=True).result()


def chunk(leaf: P.Leaf) -> list[int]:
    """The shape of a leaf's chunks. Eight parts of a layer where they are not SMALL, more where they are LARGE."""
    shape = list(leaf.shape)
    layer = leaf.dtype.itemsize * math.prod(shape[leaf.dims[0] == "L" :])
    axis = next((i for i, letter in enumerate(leaf.dims) if letter in AXES_OF), None)
    if axis is not None:
        parts = max(math.ceil(layer / LARGE), min(8, layer // SMALL), 1)
        n = shape[axis]
        shape[axis] = math.ceil(n / min(parts, n))
        layer = layer // n * shape[axis]
    if leaf.dims[0] == "L":
        shape[0] = min(max(SMALL // layer, 1), shape[0])
    return shape


def stored(folder: Path) -> Callable[[Piece], np.ndarray]:
    """What a finished folder holds for a piece."""
    read = _reader(folder)
    return lambda piece: read(piece.name, piece.window)


def _reader(folder: Path) -> Callable[[str, Window], np.ndarray]:
    # Two windows may share a chunk: the experts of a layer, one after the other.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 2**26}})

    @functools.cache
    def array(path: str) -> Any:
        return ts.open(_spec(folder / FOLDER / path), context=context, recheck_cached_data="open").result()

    def read(path: str, window: Window) -> np.ndarray:
        try:
            return array(path)[window].read().result()
        except (ValueError, IndexError) as e:  # IndexError: an array of another rank
            reason = str(e).splitlines()[0].split(" [tensorstore_spec")[0]
            raise ValueError(f"{folder / FOLDER / path}: not a whole array ({reason})") from e

    return read


def _spec(path: Path) -> dict[str, Any]:
    store = {"driver": "file", "path": f"{path.absolute()}/"}
    return {"driver": "zarr", "kvstore": store, "fill_missing_data_reads": False}
