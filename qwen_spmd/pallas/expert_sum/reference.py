# SPDX-License-Identifier: Apache-2.0
"""Weighted sums of experts' rows in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def expert_sum(y_RD: jax.Array, pos_TX: jax.Array, gates_TX: jax.Array) -> jax.Array:
    """One x at a time: [T, X, D] is never in memory."""
    y_TD = jnp.zeros((pos_TX.shape[0], y_RD.shape[1]), jnp.float32)
    for x in range(pos_TX.shape[1]):
        pos_T = pos_TX[:, x]
        y = y_RD[jnp.maximum(pos_T, 0)].astype(jnp.float32)
        y_TD += jnp.where(pos_T[:, None] >= 0, gates_TX[:, x, None] * y, 0)
    return y_TD
