# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on a TPU, many tokens of a sequence at a time: the WY form (Yang et al. 2024).

With products of 16-bit inputs, operands are rounded to bfloat16, as a state between steps may be, too; sums, decays and
what has no product are float32. Matrices [c, c] of several value heads of a key head lie side by side in a register's
lanes, a pack.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from qwen_spmd.pallas.gated_delta.tpu_pieces import (
    BETA,
    DECAY,
    Scratch,
    Sizes,
    normalise,
    put_tail,
    sigmoid,
    split,
    take_tail,
)

FROM_START, TO_END = range(2)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """float32 in VMEM, of one chunk.

    packs   [2, U / w, c, w c] log decay and write strength of each row, in all columns of its head's matrix
    decays  [2, U, c, Y] decay from the chunk's start up to each row, and from there to the end; the same in all lanes
    o       [c U P, Y] outputs
    """

    packs: Any
    decays: Any
    o: Any

    @staticmethod
    def shapes(n: Sizes) -> list[Any]:
        w = heads_in_pack(n)
        packs, decays, o = (2, n.U // w, n.c, w * n.c), (2, n.U, n.c, n.Y), (n.c * n.U * n.P, n.Y)
        return [pltpu.VMEM(shape, jnp.float32) for shape in (packs, decays, o)]


def heads_in_pack(n: Sizes) -> int:
    return 2 if n.V % 2 == 0 else 1


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def chunk(n: Sizes, lo: Any, hi: Any, s: Scratch, m: Chunk, state: Any, tail: Any, o: Any) -> None:
    """Rows lo to hi of the block; `state` [U, Y, Z] and `tail` [W-1, C] move on behind them."""
    take_tail(n, tail, s.xs, lo * n.N)  # in the place of the rows before, which have been computed
    put_tail(n, s.xs, hi * n.N, tail)
    spread_gates(n, lo, hi, s, m)

    def one(j: Any, _: None) -> None:
        of_key_head(n, j, lo, hi, s, m, state, o.dtype)

    lax.fori_loop(0, n.J, one, None)
    UP = n.U * n.P

    def store(t: Any, _: None) -> None:
        for p in range(n.P):
            o[t, :, p * n.Y : (p + 1) * n.Y] = m.o[pl.ds(t * UP + p, n.U, stride=n.P)].astype(o.dtype)

    lax.fori_loop(lo, hi, store, None)


def spread_gates(n: Sizes, lo: Any, hi: Any, s: Scratch, m: Chunk) -> None:
    """Gates as what they are multiplied with lies, for all heads. Rows that are not the sequence's neither forget nor
    write."""
    row = iota((n.c, n.U), 0)
    live = (row >= lo) & (row < hi)
    g, beta = (jnp.where(live, s.gates[which], 0) for which in (DECAY, BETA))
    i, k = iota((n.c, n.c), 0), iota((n.c, n.c), 1)
    w = heads_in_pack(n)
    head = iota((n.c, w * n.c), 1) // n.c
    # Sums of each range, not differences of cumulated sums: those lose what is small beside a strong decay.
    for which, within in ((FROM_START, k <= i), (TO_END, k > i)):
        decay = jnp.exp(exact_sum(within, g))
        for u in range(n.U):
            m.decays[which, u] = jnp.broadcast_to(decay[:, u : u + 1], (n.c, n.Y))
    for which, x in ((DECAY, g), (BETA, beta)):
        for u in range(0, n.U, w):
            first, last = (jnp.broadcast_to(x[:, v : v + 1], head.shape) for v in (u, u + w - 1))
            m.packs[which, u // w] = jnp.where(head == 0, first, last)


def exact_sum(chosen: jax.Array, x: jax.Array) -> jax.Array:
    """[c, ..]: for each row i the sum of x [c, ..] over k where chosen [i, k], as exact as in float32."""
    chosen = jnp.concatenate([jnp.where(chosen, 1.0, 0.0)] * 3, 1).astype(jnp.bfloat16)
    parts = jnp.concatenate(split(x)).astype(jnp.bfloat16)
    return jnp.dot(chosen, parts, preferred_element_type=jnp.float32)


def of_key_head(n: Sizes, j: Any, lo: Any, hi: Any, s: Scratch, m: Chunk, state: Any, dtype: Any) -> None:
    c, Y, Z, V, w = n.c, n.Y, n.Z, n.V, heads_in_pack(n)
    per_key = n.N // n.J

    def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
        dims = (((contract[0],), (contract[1],)), ((), ()))
        if dtype == jnp.float32:
            return lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST)
        return lax.dot_general(a.astype(dtype), b.astype(dtype), dims, preferred_element_type=jnp.float32)

    row = iota((c, Y), 0)
    live = (row >= lo) & (row < hi)

    def convolved(r: int) -> jax.Array:
        at = j * per_key + r
        u = sum(s.xs[pl.ds(t * n.N + at, c, stride=n.N)] * s.taps[pl.ds(t * n.N + at, 1)] for t in range(n.W))
        return jnp.where(live, u * sigmoid(u), 0)

    q, k = normalise(convolved(0)) * Y**-0.5, normalise(convolved(1))
    scores = dot(jnp.concatenate([q, k]), k, (1, 1))
    qk, kk = (jnp.concatenate([x] * w, 1) for x in (scores[:c], scores[c:]))
    i, lane = iota((c, w * c), 0), iota((c, w * c), 1)
    before = lane % c

    def beside(x: jax.Array) -> jax.Array:
        """[c, w ..] of w heads -> block diagonal [w c, w ..]."""
        if w == 1:
            return x
        of = iota(x.shape, 1) // (x.shape[1] // w)
        return jnp.concatenate([jnp.where(of == v, x, 0) for v in range(w)])

    S = jnp.concatenate([state[j * V + v] for v in range(V)], 1)
    from_state = dot(jnp.concatenate([q, k]), S)
    from_start = [m.decays[FROM_START, j * V + v] for v in range(V)]
    wide = lambda xs: jnp.concatenate([x for x in xs for _ in range(n.P)], 1)  # noqa: E731
    ends, after = [], []
    for pack in range(V // w):
        us = range(pack * w, (pack + 1) * w)
        columns = slice(pack * w * Z, (pack + 1) * w * Z)
        g, beta = (m.packs[which, j * (V // w) + pack] for which in (DECAY, BETA))
        decay = jnp.exp(exact_sum(iota((c, c), 1) <= iota((c, c), 0), jnp.where(i > before, g, 0)))
        # (I + A) d = beta (v - decayed S^T k)
        inverse = unit_lower_inverse(jnp.where(i > before, beta * kk * decay, 0), c, beside, dot)
        # The write strength of the column's row: the only one on the diagonal.
        strength = jnp.sum(jnp.where(i == before, beta, 0), 0, keepdims=True)
        values = jnp.concatenate([convolved(2 + v * n.P + p) for v in us for p in range(n.P)], 1)
        known = wide([from_start[v] for v in us])
        d = dot(inverse * strength, beside(values - known * from_state[c:, columns]))
        out = known * from_state[:c, columns]
        out += dot(jnp.where(i >= before, qk * decay, 0), beside(d))
        for v in us:
            for p in range(n.P):
                tile = out[:, (v - us[0]) * Z + p * Y : (v - us[0]) * Z + (p + 1) * Y]
                m.o[pl.ds((j * V + v) * n.P + p, c, stride=n.U * n.P)] = tile
        ends.append(known[c - 1 :])
        after.append(wide([m.decays[TO_END, j * V + v] for v in us]) * d)
    added = dot(k, jnp.concatenate(after, 1), (0, 0))
    S = jnp.concatenate(ends, 1) * S.astype(jnp.float32) + added
    for v in range(V):
        state[j * V + v] = S[:, v * Z : (v + 1) * Z].astype(state.dtype)


def unit_lower_inverse(A: jax.Array, c: int, beside: Any, dot: Any) -> jax.Array:
    """(I + A)^-1 of a pack [c, w c] of strictly lower triangular matrices, c at most 64: of their diagonal blocks of 4,
    then of 16, then all.

    For blocks D = I + A of a size and what is left of A in blocks of four times the size, B, the inverse is
    (I + M)^-1 D^-1 with M = D^-1 B, and M^4 = 0: (I + M M) (I - M) D^-1.
    """
    i, lane = iota(A.shape, 0), iota(A.shape, 1)
    k = lane % c
    product = lambda a, b: dot(a, beside(b))  # noqa: E731
    M = jnp.where(i // 4 == k // 4, A, 0)
    E = jnp.where(i == k, 1.0, 0.0) - M
    D = E + product(product(M, M), E)
    for size in (4, 16):
        if size < c:
            B = jnp.where((i // size != k // size) & (i // (4 * size) == k // (4 * size)), A, 0)
            M = product(D, B)
            E = D - product(M, D)
            D = E + product(product(M, M), E)
    return D
