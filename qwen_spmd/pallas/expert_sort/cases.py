# SPDX-License-Identifier: Apache-2.0
"""Named cases of sorting by expert: few choices and many, on both sides of experts that are here."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import numpy as np
from flax import struct

from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.expert_sort import Sorted, expert_sort


@dataclasses.dataclass(frozen=True)
class Case:
    """`experts` of `total` are here, those from `first` on; a padding row (`padding` of them) has none at all.

    load  uniform: drawn evenly; one: all choices are of one expert that is here
    full  too big for a CPU test
    """

    name: str
    rows: int
    chosen: int
    experts: int
    total: int | None = None
    first: int = 0
    padding: int = 0
    load: Literal["uniform", "one"] = "uniform"
    full: bool = False


@struct.dataclass
class Inputs:
    """Arguments of the op."""

    experts_TX: jax.Array
    num_experts: int = struct.field(pytree_node=False)


def run(x: Inputs, impl: Impl) -> Sorted:
    return expert_sort(x.experts_TX, x.num_experts, impl=impl)


def inputs(case: Case, seed: int = 0) -> Inputs:
    """A numpy array; a row's choices differ, as far as there are experts."""
    rng, total = np.random.default_rng(seed), case.total or case.experts
    draw = rng.permuted(np.tile(np.arange(max(total, case.chosen)) % total, (case.rows, 1)), axis=1)[:, : case.chosen]
    if case.load == "one":
        draw[:] = case.first + case.experts // 2
    local = (draw - case.first).astype(np.int32)
    local[rng.permutation(case.rows)[: case.padding]] = np.iinfo(np.int32).min
    return Inputs(local, case.experts)  # type: ignore[arg-type]


CASES = (
    Case("1 row", 1, 8, 256),
    Case("8 rows, 7 of padding", 8, 8, 256, padding=7),
    Case("64 rows of 256", 64, 8, 256),
    Case("a rank's 64 of 512", 33, 10, 64, total=512, first=128),
    Case("a rank's last 16 of 128", 40, 8, 16, total=128, first=112, padding=3),
    Case("100 rows of 512", 100, 10, 512, padding=7),
    Case("none here", 5, 2, 4, total=64, first=60, padding=5),
    Case("all to one", 70, 3, 60, load="one"),
    Case("one expert", 9, 1, 1),
    Case("many rows", 700, 8, 40, total=60, first=7, padding=50),
    Case("many rows to one", 513, 8, 16, load="one"),
    Case("2,100 rows", 2100, 8, 24, padding=11),
    Case("Qwen3.5, 8192 rows", 8192, 10, 512, full=True),
)
