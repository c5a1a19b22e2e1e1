# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: route, sort rows by expert, grouped SwiGLU, weighted sum, shared expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from qwen_spmd.config import Moe as MoeConfig
from qwen_spmd.layers.linear import einsum
from qwen_spmd.layers.mlp import mlp
from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.grouped_mlp import grouped_mlp
from qwen_spmd.params import Moe


@struct.dataclass
class Routing:
    """Each row's X experts and their weights (float32, largest first), and the float32 router logits they come from."""

    experts_TX: jax.Array
    gates_TX: jax.Array
    logits_TE: jax.Array


def route(p: Moe, l: jax.Array, x: jax.Array, cfg: MoeConfig) -> Routing:
    """Softmax over all experts, then the top X; renormalised where the model does. Ties: the lower index."""
    logits = einsum("...d,de->...e", x, p.w_router[l], out_dtype=jnp.float32)
    gates, experts = jax.lax.top_k(jax.nn.softmax(logits), cfg.experts_per_token)
    if cfg.norm_topk_prob:
        gates = gates / gates.sum(-1, keepdims=True)
    return Routing(experts.astype(jnp.int32), gates, logits)


def moe(
    p: Moe, l: jax.Array, x_TD: jax.Array, valid_T: jax.Array, *, cfg: MoeConfig, impl: Impl
) -> tuple[jax.Array, Routing]:
    """[T, D] -> [T, D]. Padding rows go to no expert and come back as zeros."""
    routing = route(p, l, x_TD, cfg)
    (T, X), E = routing.experts_TX.shape, cfg.num_experts
    experts = jnp.where(valid_T[:, None], routing.experts_TX, E).reshape(-1)
    order = jnp.argsort(experts, stable=True)
    sizes_E = jnp.bincount(experts, length=E)  # rows of expert E, the padding, are counted nowhere
    y = grouped_mlp(x_TD[order // X], sizes_E, p.w_gate, p.w_up, p.w_down, l, impl=impl)
    y_TXD = jnp.zeros_like(y).at[order].set(y).reshape(T, X, -1)
    gates_TX = jnp.where(valid_T[:, None], routing.gates_TX, 0)
    y_TD = jnp.einsum("txd,tx->td", y_TXD.astype(jnp.float32), gates_TX, precision=jax.lax.Precision.HIGHEST)
    shared = jnp.where(valid_T[:, None], _shared(p, l, x_TD), 0)
    return (y_TD + shared).astype(x_TD.dtype), routing


def moe_sequences(p: Moe, l: jax.Array, x_BTD: jax.Array, *, cfg: MoeConfig) -> tuple[jax.Array, Routing]:
    """The same for training, differentiable: every expert sees every row, the gates choose."""
    routing = route(p, l, x_BTD, cfg)
    one_hot = jax.nn.one_hot(routing.experts_TX, cfg.num_experts, dtype=jnp.float32)
    gates_BTE = jnp.sum(one_hot * routing.gates_TX[..., None], -2).astype(x_BTD.dtype)
    h = jax.nn.silu(einsum("btd,edm->btem", x_BTD, p.w_gate[l])) * einsum("btd,edm->btem", x_BTD, p.w_up[l])
    y = einsum("btem,emd->btd", h * gates_BTE[..., None], p.w_down[l])
    return y + _shared(p, l, x_BTD).astype(y.dtype), routing


def _shared(p: Moe, l: jax.Array, x: jax.Array) -> jax.Array:
    """The shared expert behind its gate, float32; 0 where the model has none."""
    if p.shared is None or p.w_shared_gate is None:
        return jnp.zeros((1,) * x.ndim, jnp.float32)
    gate = jax.nn.sigmoid(einsum("...d,d->...", x, p.w_shared_gate[l], out_dtype=jnp.float32))
    return gate[..., None] * mlp(p.shared, l, x).astype(jnp.float32)
