# SPDX-License-Identifier: Apache-2.0
"""Loading: a checkpoint's leaves into arrays on a mesh. The host holds one piece of one shard at a time.

In several processes each reads what its own devices need, and all of them call `load` alike.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from qwen_spmd import params as P
from qwen_spmd.checkpoint.pieces import Source, Window, bar, cut
from qwen_spmd.checkpoint.source import open_source
from qwen_spmd.config import ModelConfig
from qwen_spmd.mesh.rules import SINGLE, Layout


def load(
    folder: Path,
    cfg: ModelConfig,
    *,
    dtype: Any,
    mesh: Mesh | None = None,
    layout: Layout = SINGLE,
    mtp: bool = True,
    progress: bool = True,
) -> P.Params:
    """Params of a folder in either format, in a layout on its mesh; without a mesh, on the default device.

    Leaves that declare a dtype (float32 decays and their norm) keep it whatever `dtype` is. Expert e is in place e, the
    places after the last are null experts, all zeros. Beside what the devices hold, the host holds a piece at a time
    (PIECE_BYTES), however large a leaf is. ValueError for a mesh of another size than the layout's, for files that are
    not those of `cfg`, and for an unfinished conversion.
    """
    if not mtp:
        cfg = dataclasses.replace(cfg, mtp=False)
    sizes = dict(mesh.shape) if mesh is not None else {"dp": 1, "ep": 1, "tp": 1}
    wanted = {"dp": layout.dp, "ep": layout.ep, "tp": layout.tp}
    if sizes != wanted:
        raise ValueError(f"mesh is {sizes}, the layout needs {wanted}")
    source = open_source(folder, cfg, dtype)
    tree = P.declare(cfg, dtype, layout)
    targets = [
        _Target(path, leaf, NamedSharding(mesh, layout.spec(leaf.dims)) if mesh is not None else None)
        for path, leaf in P.leaves_with_path(tree)
    ]
    with bar(f"load {folder.name}", sum(t.num_bytes for t in targets), progress) as shown:
        arrays = [target.fill(source, shown.update) for target in targets]
    return jax.tree.unflatten(jax.tree.structure(tree), arrays)


class _Target:
    """A leaf and its shards on this process's devices; shards of the same content are read once."""

    def __init__(self, path: str, leaf: P.Leaf, sharding: NamedSharding | None):
        self._path, self._leaf, self._sharding = path, leaf, sharding
        self._shard = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        self._holders: dict[tuple[int, ...], list[Any]] = {}
        if sharding is None:
            self._holders[(0,) * len(leaf.shape)] = [None]
        else:
            for device, window in sharding.addressable_devices_indices_map(leaf.shape).items():
                start = tuple(w.indices(n)[0] for w, n in zip(window or (), leaf.shape))
                self._holders.setdefault(start, []).append(device)
        self.num_bytes = len(self._holders) * int(np.prod(self._shard)) * leaf.dtype.itemsize

    def fill(self, source: Source, done: Callable[[int], Any]) -> jax.Array:
        """The array, made on the devices from pieces of its shards."""
        whole: jax.Array | None = None
        for window in cut(self._shard, self._leaf.dtype.itemsize):
            piece = self._piece(source, window, done)
            if piece.shape == self._leaf.shape:
                return piece
            if whole is None:
                whole = jnp.zeros(self._leaf.shape, self._leaf.dtype, device=self._sharding)
            whole = _put(self._sharding)(whole, piece, np.array([w.start for w in window], np.int32))
        assert whole is not None
        return whole

    def _piece(self, source: Source, window: Window, done: Callable[[int], Any]) -> jax.Array:
        """The same window of every shard, as an array that is sharded like the leaf."""
        pieces: list[jax.Array] = []
        for start, devices in self._holders.items():
            content = _read(
                source, self._path, self._leaf, tuple(slice(i + w.start, i + w.stop) for i, w in zip(start, window))
            )
            done(content.nbytes)
            if self._sharding is None:
                return jnp.asarray(content)
            # The host's copy goes before the next is read.
            pieces += jax.block_until_ready(jax.device_put([content] * len(devices), devices))
        assert self._sharding is not None
        shape = [n // m * (w.stop - w.start) for n, m, w in zip(self._leaf.shape, self._shard, window)]
        return jax.make_array_from_single_device_arrays(tuple(shape), self._sharding, pieces)


def _read(source: Source, path: str, leaf: P.Leaf, window: Window) -> np.ndarray:
    """A window of a leaf in its layout: what the checkpoint does not have is null experts and the table of places."""
    if leaf.init == "places":  # expert e is in place e, and nowhere else
        expert = np.arange(window[1].start, window[1].stop, dtype=leaf.dtype)
        return np.broadcast_to(expert[:, None], [w.stop - w.start for w in window]).copy()
    held = tuple(slice(w.start, max(w.start, min(w.stop, n))) for w, n in zip(window, source.shapes[path]))
    if held == window:
        return source.read(path, window)
    out = np.zeros([w.stop - w.start for w in window], leaf.dtype)
    if all(w.start < w.stop for w in held):
        out[tuple(slice(0, w.stop - w.start) for w in held)] = source.read(path, held)
    return out


@functools.cache
def _put(sharding: NamedSharding | None) -> Callable[[jax.Array, jax.Array, np.ndarray], jax.Array]:
    """(whole, piece, where in each shard it begins) -> whole, updated in place."""

    def put(whole: jax.Array, piece: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(whole, piece, list(start))

    if sharding is not None:
        put = jax.shard_map(
            put,
            mesh=sharding.mesh,
            in_specs=(sharding.spec, sharding.spec, PartitionSpec()),
            out_specs=sharding.spec,
        )
    return jax.jit(put, donate_argnums=0)
