# SPDX-License-Identifier: Apache-2.0
"""Named cases of summing experts' rows.

What the contract says has no influence is NaN: gates of what is not here, rows that nobody gathers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.expert_sum import expert_sum


@dataclasses.dataclass(frozen=True)
class Case:
    """Of `rows` x `chosen` choices, a `share` is here. `full`: too big for a CPU test."""

    name: str
    rows: int
    chosen: int
    width: int = 64
    share: float = 1.0
    dtype: str = "float32"
    full: bool = False


@struct.dataclass
class Inputs:
    """Arguments of the op."""

    y_RD: jax.Array
    pos_TX: jax.Array
    gates_TX: jax.Array


def run(x: Inputs, impl: Impl) -> jax.Array:
    return expert_sum(x.y_RD, x.pos_TX, x.gates_TX, impl=impl)


def inputs(case: Case, seed: int = 0) -> Inputs:
    """numpy arrays; no element is so small that it would not matter."""
    rng, T, X = np.random.default_rng(seed), case.rows, case.chosen
    R, here = T * X + 3, rng.random((T, X)) < case.share
    draw = lambda *shape: rng.choice((-1, 1), shape) * rng.uniform(0.5, 1.5, shape)  # noqa: E731
    pos = rng.permutation(R)[: T * X].reshape(T, X)
    y: Any = np.full((R, case.width), np.nan, jnp.dtype(case.dtype))
    y[pos[here]] = draw(int(here.sum()), case.width)
    pos = np.where(here, pos, rng.choice((-(2**31), -1), (T, X)))
    gates = np.where(here, rng.uniform(0.5, 1.5, (T, X)) / X, np.nan)
    return Inputs(y, pos.astype(np.int32), gates.astype(np.float32))  # type: ignore[arg-type]


CASES = (
    Case("1 row", 1, 8),
    Case("4 rows", 4, 4, share=0.6),
    Case("some here", 9, 10, share=0.3),
    Case("none here", 5, 2, share=0),
    Case("one choice", 7, 1, share=0.5),
    Case("odd width", 6, 3, width=100, share=0.7),
    Case("wide", 3, 8, width=2500),
    Case("bfloat16", 12, 8, width=256, share=0.5, dtype="bfloat16"),
    Case("Qwen3.5, 1024 rows", 1024, 10, width=4096, dtype="bfloat16", full=True),
)
