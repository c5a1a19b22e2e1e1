# SPDX-License-Identifier: Apache-2.0
"""Attention mixer: projections, qk-norm, rope, attention, output gate, output projection.

The step form works on a rank's share of the heads; where there are fewer KV heads than ranks of `tp`, several ranks
hold the same one, and the weights of all.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwen_spmd.config import ModelConfig
from qwen_spmd.layers.linear import sum_over_tp
from qwen_spmd.layers.norm import rms_norm
from qwen_spmd.layers.rope import rotate
from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.linear import linear, linear_parts
from qwen_spmd.pallas.paged_attention import paged_attention
from qwen_spmd.pallas.paged_attention.sequences import sequences
from qwen_spmd.params import Attention
from qwen_spmd.state import Ragged

CosSin = tuple[jax.Array, jax.Array]


def attention(
    p: Attention,
    l: jax.Array,
    x_TD: jax.Array,
    cos_sin: CosSin,
    kv: jax.Array,
    layer: jax.Array,
    rows: Ragged,
    *,
    cfg: ModelConfig,
    impl: Impl,
) -> tuple[jax.Array, jax.Array]:
    """One step of layer `l` of this stack, whose pages are `kv[layer]`. Returns parts [S, T, D] and kv."""
    q, k, v, gate = _project(p, _kv_weights(p, l, kv.shape[2]), l, x_TD, cos_sin, cfg, impl)
    o_TNH, kv = paged_attention(q, k, v, kv, layer, rows, impl=impl)
    (parts,) = linear_parts(_gated(o_TNH, gate), (p.w_o[l],), dtype=x_TD.dtype, impl=impl)
    return sum_over_tp(parts, x_TD.dtype), kv


def attention_sequences(
    p: Attention, l: jax.Array, x_BTD: jax.Array, cos_sin: CosSin, offset_T: jax.Array, *, cfg: ModelConfig
) -> jax.Array:
    """The same over whole sequences, differentiable."""
    q, k, v, gate = _project(p, (p.w_k[l], p.w_v[l]), l, x_BTD, cos_sin, cfg, "reference")
    o = _gated(sequences(q, k, v, offset_T), gate)
    return linear_parts(o, (p.w_o[l],), dtype=o.dtype, impl="reference")[0][0]


def _kv_weights(p: Attention, l: jax.Array, heads: int) -> tuple[jax.Array, jax.Array]:
    """`w_k[l]` and `w_v[l]` of the `heads` KV heads whose pages are here."""
    w_k, w_v = p.w_k[l], p.w_v[l]
    held = w_k.shape[1]
    if held == heads:
        return w_k, w_v
    assert heads == 1, "either a rank holds its own heads' weights, or those of all and the pages of one"
    head = jax.lax.axis_index("tp") * held // jax.lax.axis_size("tp")
    return jax.lax.dynamic_slice_in_dim(w_k, head, 1, 1), jax.lax.dynamic_slice_in_dim(w_v, head, 1, 1)


def _project(
    p: Attention,
    w_kv: tuple[jax.Array, jax.Array],
    l: jax.Array,
    x: jax.Array,
    cos_sin: CosSin,
    cfg: ModelConfig,
    impl: Impl,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """(q, k, v, the output gate's logits in float32)."""
    ws, dtypes = [p.w_q[l], *w_kv], [x.dtype] * 3
    if p.w_gate is not None:
        ws, dtypes = [*ws, p.w_gate[l]], [*dtypes, jnp.float32]
    q, k, v, *gate = linear(x, ws, out_dtypes=dtypes, impl=impl)
    norm = {"eps": cfg.norm_eps, "zero_centred": cfg.zero_centred_norms}
    q, k = rms_norm(q, p.q_norm[l], **norm), rms_norm(k, p.k_norm[l], **norm)
    return rotate(q, cos_sin), rotate(k, cos_sin), v, gate[0] if gate else None


def _gated(o: jax.Array, gate: jax.Array | None) -> jax.Array:
    return o if gate is None else (o.astype(jnp.float32) * jax.nn.sigmoid(gate)).astype(o.dtype)
