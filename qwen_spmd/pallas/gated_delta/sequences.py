# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet over whole sequences, differentiable: what training and traces use.

The chunked form with all that does not depend on the state computed for every chunk at once; only the state's own
recurrence is a loop. Matmuls have the platform's default precision.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from qwen_spmd.pallas.gated_delta.reference import decays, gates, split_heads, unit_lower_inverse

FORGET = -40.0
"""Log decay where a sequence starts: nothing of the one before is left."""


def sequences(
    qkv_BTC: jax.Array,
    b_BTU: jax.Array,
    a_BTU: jax.Array,
    conv_w_WC: jax.Array,
    a_log_U: jax.Array,
    dt_bias_U: jax.Array,
    offset_T: jax.Array,
    key_dim: int,
    value_dim: int,
) -> jax.Array:
    """As the op's contract, without history. `offset_T` ([T] or [B, T]): the position within the sequence, so a 0
    starts one. T is a multiple of 32. Returns o_BTUZ."""
    (B, T, U), W, Z = b_BTU.shape, conv_w_WC.shape[0], value_dim
    x = jnp.pad(qkv_BTC, ((0, 0), (W - 1, 0), (0, 0)))
    u = jnp.zeros((B, T, x.shape[-1]), jnp.float32)
    for back in range(W):
        known = jnp.where((offset_T >= back)[..., None], x[:, W - 1 - back : W - 1 - back + T], 0)
        u += known.astype(jnp.float32) * conv_w_WC[W - 1 - back].astype(jnp.float32)
    u = jax.nn.silu(u)
    q, k, v = split_heads(u, U, key_dim, value_dim)
    q, k = (jnp.repeat(x, U // x.shape[2], axis=2) for x in (q, k))
    g, beta = gates(b_BTU, a_BTU, a_log_U, dt_bias_U)
    g = jnp.where((offset_T == 0)[..., None], FORGET, g)
    size = chunk_size(T)

    def chunks(x: jax.Array) -> jax.Array:
        """[B, T, U, ..] -> [chunk, B, U, token, ..]."""
        x = x.reshape(B, T // size, size, *x.shape[2:])
        return jnp.moveaxis(x, (1, 0, 3, 2), (0, 1, 2, 3))

    q, k, v, g, beta = map(chunks, (q, k, v, g, beta))
    G = jnp.cumsum(g, -1)
    strict = jnp.tri(size, k=-1, dtype=bool)
    decay = decays(g)
    kt = jnp.swapaxes(k, -1, -2)
    A = jnp.where(strict, beta[..., None] * (k @ kt) * decay, 0)
    rhs = beta[..., None] * jnp.concatenate([v, jnp.exp(G)[..., None] * k], -1)
    solved = _inverse(A) @ rhs
    scores = (q @ kt) * decay
    xs = (
        solved[..., :Z],
        solved[..., Z:],
        jnp.exp(G)[..., None] * q,
        scores,
        decay[..., -1:, :] * kt,
        jnp.exp(G[..., -1:])[..., None],
    )

    def step(S: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        u, w, q, scores, kt, end = x
        n = u - w @ S
        return end * S + kt @ n, q @ S + scores @ n

    _, o = jax.lax.scan(step, jnp.zeros((B, U, key_dim, Z)), xs)
    return jnp.moveaxis(o, (0, 1, 2, 3), (1, 0, 3, 2)).reshape(B, T, U, Z).astype(qkv_BTC.dtype)


def chunk_size(T: int) -> int:
    """A power of two that divides T: more work within larger chunks, more steps of the loop with smaller ones."""
    wanted = min(max(32, T // 16), 128)
    return math.gcd(T, 1 << (wanted.bit_length() - 1))


@jax.custom_vjp
def _inverse(A: jax.Array) -> jax.Array:
    return unit_lower_inverse(A)


def _inverse_forward(A: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(A)
    return inverse, inverse


def _inverse_backward(inverse: jax.Array, d: jax.Array) -> tuple[jax.Array]:
    """-M^T d M^T for M = (I + A)^-1: two products instead of going back through those that made M."""
    t = jnp.swapaxes(inverse, -1, -2)
    return (-(t @ d @ t),)


_inverse.defvjp(_inverse_forward, _inverse_backward)
