# SPDX-License-Identifier: Apache-2.0
"""Which experts each row goes to, and with what weight."""

from __future__ import annotations

import jax

from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.router import reference


def router(logits_TE: jax.Array, experts_per_row: int, *, normalise: bool, impl: Impl) -> tuple[jax.Array, jax.Array]:
    """Softmax over all experts, then the largest; `normalise`: their weights sum to one.

    Returns int32 experts and float32 gates [T, X], largest first; of equal ones, the lower index first. Computed in
    float32. Rows of NaN give ids of experts that exist.
    """
    match impl:
        case "reference":
            return reference.router(logits_TE, experts_per_row, normalise)
        case "gpu":
            from qwen_spmd.pallas.router import gpu

            return gpu.router(logits_TE, experts_per_row, normalise)
