# SPDX-License-Identifier: Apache-2.0
"""Sorting rows by expert in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def expert_sort(experts_TX: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    T, X = experts_TX.shape
    here_TX = (experts_TX >= 0) & (experts_TX < num_experts)
    key_R = jnp.where(here_TX, experts_TX, num_experts).reshape(-1)
    order_R = jnp.argsort(key_R, stable=True)
    pos_TX = jnp.where(here_TX, jnp.argsort(order_R).reshape(T, X), -1).astype(jnp.int32)
    return (order_R // X).astype(jnp.int32), pos_TX, jnp.bincount(key_R, length=num_experts).astype(jnp.int32)
