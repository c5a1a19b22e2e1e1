# SPDX-License-Identifier: Apache-2.0
"""Softmax and top-k in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwen_spmd.pallas.add_norm.reference import total_of


def router(
    parts_STE: jax.Array, valid_T: jax.Array, experts_per_row: int, normalise: bool
) -> tuple[jax.Array, jax.Array]:
    gates_TX, experts_TX = jax.lax.top_k(jax.nn.softmax(total_of(parts_STE)), experts_per_row)
    if normalise:
        gates_TX = gates_TX / gates_TX.sum(-1, keepdims=True)
    return jnp.where(valid_T[..., None], experts_TX.astype(jnp.int32), -1), gates_TX
