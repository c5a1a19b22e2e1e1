# SPDX-License-Identifier: Apache-2.0
"""Grouped SwiGLU in plain jnp: a loop over tiles of one expert's rows, or over the experts that any row goes to."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from qwen_spmd.mesh.vary import vary_like
from qwen_spmd.pallas.pieces import cut
from qwen_spmd.pallas.scaled import Microscaled, Scaled

Weights = jax.Array | Scaled | Microscaled


def tile_rows(rows: int, experts: int) -> int:
    """Rows of a tile: a quarter more than an expert's mean, so that most experts take one; a multiple of 4 (fewer rows
    multiply no faster) up to 128."""
    return min(4 * max(1, math.ceil(1.25 * rows / experts / 4)), 128)


def grouped_mlp(
    x_TD: jax.Array,
    rows_R: jax.Array,
    sizes_E: jax.Array,
    w_gate: Weights,
    w_up: Weights,
    w_down: Weights,
    layer: jax.Array,
    expected: int,
) -> jax.Array:
    R, D = rows_R.shape[0], x_TD.shape[1]
    size = tile_rows(expected, sizes_E.shape[0])
    tiles = cut(jnp.cumsum(sizes_E) - sizes_E, sizes_E, size)
    rows_R = jnp.pad(rows_R, (0, size))

    def tile(i: jax.Array, y_RD: jax.Array) -> jax.Array:
        expert, _, start, length = tiles[i]
        x = x_TD[jax.lax.dynamic_slice_in_dim(rows_R, start, size)]
        y = swiglu(x, w_gate[layer, expert], w_up[layer, expert], w_down[layer, expert])
        old = jax.lax.dynamic_slice_in_dim(y_RD, start, size)
        y = jnp.where((jnp.arange(size) < length)[:, None], y, old)
        return jax.lax.dynamic_update_slice_in_dim(y_RD, y, start, 0)

    y_RD = vary_like(jnp.zeros((R + size, D), x_TD.dtype), x_TD, sizes_E, *jax.tree.leaves(w_gate))
    return jax.lax.fori_loop(0, tiles.count, tile, y_RD)[:R]


def swiglu(x: jax.Array, w_gate: Weights, w_up: Weights, w_down: Weights) -> jax.Array:
    """Of one expert; weights are cast here, one expert at a time."""

    def dot(x: jax.Array, w: Weights) -> jax.Array:
        if isinstance(w, Microscaled):
            x = w.rows(x).astype(jnp.float32)[..., 0]
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        return jnp.dot(x, w.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)

    return dot((jax.nn.silu(dot(x, w_gate)) * dot(x, w_up)).astype(x.dtype), w_down).astype(x.dtype)
