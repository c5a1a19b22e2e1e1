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
from qwen_spmd.pallas.add_norm import Term
from qwen_spmd.pallas.add_norm.reference import add, total_of
from qwen_spmd.pallas.linear import linear_parts
from qwen_spmd.pallas.router import router as top_experts
from qwen_spmd.params import Moe

__all__ = ["Route", "Routing", "moe", "moe_sequences", "project", "route_on", "router"]


@struct.dataclass
class Routing:
    """Each row's X experts and their weights (float32, largest first), and the float32 router logits they come from.

    Padding rows have -1 for experts, and anything for weights.
    """

    experts_TX: jax.Array
    gates_TX: jax.Array
    logits_TE: jax.Array


Projected = tuple[jax.Array, ...]
"""Parts [S, .., *] in float32: router logits [E] and, with a shared expert, its gate and up [F] and that expert's own
gate [1]."""


def project(p: Moe, l: jax.Array, x: jax.Array, impl: Impl) -> Projected:
    ws = [p.w_router[l]]
    if p.shared is not None:
        assert p.w_shared_gate is not None
        ws += [p.shared.w_gate[l], p.shared.w_up[l], p.w_shared_gate[l][:, None]]
    return linear_parts(x, ws, dtype=jnp.float32, impl=impl)


def router(parts_STE: jax.Array, valid_T: jax.Array, cfg: MoeConfig, impl: Impl) -> Routing:
    X, norm = cfg.experts_per_token, cfg.norm_topk_prob
    experts, gates = top_experts(parts_STE, valid_T, X, normalise=norm, impl=impl)
    return Routing(experts, gates, total_of(parts_STE))


def moe(
    p: Moe, l: jax.Array, x_TD: jax.Array, valid_T: jax.Array, *, cfg: MoeConfig, impl: Impl, route: Route
) -> tuple[tuple[Term, ...], Routing, jax.Array]:
    """[T, D] -> (terms whose sum is [T, D], the same on all of `tp`; the routing; int32 [Q], rows of each own place).

    Runs inside shard_map, on a rank's rows and a device's share of the weights; x must be typed as varying over `ep`.
    Padding rows (valid_T False) go to no expert and come back as zeros, whatever they hold.
    """
    projected = project(p, l, x_TD, impl)
    routing = router(projected[0], valid_T, cfg, impl)
    places_TX = _places(p, l, routing.experts_TX)
    # Needs nothing that travels, so it can be computed meanwhile.
    shared = _shared(p, l, projected, valid_T, x_TD.dtype, impl)
    y, load_Q = routed(p, l, x_TD, places_TX, routing.gates_TX, impl=impl, route=route)
    if jax.lax.axis_size("tp") == 1:  # nothing travels: what the sums are typed as alone changes
        return jax.lax.psum((y, *shared), "tp"), routing, load_Q
    sum_TD = add(jnp.zeros(x_TD.shape, jnp.float32), (y, *shared))
    return (sum_over_tp(sum_TD[None], x_TD.dtype),), routing, load_Q


def moe_sequences(p: Moe, l: jax.Array, x_BTD: jax.Array, *, cfg: MoeConfig) -> tuple[jax.Array, Routing]:
    """The same for training, differentiable, on whole weights: every expert sees every row, the gates choose."""
    projected, valid_BT = project(p, l, x_BTD, "reference"), jnp.ones(x_BTD.shape[:2], bool)
    routing = router(projected[0], valid_BT, cfg, "reference")
    one_hot = jax.nn.one_hot(routing.experts_TX, cfg.num_experts, dtype=jnp.float32)
    gates_BTE = jnp.sum(one_hot * routing.gates_TX[..., None], -2).astype(x_BTD.dtype)
    h = jax.nn.silu(einsum("btd,edm->btem", x_BTD, p.w_gate[l])) * einsum("btd,edm->btem", x_BTD, p.w_up[l])
    y = einsum("btem,emd->btd", h * gates_BTE[..., None], p.w_down[l])
    for term in _shared(p, l, projected, valid_BT, x_BTD.dtype, "reference"):
        y += term[0]
    return y, routing


def _places(p: Moe, l: jax.Array, experts_TX: jax.Array) -> jax.Array:
    """A place of each expert, NOWHERE of none. Rows and ranks take turns among its copies."""
    if p.places is None:
        return experts_TX
    turn_T = jnp.arange(experts_TX.shape[0]) + jax.lax.axis_index(RANKS)
    places_TX = p.places[l, experts_TX, turn_T[:, None] % p.places.shape[2]]
    return jnp.where(experts_TX < 0, NOWHERE, places_TX)


def _shared(
    p: Moe, l: jax.Array, projected: Projected, valid: jax.Array, dtype: Any, impl: Impl
) -> tuple[jax.Array, ...]:
    """Parts [S, .., D] of the shared expert behind its gate, of the columns that are here; zeros where not valid, and
    nothing where the model has none."""
    if p.shared is None:
        return ()
    _, gate, up, shared_gate = map(total_of, projected)
    h = jax.nn.silu(gate) * up * jax.nn.sigmoid(shared_gate)
    h = jnp.where(valid[..., None], h, 0).astype(dtype)
    return linear_parts(h, (p.shared.w_down[l],), dtype=dtype, impl=impl)
