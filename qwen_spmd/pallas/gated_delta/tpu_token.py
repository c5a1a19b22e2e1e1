# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on a TPU, a token at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from qwen_spmd.pallas.gated_delta.tpu_pieces import (
    BETA,
    DECAY,
    KQ,
    KS,
    PITCH,
    QS,
    D,
    O,
    Scratch,
    Sizes,
    V,
    convolve,
    normalise,
    put_tail,
    split,
    take_tail,
)


def one_token(n: Sizes, t: Any, x: jax.Array, s: Scratch, state: Any, tail: Any, o: Any) -> None:
    """Row t of the block, x [N, Y]. `state` [U, Y, Z] and `tail` [W-1, C] move on by a token, in their dtypes: a window
    of several tokens leaves what as many steps of one leave.

    o = S'^T q with S' = e^g S + k d^T is read from the state before: e^g S^T q + (k . q) d.
    """
    Y, P, J, VP = n.Y, n.P, n.J, n.V * n.P
    take_tail(n, tail, s.window, 0)
    s.window[pl.ds((n.W - 1) * n.pitch, n.N)] = x
    put_tail(n, s.window, n.pitch, tail)
    at = [pl.ds(w * n.pitch, n.N) for w in range(n.W)]
    s.u[...] = convolve([s.window[x] for x in at], [s.taps[x] for x in at])
    per_key = n.N // J
    q = normalise(s.u[pl.ds(0, J, stride=per_key)]) * Y**-0.5
    k = normalise(s.u[pl.ds(1, J, stride=per_key)])
    kq = jnp.broadcast_to(jnp.sum(k * q, -1, keepdims=True), (J, Y))
    for m in range(VP):
        s.of_value[V, pl.ds(m, J, stride=VP)] = s.u[pl.ds(2 + m, J, stride=per_key)]
        s.of_value[KQ, pl.ds(m, J, stride=VP)] = kq
    diagonal = lax.broadcasted_iota(jnp.int32, (n.U, n.U), 0) == lax.broadcasted_iota(jnp.int32, (n.U, n.U), 1)
    for which, f in ((DECAY, jnp.exp), (BETA, lambda beta: beta)):
        column = jnp.sum(jnp.where(diagonal, f(s.gates[which, pl.ds(t, 1)]), 0), -1, keepdims=True)
        for p in range(P):
            s.of_value[which, pl.ds(p, n.U, stride=P)] = jnp.broadcast_to(column, (n.U, Y))
    k_YJ = k.T
    multiply = multiply_bfloat16 if state.dtype == jnp.bfloat16 else multiply_float32
    kS, qS = multiply(n, q, k, s, state)
    decay, beta, v, kq = (s.of_value[which] for which in (DECAY, BETA, V, KQ))
    d = beta * (v - decay * kS)
    s.of_value[D] = d
    s.of_value[O] = decay * qS + kq * d
    for p in range(P):
        o[t, :, p * Y : (p + 1) * Y] = s.of_value[O, pl.ds(p, n.U, stride=P)].astype(o.dtype)
    for j, u, p, at in n.tiles():
        columns = slice(p * Y, (p + 1) * Y)
        decay, d = s.of_value[DECAY, at : at + 1], s.of_value[D, at : at + 1]
        after = decay * state[u, :, columns].astype(jnp.float32) + k_YJ[:, j : j + 1] * d
        state[u, :, columns] = after.astype(state.dtype)


def multiply_float32(n: Sizes, q: jax.Array, k: jax.Array, s: Scratch, state: Any) -> tuple[jax.Array, jax.Array]:
    """(S^T k, S^T q) [U P, Y] of float32 states; q and k [J, Y]."""
    of_key = (KS, k.T), (QS, q.T)
    for j, u, p, at in n.tiles():
        S = state[u, :, p * n.Y : (p + 1) * n.Y]
        for which, x in of_key:
            s.of_value[which, at : at + 1] = jnp.sum(S * x[:, j : j + 1], 0, keepdims=True)
    return s.of_value[KS], s.of_value[QS]


def multiply_bfloat16(n: Sizes, q: jax.Array, k: jax.Array, s: Scratch, state: Any) -> tuple[jax.Array, jax.Array]:
    """The same of bfloat16 states, which are exact in the matrix unit. So is a float32 vector in three rows.

    Two key heads share a product, with zeros in each one's rows where the other's states are: 256 rows fill the unit.
    """
    Y, VP = n.Y, n.V * n.P
    for r, part in enumerate((*split(k), *split(q), jnp.zeros_like(k), jnp.zeros_like(k))):
        s.rows[pl.ds(r, n.J, stride=PITCH)] = part
    for pair in (range(n.J)[j : j + 2] for j in range(0, n.J, 2)):
        own = [s.rows[pl.ds(PITCH * j, 8)] for j in pair]
        rows = [jnp.concatenate([x if x is y else jnp.zeros_like(x) for y in own], 1) for x in own]
        states = [jnp.concatenate([state[j * n.V + v] for v in range(n.V)], 1) for j in pair]
        products = jnp.dot(
            jnp.concatenate(rows).astype(jnp.bfloat16), jnp.concatenate(states), preferred_element_type=jnp.float32
        )
        for i, j in enumerate(pair):
            for m in range(VP):
                tile = products[8 * i : 8 * i + 8, m * Y : (m + 1) * Y]
                s.products[pl.ds(PITCH * (j * VP + m), 8)] = tile

    def total(first: int) -> jax.Array:
        parts = [s.products[pl.ds(first + i, n.U * n.P, stride=PITCH)] for i in range(3)]
        return parts[0] + parts[1] + parts[2]

    return total(0), total(3)
