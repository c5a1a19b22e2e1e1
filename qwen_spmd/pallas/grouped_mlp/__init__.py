# SPDX-License-Identifier: Apache-2.0
"""SwiGLU of many experts: a grouped matmul, gate and up fused, and a second one, down.

`grouped_mlp` takes rows sorted by expert. `few_rows_mlp` takes rows as they are and sums each one's experts: less to do
around the matmuls, for so few rows that an expert reads its weights once anyhow.
"""

from __future__ import annotations

import jax

from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.grouped_mlp import reference


def grouped_mlp(
    x_TD: jax.Array,
    sizes_E: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    layer: jax.Array,
    *,
    impl: Impl,
) -> jax.Array:
    """(silu(x w_gate[e]) * (x w_up[e])) w_down[e], with e the expert of the row.

    x_TD      rows sorted by expert: the first sizes[0] are expert 0's, then expert 1's, ...
    sizes_E   int32, rows of each expert; their sum may be less than T
    w_gate, w_up [L, E, D, M], w_down [L, E, M, D]: all layers' experts, in x's dtype or one that is cast to it (the
    experts that are used only); `layer` int32 scalar, which of the L

    Returns [T, D] in x's dtype; rows beyond the last expert's are zero, whatever x holds there. Products accumulate in
    float32. Experts without rows cost nothing.
    """
    match impl:
        case "reference":
            return reference.grouped_mlp(x_TD, sizes_E, w_gate, w_up, w_down, layer)
