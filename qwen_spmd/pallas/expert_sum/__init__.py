# SPDX-License-Identifier: Apache-2.0
"""Each row's weighted sum of what its experts made of it, gathered from where they left it."""

from __future__ import annotations

import jax

from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.expert_sum import reference


def expert_sum(y_RD: jax.Array, pos_TX: jax.Array, gates_TX: jax.Array, *, impl: Impl) -> jax.Array:
    """sum over x of gates[t, x] y[pos[t, x]]; float32 [T, D], in order of x.

    y_RD in any dtype; pos_TX int32, gates_TX float32. Where pos is negative, nothing is added, whatever gates hold.
    """
    match impl:
        case "reference" | "tpu":
            return reference.expert_sum(y_RD, pos_TX, gates_TX)
        case "gpu":
            from qwen_spmd.pallas.expert_sum import gpu

            return gpu.expert_sum(y_RD, pos_TX, gates_TX)
