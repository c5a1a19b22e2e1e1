# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: the router, the routed experts wherever they are, the shared expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from qwen_spmd.config import Moe as MoeConfig
from qwen_spmd.layers.linear import einsum
from qwen_spmd.layers.mlp import mlp
from qwen_spmd.layers.moe_routes import NOWHERE, Route, route_on, routed
from qwen_spmd.mesh.axes import RANKS
from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.router import router as top_experts
from qwen_spmd.params import Moe

__all__ = ["Route", "Routing", "moe", "moe_sequences", "route_on", "router"]


@struct.dataclass
class Routing:
    """Each row's X experts and their weights (float32, largest first), and the float32 router logits they come from."""

    experts_TX: jax.Array
    gates_TX: jax.Array
    logits_TE: jax.Array


def router(p: Moe, l: jax.Array, x: jax.Array, cfg: MoeConfig, impl: Impl) -> Routing:
    logits = einsum("...d,de->...e", x, p.w_router[l], out_dtype=jnp.float32)
    experts, gates = top_experts(logits, cfg.experts_per_token, normalise=cfg.norm_topk_prob, impl=impl)
    return Routing(experts, gates, logits)


def moe(
    p: Moe, l: jax.Array, x_TD: jax.Array, valid_T: jax.Array, *, cfg: MoeConfig, impl: Impl, route: Route
) -> tuple[jax.Array, Routing, jax.Array]:
    """[T, D] -> [T, D], the same on all of `tp`; the routing; int32 [Q], rows that each own place has computed.

    Runs inside shard_map, on a rank's rows and a device's share of the weights; x must be typed as varying over `ep`.
    Padding rows (valid_T False) go to no expert and come back as zeros, whatever they hold.
    """
    routing = router(p, l, x_TD, cfg, impl)
    places_TX = jnp.where(valid_T[:, None], _places(p, l, routing.experts_TX), NOWHERE)
    gates_TX = jnp.where(valid_T[:, None], routing.gates_TX, 0)
    # Needs nothing that travels, so it can be computed meanwhile.
    shared_TD = jnp.where(valid_T[:, None], _shared(p, l, x_TD), 0)
    y_TD, load_Q = routed(p, l, x_TD, places_TX, gates_TX, impl=impl, route=route)
    y_TD = (y_TD.astype(jnp.float32) + shared_TD).astype(x_TD.dtype)
    return jax.lax.psum(y_TD, "tp"), routing, load_Q


def moe_sequences(p: Moe, l: jax.Array, x_BTD: jax.Array, *, cfg: MoeConfig) -> tuple[jax.Array, Routing]:
    """The same for training, differentiable, on whole weights: every expert sees every row, the gates choose."""
    routing = router(p, l, x_BTD, cfg, "reference")
    one_hot = jax.nn.one_hot(routing.experts_TX, cfg.num_experts, dtype=jnp.float32)
    gates_BTE = jnp.sum(one_hot * routing.gates_TX[..., None], -2).astype(x_BTD.dtype)
    h = jax.nn.silu(einsum("btd,edm->btem", x_BTD, p.w_gate[l])) * einsum("btd,edm->btem", x_BTD, p.w_up[l])
    y = einsum("btem,emd->btd", h * gates_BTE[..., None], p.w_down[l])
    return y + _shared(p, l, x_BTD).astype(y.dtype), routing


def _places(p: Moe, l: jax.Array, experts_TX: jax.Array) -> jax.Array:
    """A place of each expert. Rows and ranks take turns among its copies."""
    if p.places is None:
        return experts_TX
    turn_T = jnp.arange(experts_TX.shape[0]) + jax.lax.axis_index(RANKS)
    return p.places[l, experts_TX, turn_T[:, None] % p.places.shape[2]]


def _shared(p: Moe, l: jax.Array, x: jax.Array) -> jax.Array:
    """The shared expert behind its gate, float32, of the columns that are here; 0 where the model has none."""
    if p.shared is None or p.w_shared_gate is None:
        return jnp.zeros((1,) * x.ndim, jnp.float32)
    gate = jax.nn.sigmoid(einsum("...d,d->...", x, p.w_shared_gate[l], out_dtype=jnp.float32))
    return gate[..., None] * mlp(p.shared, l, x).astype(jnp.float32)
