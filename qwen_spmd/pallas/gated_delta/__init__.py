# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet core: causal convolution, gates and the gated delta rule of a flat ragged batch (Yang et al. 2024)."""

from __future__ import annotations

import jax

from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.gated_delta import reference
from qwen_spmd.state import Ragged


def gated_delta(
    qkv_TC: jax.Array,
    b_TU: jax.Array,
    a_TU: jax.Array,
    conv_w_WC: jax.Array,
    a_log_U: jax.Array,
    dt_bias_U: jax.Array,
    conv: jax.Array,
    rec: jax.Array,
    layer: jax.Array,
    rows: Ragged,
    *,
    impl: Impl,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """u = silu(conv(qkv)); beta = sigmoid(b); g = -exp(a_log) softplus(a + dt_bias); then for each value head

        S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q

    with q and k l2-normalised (epsilon 1e-6 inside the root), q scaled by Y**-0.5. All in float32, but for matrix
    products on GPUs and TPUs, whose operands are rounded to qkv's dtype.

    qkv_TC      inputs of the convolution; C grouped by key head: query Y, key Y, then U / J values of Z
    conv_w_WC   taps; the last multiplies the current token
    conv        [L, R, W-1, C], rec [L, R, U, Y, Z]: all layers' states, updated in place when donated
    layer       int32 scalar, which of the L

    A sequence starts from the state in its read slot (zeros if `fresh`, whatever the slot holds) and leaves the state
    after its last token in its write slot, which no other sequence may read or write. Empty sequences leave every slot
    but 0 alone. Returns o_TUZ in qkv's dtype (zeros for padding), conv and rec.
    """
    match impl:
        case "reference":
            return reference.gated_delta(qkv_TC, b_TU, a_TU, conv_w_WC, a_log_U, dt_bias_U, conv, rec, layer, rows)
        case "gpu":
            from qwen_spmd.pallas.gated_delta import gpu

            return gpu.gated_delta(qkv_TC, b_TU, a_TU, conv_w_WC, a_log_U, dt_bias_U, conv, rec, layer, rows)
        case "tpu":
            from qwen_spmd.pallas.gated_delta import tpu

            return tpu.gated_delta(qkv_TC, b_TU, a_TU, conv_w_WC, a_log_U, dt_bias_U, conv, rec, layer, rows)
