# SPDX-License-Identifier: Apache-2.0
"""Named cases of the SwiGLU of few rows.

What the contract says has no influence is NaN: rows that no expert owns, gates of experts that do not own the row,
weights of experts without rows and of other layers. No element is so small that it would not matter.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.few_rows_mlp import few_rows_mlp


@dataclasses.dataclass(frozen=True)
class Case:
    """Each of `used` of the `rows` has `chosen` experts of its own choice; `full`: too big for a CPU test."""

    name: str
    rows: int
    chosen: int
    used: int | None = None
    experts: int = 16
    hidden: int = 64
    width: int = 32
    layers: int = 2
    dtype: str = "float32"
    full: bool = False


@struct.dataclass
class Inputs:
    """Arguments of the op."""

    x_TD: jax.Array
    own_TE: jax.Array
    gates_TE: jax.Array
    w_gate: jax.Array
    w_up: jax.Array
    w_down: jax.Array
    layer: jax.Array


def run(x: Inputs, impl: Impl) -> jax.Array:
    return few_rows_mlp(x.x_TD, x.own_TE, x.gates_TE, x.w_gate, x.w_up, x.w_down, x.layer, impl=impl)


def inputs(case: Case, seed: int = 0) -> Inputs:
    """numpy arrays of unit size; matrices scaled so that results are, too."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(case.dtype)
    E, D, M, layer = case.experts, case.hidden, case.width, case.layers - 1
    used = rng.permutation(case.rows)[: case.rows if case.used is None else case.used]
    own_TE: Any = np.zeros((case.rows, E), np.bool_)
    for t in used:
        own_TE[t, rng.permutation(E)[: case.chosen]] = True

    def draw(*shape: int) -> np.ndarray:
        return rng.choice((-1, 1), shape) * rng.uniform(0.5, 1.5, shape)

    def weights(fan_in: int, fan_out: int) -> Any:
        w: Any = np.full((case.layers, E, fan_in, fan_out), np.nan, dtype)
        for e in np.flatnonzero(own_TE.any(0)):
            w[layer, e] = draw(fan_in, fan_out) * fan_in**-0.5
        return w

    x: Any = draw(case.rows, D).astype(dtype)
    x[~own_TE.any(1)] = np.nan
    gates: Any = np.where(own_TE, rng.uniform(0.5, 1.5, own_TE.shape) / case.chosen, np.nan).astype(np.float32)
    index: Any = np.int32(layer)
    return Inputs(x, own_TE, gates, weights(D, M), weights(D, M), weights(M, D), index)


CASES = (
    Case("1 row", 1, 2),
    Case("1 row of a single expert", 1, 1, experts=1),
    Case("3 rows", 3, 4),
    Case("4 rows", 4, 4),
    Case("4 rows, one used", 4, 2, used=1),
    Case("no rows", 4, 2, used=0),
    Case("all experts", 4, 16),
    Case("three layers", 2, 3, layers=3),
    Case("Qwen3 width", 4, 8, experts=8, width=24),
    Case("4 rows, bfloat16", 4, 4, used=3, dtype="bfloat16"),
    Case("Qwen3.5, 1 row", 1, 10, experts=64, hidden=4096, width=1024, layers=1, dtype="bfloat16", full=True),
    Case("Qwen3, 4 rows", 4, 8, experts=16, hidden=4096, width=1536, layers=1, dtype="bfloat16", full=True),
)
