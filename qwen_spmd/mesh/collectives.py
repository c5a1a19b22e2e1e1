# SPDX-License-Identifier: Apache-2.0
"""Collectives with logic of their own; for the others, code calls `jax.lax` by axis name."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from qwen_spmd.mesh.topology import Hypercube, axis_order

Reduce = Literal["xla", "hierarchical"]


def reduce_scatter(
    x_ND: jax.Array, axis: str, *, how: Reduce = "xla", cube: Hypercube | None = None, micro_batches: int = 1
) -> jax.Array:
    """[n * T, D] -> [T, D] in x's dtype: the sum over the axis' n devices of the rows that belong to this one.

    The rows of device i are the i-th T. This is where the implementation is chosen, a kernel's too:

    xla           the compiler's own
    hierarchical  exchanges between neighbours of the hypercube, in the order of `cube`'s bits (None: of the axis),
                  half of what is left at each; in `micro_batches` of columns, so that one adds while another travels
    """
    match how:
        case "xla":
            return jax.lax.psum_scatter(x_ND, axis, tiled=True)
        case "hierarchical":
            cube = axis_order(jax.lax.axis_size(axis)) if cube is None else cube
            return _recursive_halving(x_ND, axis, cube, micro_batches)


def _recursive_halving(x_ND: jax.Array, axis: str, cube: Hypercube, micro_batches: int) -> jax.Array:
    n, D = jax.lax.axis_size(axis), x_ND.shape[-1]
    if len(cube.corners) != n:
        raise ValueError(f"cube has {len(cube.corners)} corners, axis {axis} has {n} devices")
    corner = jnp.asarray(cube.corners, jnp.int32)[jax.lax.axis_index(axis)]
    x_CTD = x_ND.reshape(n, -1, D)[np.array(cube.indices)]  # what belongs to each corner
    bits = range(len(cube.links))
    inner = [b for b in bits if cube.links[b] == "core"]
    outer = [b for b in bits if cube.links[b] != "core"]
    # One array axis for each bit, the highest first. Micro-batches leave the chip in different directions.
    columns = [part.reshape((2,) * len(bits) + part.shape[1:]) for part in jnp.array_split(x_CTD, micro_batches, -1)]
    orders = [inner + outer[i % max(len(outer), 1) :] + outer[: i % max(len(outer), 1)] for i in range(len(columns))]
    left = [sorted(bits, reverse=True) for _ in columns]
    for step in bits:
        for i, order in enumerate(orders):
            bit = order[step]
            at = left[i].index(bit)
            left[i].remove(bit)
            mine = corner >> bit & 1
            keep, give = (
                jax.lax.dynamic_index_in_dim(columns[i], half, at, keepdims=False) for half in (mine, 1 - mine)
            )
            pairs = [(device, cube.indices[c ^ 1 << bit]) for device, c in enumerate(cube.corners)]
            columns[i] = keep + jax.lax.ppermute(give, axis, pairs)
    return jnp.concatenate(columns, -1)
