# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: the router, the routed experts wherever they are, the shared expert."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from qwen_spmd.config import Moe as MoeConfig
from qwen_spmd.layers.linear import einsum, sum_over_tp
from qwen_spmd.layers.moe_routes import NOWHERE, Route, route_on, routed
from qwen_spmd.mesh.axes import RANKS
from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.add_norm.reference import add
from qwen_spmd.pallas.linear import linear, linear_parts
from qwen_spmd.pallas.router import router as top_experts
from qwen_spmd.params import Moe

__all__ = ["Route", "Routing", "moe", "moe_sequences", "project", "route_on", "router"]


@struct.dataclass
class Routing:
    """Each row's X experts and their weights (float32, largest first), and the float32 router logits they come from."""

    experts_TX: jax.Array
    gates_TX: jax.Array
    logits_TE: jax.Array


Projected = tuple[jax.Array, ...]
"""Of a row, in float32: router logits [E] and, with a shared expert, its gate and up [F] and that expert's own gate
[1]."""


def project(p: Moe, l: jax.Array, x: jax.Array, impl: Impl) -> Projected:
    ws = [p.w_router[l]]
    if p.shared is not None and p.w_shared_gate is not None:
        ws += [p.shared.w_gate[l], p.shared.w_up[l], p.w_shared_gate[l][:, None]]
    return linear(x, ws, out_dtypes=[jnp.float32] * len(ws), impl=impl)


def router(logits_TE: jax.Array, cfg: MoeConfig, impl: Impl) -> Routing:
    experts, gates = top_experts(logits_TE, cfg.experts_per_token, normalise=cfg.norm_topk_prob, impl=impl)
    return Routing(experts, gates, logits_TE)


def moe(
    p: Moe, l: jax.Array, x_TD: jax.Array, valid_T: jax.Array, *, cfg: MoeConfig, impl: Impl, route: Route
) -> tuple[tuple[jax.Array, ...], Routing, jax.Array]:
    """[T, D] -> terms [S, T, D], the same on all of `tp`; the routing; int32 [Q], rows that each own place has computed.

    Runs inside shard_map, on a rank's rows and a device's share of the weights; x must be typed as varying over `ep`.
    Padding rows (valid_T False) go to no expert and come back as zeros, whatever they hold.
    """
    projected = project(p, l, x_TD, impl)
    routing = router(projected[0], cfg, impl)
    places_TX = jnp.where(valid_T[:, None], _places(p, l, routing.experts_TX), NOWHERE)
    # Needs nothing that travels, so it can be computed meanwhile.
    shared = _shared(p, l, projected, valid_T, x_TD.dtype, impl)
    y_TD, load_Q = routed(p, l, x_TD, places_TX, routing.gates_TX, impl=impl, route=route)
    terms = y_TD[None], *shared
    if jax.lax.axis_size("tp") > 1:  # one sum travels
        terms = (add(y_TD.astype(jnp.float32), shared)[None],)
    return tuple(sum_over_tp(term, x_TD.dtype) for term in terms), routing, load_Q


def moe_sequences(p: Moe, l: jax.Array, x_BTD: jax.Array, *, cfg: MoeConfig) -> tuple[jax.Array, Routing]:
    """The same for training, differentiable, on whole weights: every expert sees every row, the gates choose."""
    projected = project(p, l, x_BTD, "reference")
    routing = router(projected[0], cfg, "reference")
    one_hot = jax.nn.one_hot(routing.experts_TX, cfg.num_experts, dtype=jnp.float32)
    gates_BTE = jnp.sum(one_hot * routing.gates_TX[..., None], -2).astype(x_BTD.dtype)
    h = jax.nn.silu(einsum("btd,edm->btem", x_BTD, p.w_gate[l])) * einsum("btd,edm->btem", x_BTD, p.w_up[l])
    y = einsum("btem,emd->btd", h * gates_BTE[..., None], p.w_down[l])
    for term in _shared(p, l, projected, jnp.ones((), bool), x_BTD.dtype, "reference"):
        y += term[0]
    return y, routing


def _places(p: Moe, l: jax.Array, experts_TX: jax.Array) -> jax.Array:
    """A place of each expert. Rows and ranks take turns among its copies."""
    if p.places is None:
        return experts_TX
    turn_T = jnp.arange(experts_TX.shape[0]) + jax.lax.axis_index(RANKS)
    return p.places[l, experts_TX, turn_T[:, None] % p.places.shape[2]]


def _shared(
    p: Moe, l: jax.Array, projected: Projected, valid: jax.Array, dtype: Any, impl: Impl
) -> tuple[jax.Array, ...]:
    """Parts [S, .., D] of the shared expert behind its gate, of the columns that are here; zeros where not valid, and
    nothing where the model has none."""
    if p.shared is None:
        return ()
    _, gate, up, shared_gate = projected
    h = jax.nn.silu(gate) * up * jax.nn.sigmoid(shared_gate)
    return (linear_parts(jnp.where(valid[..., None], h, 0).astype(dtype), p.shared.w_down[l], impl=impl),)
