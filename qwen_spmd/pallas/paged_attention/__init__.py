# SPDX-License-Identifier: Apache-2.0
"""Causal grouped-query attention of a flat ragged batch over paged keys and values, which it writes itself."""

from __future__ import annotations

import jax

from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.paged_attention import reference
from qwen_spmd.state import Ragged


def paged_attention(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    rows: Ragged,
    *,
    impl: Impl,
) -> tuple[jax.Array, jax.Array]:
    """Write the new keys and values, then attend each row to its sequence's first `pos + 1` tokens.

    q_TNH, k_TKH, v_TKH  the step's queries, keys (both after norm and rope) and values; N a multiple of K
    kv                   [L, P, K, 2, S, H], all layers' pages, in q's dtype or float8_e4m3fn; updated in place when
                         donated. Eight bits have no scale: stored values saturate, loaded ones are cast to q's dtype
    layer                int32 scalar, which of the L
    rows                 the batch's metadata

    Returns o_TNH in q's dtype and kv. Softmax and accumulation are float32, the scale is H**-0.5. Padding rows return
    zeros and write to page 0. Nothing but a sequence's own first kv_len tokens influences it, whatever pages hold.
    """
    match impl:
        case "reference":
            return reference.paged_attention(q_TNH, k_TKH, v_TKH, kv, layer, rows)
        case "gpu":
            from qwen_spmd.pallas.paged_attention import gpu

            return gpu.paged_attention(q_TNH, k_TKH, v_TKH, kv, layer, rows)
        case "tpu":
            from qwen_spmd.pallas.paged_attention import tpu

            return tpu.paged_attention(q_TNH, k_TKH, v_TKH, kv, layer, rows)
