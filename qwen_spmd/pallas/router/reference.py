# SPDX-License-Identifier: Apache-2.0
"""Softmax and top-k in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def router(logits_TE: jax.Array, experts_per_row: int, normalise: bool) -> tuple[jax.Array, jax.Array]:
    gates_TX, experts_TX = jax.lax.top_k(jax.nn.softmax(logits_TE.astype(jnp.float32)), experts_per_row)
    if normalise:
        gates_TX = gates_TX / gates_TX.sum(-1, keepdims=True)
    return experts_TX.astype(jnp.int32), gates_TX
