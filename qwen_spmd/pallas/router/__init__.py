# SPDX-License-Identifier: Apache-2.0
"""Which experts each row goes to, and with what weight."""

from __future__ import annotations

import jax

from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.router import reference


def router(
    parts_STE: jax.Array, valid_T: jax.Array, experts_per_row: int, *, normalise: bool, impl: Impl
) -> tuple[jax.Array, jax.Array]:
    """Softmax over all experts of logits that are sums over S, then the largest; `normalise`: their weights sum to one.

    Returns int32 experts and float32 gates [T, X], largest first; of equal ones, the lower index first. Computed in
    float32. Rows of NaN give ids of experts that exist, and rows that are not valid -1 in place of ids.
    """
    match impl:
        case "reference" | "tpu":
            return reference.router(parts_STE, valid_T, experts_per_row, normalise)
        case "gpu":
            from qwen_spmd.pallas.router import gpu

            return gpu.router(parts_STE, valid_T, experts_per_row, normalise)
