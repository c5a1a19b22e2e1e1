# SPDX-License-Identifier: Apache-2.0
"""Named cases of products of few rows: the projections of Qwen's layers, and ugly widths."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.add_norm.reference import total_of
from qwen_spmd.pallas.linear import linear, linear_parts


@dataclasses.dataclass(frozen=True)
class Case:
    """`rows` of `inner` by weights of these widths, and the first `widths[0]` results of each row by one back to
    `inner`, in parts. `full`: too big for a CPU test."""

    name: str
    rows: int
    inner: int
    widths: tuple[int, ...]
    dtype: str = "float32"
    full: bool = False


@struct.dataclass
class Inputs:
    """ws are [inner, width, 1], w_back [width of the first, 1, inner]: axes of several are one to the product."""

    x_TI: jax.Array
    ws: tuple[jax.Array, ...]
    w_back: jax.Array


def run(x: Inputs, impl: Impl) -> tuple[tuple[jax.Array, ...], jax.Array, tuple[jax.Array, ...]]:
    """(results, the first in x's dtype and the others in float32; what leads back; the results again, from parts)."""
    dtype = x.x_TI.dtype
    out = linear(x.x_TI, x.ws, out_dtypes=[dtype, *[jnp.float32] * (len(x.ws) - 1)], impl=impl)
    (back,) = linear_parts(out[0], (x.w_back,), dtype=dtype, impl=impl)
    ws = [w.reshape(len(w), -1) for w in x.ws]
    parts = linear_parts(x.x_TI, ws, dtype=jnp.float32, impl=impl)
    return out, *(jax.tree.map(total_of, y) for y in (back, parts))


def inputs(case: Case, seed: int = 0) -> Inputs:
    """numpy arrays of unit size; matrices scaled so that results are, too."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(case.dtype)

    def normal(*shape: int) -> Any:
        return (rng.standard_normal(shape, np.float32) * shape[0] ** -0.5).astype(dtype)

    I, O = case.inner, case.widths[0]
    x: Any = rng.standard_normal((case.rows, I), np.float32).astype(dtype)
    return Inputs(x, tuple(normal(I, width, 1) for width in case.widths), normal(O, 1, I))


_35B: dict[str, Any] = {"inner": 2048, "dtype": "bfloat16", "full": True}

CASES = (
    Case("1 row", 1, 64, (48,)),
    Case("3 rows, two", 3, 80, (64, 32)),
    Case("17 rows, odd widths", 17, 100, (70, 1, 33)),
    Case("64 rows, four", 64, 96, (96, 48, 4, 4)),
    Case("seven weights", 5, 64, (16, 16, 16, 16, 16, 8, 8)),
    Case("too many rows", 65, 64, (32, 16)),
    Case("few rows, bfloat16", 2, 256, (320, 64, 8, 8), dtype="bfloat16"),
    Case("64 rows, bfloat16", 64, 256, (192, 1), dtype="bfloat16"),
    *(Case(f"Qwen3.5-35B-A3B, delta, {T} rows", T, widths=(8192, 4096, 32, 32), **_35B) for T in (1, 64)),
    *(Case(f"Qwen3.5-35B-A3B, MoE, {T} rows", T, widths=(512, 512, 256, 1), **_35B) for T in (1, 64)),
    Case("Qwen3.5-397B, delta", 32, 4096, (12288, 8192, 64, 64), dtype="bfloat16", full=True),
)
