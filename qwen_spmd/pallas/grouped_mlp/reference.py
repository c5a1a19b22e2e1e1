# SPDX-License-Identifier: Apache-2.0
"""Grouped SwiGLU in plain jnp: a loop over tiles of one expert's rows, or over the experts that any row goes to."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from qwen_spmd.mesh.vary import vary_like
from qwen_spmd.pallas.pieces import cut


def tile_rows(rows: int, experts: int) -> int:
    """Rows of a tile: a quarter more than an expert's mean, so that most experts take one; a multiple of 4 (fewer rows
    multiply no faster) up to 128."""
    return min(4 * max(1, math.ceil(1.25 * rows / experts / 4)), 128)


def grouped_mlp(
    x_TD: jax.Array, sizes_E: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array, layer: jax.Array
) -> jax.Array:
    T = x_TD.shape[0]
    size = tile_rows(T, sizes_E.shape[0])
    tiles = cut(jnp.cumsum(sizes_E) - sizes_E, sizes_E, size)
    x_TD = jnp.pad(x_TD, ((0, size), (0, 0)))

    def tile(i: jax.Array, y_TD: jax.Array) -> jax.Array:
        expert, _, start, length = tiles[i]
        x = jax.lax.dynamic_slice_in_dim(x_TD, start, size)
        y = swiglu(x, w_gate[layer, expert], w_up[layer, expert], w_down[layer, expert])
        old = jax.lax.dynamic_slice_in_dim(y_TD, start, size)
        y = jnp.where((jnp.arange(size) < length)[:, None], y, old)
        return jax.lax.dynamic_update_slice_in_dim(y_TD, y, start, 0)

    y_TD = vary_like(jnp.zeros_like(x_TD), x_TD, sizes_E, w_gate)
    return jax.lax.fori_loop(0, tiles.count, tile, y_TD)[:T]


def swiglu(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    """Of one expert; weights are cast here, one expert at a time."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def dot(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.dot(x, w.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)

    return dot((jax.nn.silu(dot(x, w_gate)) * dot(x, w_up)).astype(x.dtype), w_down).astype(x.dtype)
