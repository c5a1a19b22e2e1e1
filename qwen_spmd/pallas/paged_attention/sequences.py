# SPDX-License-Identifier: Apache-2.0
"""Causal attention over whole sequences, differentiable: what training and traces use."""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30


def sequences(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, offset_T: jax.Array) -> jax.Array:
    """Each row attends to its own sequence so far. `offset_T` ([T] or [B, T]): the position within the sequence, so a
    0 starts one. Softmax is float32. Returns o_BTNH."""
    B, T, _, H = q_BTNH.shape
    q = q_BTNH.reshape(B, T, k_BTKH.shape[2], -1, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k_BTKH, preferred_element_type=jnp.float32) * H**-0.5
    first = jnp.arange(T) - offset_T
    seen = jnp.tri(T, dtype=bool) & (jnp.arange(T) >= first[..., :, None])
    seen = seen.reshape(-1, 1, 1, T, T)
    weights = jax.nn.softmax(jnp.where(seen, scores, MASKED), axis=-1).astype(v_BTKH.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v_BTKH).reshape(q_BTNH.shape)
