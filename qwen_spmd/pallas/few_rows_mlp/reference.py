# SPDX-License-Identifier: Apache-2.0
"""SwiGLU of few rows in plain jnp: a loop over the experts that own any."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwen_spmd.mesh.vary import vary_like
from qwen_spmd.pallas.grouped_mlp.reference import swiglu


def few_rows_mlp(
    x_TD: jax.Array,
    own_TE: jax.Array,
    gates_TE: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    layer: jax.Array,
) -> jax.Array:
    active_E = jnp.any(own_TE, 0)
    first_E = jnp.argsort(~active_E, stable=True)  # the active ones, in order

    def visit(i: jax.Array, y_TD: jax.Array) -> jax.Array:
        e = first_E[i]
        y = swiglu(x_TD, w_gate[layer, e], w_up[layer, e], w_down[layer, e]).astype(jnp.float32)
        return y_TD + jnp.where(own_TE[:, e, None], gates_TE[:, e, None] * y, 0)

    y_TD = vary_like(jnp.zeros(x_TD.shape, jnp.float32), x_TD, own_TE, gates_TE, w_gate)
    return jax.lax.fori_loop(0, jnp.sum(active_E), visit, y_TD)
