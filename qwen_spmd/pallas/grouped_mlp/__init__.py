# SPDX-License-Identifier: Apache-2.0
"""SwiGLU of many experts: a grouped matmul, gate and up fused, and a second one, down.

`grouped_mlp` takes rows sorted by expert. `few_rows_mlp` takes rows as they are and sums each one's experts: less to do
around the matmuls, for so few rows that an expert reads its weights once anyhow.
"""

from __future__ import annotations

import jax

from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.grouped_mlp import reference
from qwen_spmd.pallas.scaled import Microscaled, Scaled

Weights = jax.Array | Scaled | Microscaled


def grouped_mlp(
    x_TD: jax.Array,
    rows_R: jax.Array,
    sizes_E: jax.Array,
    w_gate: Weights,
    w_up: Weights,
    w_down: Weights,
    layer: jax.Array,
    *,
    expected: int,
    impl: Impl,
) -> jax.Array:
    """y[r] = (silu(x[rows[r]] w_gate[e]) * (x[rows[r]] w_up[e])) w_down[e], with e the expert of r.

    rows_R    int32; the first sizes[0] are rows of x that go to expert 0, then those of expert 1, ...
    sizes_E   int32, how many go to each expert; their sum may be less than R, what is beyond may hold anything
    w_gate, w_up [L, E, D, M], w_down [L, E, M, D]: all layers' experts, in x's dtype, one that is cast to it, or
    Scaled (of the experts that are used only), or all three Microscaled in one format; `layer` int32 scalar, which of
    the L
    expected  about how many of the R are taken; static, a choice of tiles depends on it

    Returns [R, D] in x's dtype; rows beyond the last expert's hold anything. Products accumulate in float32, and silu's
    product with up is rounded to x's dtype. Experts without rows cost nothing.

    Microscaled weights multiply microscaled rows: x, and silu's product with up once it is rounded, are quantised row
    by row, to mxfp8 for weights in mxfp8 and mxfp4 and to nvfp4 for nvfp4 (`scaled.OF_ROWS`).
    """
    match impl:
        case "reference" | "tpu":
            return reference.grouped_mlp(x_TD, rows_R, sizes_E, w_gate, w_up, w_down, layer, expected)
        case "gpu":
            from qwen_spmd.pallas.grouped_mlp import gpu

            return gpu.grouped_mlp(x_TD, rows_R, sizes_E, w_gate, w_up, w_down, layer, expected)
