# SPDX-License-Identifier: Apache-2.0
"""Each row's weighted sum of what its experts made of it, gathered from where they left it."""

from __future__ import annotations

import jax

from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.expert_sum import reference


def expert_sum(y_RD: jax.Array, pos_TX: jax.Array, own_TX: jax.Array, gates_TX: jax.Array, *, impl: Impl) -> jax.Array:
    """sum over x of gates[t, x] y[pos[t, x]], where own[t, x]; float32 [T, D], in order of x.

    y_RD in any dtype; pos_TX int32, own_TX bool, gates_TX float32. What is not own has no influence, whatever pos,
    gates and y hold there.
    """
    match impl:
        case "reference":
            return reference.expert_sum(y_RD, pos_TX, own_TX, gates_TX)
        case "gpu":
            from qwen_spmd.pallas.expert_sum import gpu

            return gpu.expert_sum(y_RD, pos_TX, own_TX, gates_TX)
