# SPDX-License-Identifier: Apache-2.0
"""SwiGLU of many experts over so few rows that sorting them would cost more: each active expert sees all of them."""

from __future__ import annotations

import jax

from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.few_rows_mlp import reference


def few_rows_mlp(
    x_TD: jax.Array,
    own_TE: jax.Array,
    gates_TE: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    layer: jax.Array,
    *,
    impl: Impl,
) -> jax.Array:
    """Sum over the experts e that own the row, own[t, e], of gates[t, e] times what `grouped_mlp` gives of x[t].

    own_TE bool, gates_TE float32; weights and `layer` as in `grouped_mlp`. Returns float32 [T, D]; zeros for a row that
    no expert owns, whatever x holds there. Each expert that owns a row is visited once, with all T rows.
    """
    match impl:
        case "reference" | "gpu" | "tpu":  # no GPU program has it (`FEW_ROWS` of moe_routes)
            return reference.few_rows_mlp(x_TD, own_TE, gates_TE, w_gate, w_up, w_down, layer)
