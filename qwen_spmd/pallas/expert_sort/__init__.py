# SPDX-License-Identifier: Apache-2.0
"""The order in which a device's experts take rows: all rows of the first, then all of the second, ..."""

from __future__ import annotations

import jax
from flax import struct

from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.expert_sort import reference


@struct.dataclass
class Sorted:
    """R = T X places, of which the first sum(sizes) are taken: row t's x-th choice has place pos[t, x].

    rows_R   int32, the t of each place        pos_TX   int32, the place of each choice; -1 if its expert is not here
    sizes_E  int32, choices of each expert

    Within an expert, places are in order of (t, x). Places that are not taken may hold anything.
    """

    rows_R: jax.Array
    pos_TX: jax.Array
    sizes_E: jax.Array


def expert_sort(experts_TX: jax.Array, num_experts: int, *, impl: Impl) -> Sorted:
    """Of int32 choices; those outside 0 to num_experts - 1 are not here and get no place."""
    match impl:
        case "reference" | "tpu":
            return Sorted(*reference.expert_sort(experts_TX, num_experts))
        case "gpu":
            from qwen_spmd.pallas.expert_sort import gpu

            return Sorted(*gpu.expert_sort(experts_TX, num_experts))
