# SPDX-License-Identifier: Apache-2.0
"""Named cases of the router: Qwen's numbers of experts and ugly ones, with ties where logits are few integers."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from flax import struct

from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.router import router


@dataclasses.dataclass(frozen=True)
class Case:
    """`levels`: logits are integers below it, so that many are equal; None: normal. `spread` multiplies them.

    nan   rows that have a NaN
    parts, invalid  terms of each logit; rows that are not valid
    full  too big for a CPU test
    """

    name: str
    rows: int
    experts: int
    chosen: int
    normalise: bool = True
    levels: int | None = None
    spread: float = 1.0
    nan: int = 0
    parts: int = 1
    invalid: int = 0
    full: bool = False


@struct.dataclass
class Inputs:
    """Arguments of the op."""

    parts_STE: jax.Array
    valid_T: jax.Array
    chosen: int = struct.field(pytree_node=False)
    normalise: bool = struct.field(pytree_node=False)


def run(x: Inputs, impl: Impl) -> tuple[jax.Array, jax.Array]:
    return router(x.parts_STE, x.valid_T, x.chosen, normalise=x.normalise, impl=impl)


def inputs(case: Case, seed: int = 0) -> Inputs:
    """numpy arrays."""
    rng, shape = np.random.default_rng(seed), (case.parts, case.rows, case.experts)
    logits = rng.standard_normal(shape) if case.levels is None else rng.integers(0, case.levels, shape)
    logits = (case.spread * logits).astype(np.float32)
    logits[-1, rng.permutation(case.rows)[: case.nan], rng.integers(case.experts)] = np.nan
    valid = rng.permutation(case.rows) >= case.invalid
    return Inputs(logits, valid, case.chosen, case.normalise)  # type: ignore[arg-type]


CASES = (
    Case("1 row", 1, 256, 8),
    Case("5 rows of 128, top 8", 5, 128, 8),
    Case("7 rows of 512, top 10", 7, 512, 10),
    Case("not normalised", 3, 128, 8, normalise=False),
    Case("few logits, many ties", 6, 60, 4, levels=5),
    Case("all equal", 2, 256, 8, levels=1),
    Case("probabilities that vanish", 3, 128, 8, levels=40, spread=120),
    Case("rows of NaN", 5, 60, 4, nan=2),
    Case("parts, invalid rows", 6, 60, 4, parts=3, invalid=2),
    Case("one of one", 2, 1, 1),
    Case("all of 8", 3, 8, 8),
    Case("top 1", 4, 60, 1, normalise=False),
    Case("Qwen3.5, 8192 rows", 8192, 512, 10, full=True),
)
