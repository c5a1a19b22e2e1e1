# SPDX-License-Identifier: Apache-2.0
"""Attention mixer: projections, qk-norm, rope, attention, output gate, output projection.

The step form works on a rank's share of the heads; where there are fewer KV heads than ranks of `tp`, several ranks
hold the same one, and the weights of all.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwen_spmd.config import ModelConfig
from qwen_spmd.layers.linear import einsum
from qwen_spmd.layers.norm import rms_norm
from qwen_spmd.layers.rope import rotate
from qwen_spmd.pallas import Impl
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
    """One step of layer `l` of this stack, whose pages are `kv[layer]`. Returns [T, D] and kv."""
    q, k, v = _project(p, _kv_weights(p, l, kv.shape[2]), l, x_TD, cos_sin, cfg)
    o_TNH, kv = paged_attention(q, k, v, kv, layer, rows, impl=impl)
    return jax.lax.psum(_output(p, l, x_TD, o_TNH), "tp"), kv


def attention_sequences(
    p: Attention, l: jax.Array, x_BTD: jax.Array, cos_sin: CosSin, offset_T: jax.Array, *, cfg: ModelConfig
) -> jax.Array:
    """The same over whole sequences, differentiable."""
    q, k, v = _project(p, (p.w_k[l], p.w_v[l]), l, x_BTD, cos_sin, cfg)
    return _output(p, l, x_BTD, sequences(q, k, v, offset_T))


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
) -> tuple[jax.Array, jax.Array, jax.Array]:
    w_k, w_v = w_kv
    norm = {"eps": cfg.norm_eps, "zero_centred": cfg.zero_centred_norms}
    q = rms_norm(einsum("...d,dnh->...nh", x, p.w_q[l]), p.q_norm[l], **norm)
    k = rms_norm(einsum("...d,dkh->...kh", x, w_k), p.k_norm[l], **norm)
    return rotate(q, cos_sin), rotate(k, cos_sin), einsum("...d,dkh->...kh", x, w_v)


def _output(p: Attention, l: jax.Array, x: jax.Array, o: jax.Array) -> jax.Array:
    if p.w_gate is not None:
        gate = einsum("...d,dnh->...nh", x, p.w_gate[l], out_dtype=jnp.float32)
        o = (o.astype(jnp.float32) * jax.nn.sigmoid(gate)).astype(x.dtype)
    return einsum("...nh,nhd->...d", o, p.w_o[l])
