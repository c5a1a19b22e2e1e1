# SPDX-License-Identifier: Apache-2.0
"""Products of the same rows with several weights, and products left in parts for the next kernel to add up.

A decode step reads every weight for a few rows, in matrices of some megabytes: what counts is that one launch has
enough to read, and that nothing small stands between two launches.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.typing import DTypeLike

from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.linear import reference


def linear(
    x: jax.Array, ws: Sequence[jax.Array], *, out_dtypes: Sequence[DTypeLike], impl: Impl
) -> tuple[jax.Array, ...]:
    """x [.., I] times each of ws [I, *O], each result [.., *O] in its out_dtype.

    Weights are cast to x's dtype, products accumulate in float32. float32 rows multiply in full float32.
    """
    match impl:
        case "reference" | "tpu":
            return reference.linear(x, ws, out_dtypes)
        case "gpu":
            from qwen_spmd.pallas.linear import gpu

            return gpu.linear(x, ws, out_dtypes)


def linear_parts(x: jax.Array, ws: Sequence[jax.Array], *, dtype: DTypeLike, impl: Impl) -> tuple[jax.Array, ...]:
    """x [.., *I] times each of ws [*I, O], as S terms of a sum: [S, .., O], with S as the implementation has it.

    They are float32, or a single term in this dtype.
    """
    match impl:
        case "reference" | "tpu":
            return reference.linear_parts(x, ws, dtype)
        case "gpu":
            from qwen_spmd.pallas.linear import gpu

            return gpu.linear_parts(x, ws, dtype)
