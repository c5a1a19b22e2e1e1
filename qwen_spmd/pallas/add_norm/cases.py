# SPDX-License-Identifier: Apache-2.0
"""Named cases of adding and normalising."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.add_norm import Gathered, Term, add_norm
from qwen_spmd.pallas.expert_sum import cases as expert_sum


@dataclasses.dataclass(frozen=True)
class Case:
    """`terms`: of how many parts each is; before them, what `experts` left is gathered. `full`: too big for a CPU."""

    name: str
    rows: int
    width: int
    terms: tuple[int, ...]
    experts: expert_sum.Case | None = None
    zero_centred: bool = True
    dtype: str = "float32"
    full: bool = False


@struct.dataclass
class Inputs:
    """Arguments of the op."""

    x_TD: jax.Array
    terms: tuple[Term, ...]
    w_D: jax.Array
    zero_centred: bool = struct.field(pytree_node=False)


EPS = 1e-6


def run(x: Inputs, impl: Impl) -> tuple[jax.Array, jax.Array]:
    return add_norm(x.x_TD, x.terms, x.w_D, eps=EPS, zero_centred=x.zero_centred, impl=impl)


def inputs(case: Case, seed: int = 0) -> Inputs:
    """numpy arrays; the last parts are in x's dtype, the others in float32."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(case.dtype)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32)

    terms: list[Any] = [normal(S, case.rows, case.width) / (2 * S**0.5) for S in case.terms]
    if terms:
        terms[-1] = terms[-1].astype(dtype)
    if case.experts:
        e = expert_sum.inputs(case.experts)
        terms.insert(0, Gathered(e.y_RD, e.pos_TX, e.gates_TX))
    x, w = normal(case.rows, case.width).astype(dtype), normal(case.width).astype(dtype)
    return Inputs(x, tuple(terms), w, case.zero_centred)


_FULL: dict[str, Any] = {"dtype": "bfloat16", "full": True}

CASES = (
    Case("1 row", 1, 64, (1,)),
    Case("nothing to add", 3, 48, ()),
    Case("parts", 5, 100, (3, 2)),
    Case("experts", 9, 64, (), expert_sum.Case("", 9, 10, share=0.3)),
    Case("experts and parts", 6, 100, (3, 1), expert_sum.Case("", 6, 3, width=100, share=0.7)),
    Case("not zero-centred", 4, 64, (2,), zero_centred=False),
    Case("many parts, bfloat16", 3, 1000, (8, 1), dtype="bfloat16"),
    Case("not zero-centred, bfloat16", 3, 256, (4,), zero_centred=False, dtype="bfloat16"),
    Case("Qwen3.5-35B-A3B", 64, 2048, (4,), expert_sum.Case("", 64, 8, 2048, dtype="bfloat16"), **_FULL),
    Case("Qwen3.5-397B", 2048, 4096, (1,), expert_sum.Case("", 2048, 10, 4096, dtype="bfloat16"), **_FULL),
)
