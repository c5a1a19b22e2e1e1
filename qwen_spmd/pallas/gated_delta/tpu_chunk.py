# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on a TPU, many tokens of a sequence at a time: the WY form (Yang et al. 2024).

With products of 16-bit inputs, operands are rounded to bfloat16, as a state between steps may be, too; sums, decays and
what has no product are float32. Matrices [c, c] of several value heads of a key head lie side by side in a register's
lanes, a pack.
"""

from __future__ import annotations

import dataclasses
import math
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

KEY_HEADS = 2
"""Computed at the same time: one's products go on while another waits for its own."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """float32 in VMEM, of one chunk.

    gates  [2, U / w, w c] log decay and write strength of each row, a pack in a row
    turned [2, U, c] the same, a head in a row
    o      [c (U P | 1), Y] outputs
    """

    gates: Any
    turned: Any
    o: Any

    @staticmethod
    def shapes(n: Sizes) -> list[Any]:
        w = heads_in_pack(n)
        gates, turned, o = (2, n.U // w, w * n.c), (2, n.U, n.c), (n.c * (n.U * n.P | 1), n.Y)
        return [pltpu.VMEM(shape, jnp.float32) for shape in (gates, turned, o)]


def heads_in_pack(n: Sizes) -> int:
    return 2 if n.V % 2 == 0 else 1


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def chunk(n: Sizes, lo: Any, hi: Any, s: Scratch, m: Chunk, state: Any, tail: Any, o: Any) -> None:
    """Rows lo to hi of the block; `state` [U, Y, Z] and `tail` [W-1, C] move on behind them."""
    take_tail(n, tail, s.xs, lo * n.pitch)  # in the place of the rows before, which have been computed
    put_tail(n, s.xs, hi * n.pitch, tail)
    w, UP = heads_in_pack(n), n.U * n.P | 1
    lane = iota((n.U, n.c), 1)
    for which in (DECAY, BETA):
        # Rows that are not the sequence's neither forget nor write.
        m.turned[which] = jnp.where((lane >= lo) & (lane < hi), s.gates[which].T, 0)
        for v in range(w):
            m.gates[which, :, v * n.c : (v + 1) * n.c] = m.turned[which, pl.ds(v, n.U // w, stride=w)]
    together = math.gcd(n.J, KEY_HEADS)

    def some(i: Any, _: None) -> None:
        of_key_heads(n, [i * together + j for j in range(together)], lo, hi, s, m, state, o.dtype)

    lax.fori_loop(0, n.J // together, some, None)

    def store(t: Any, _: None) -> None:
        for p in range(n.P):
            o[t, :, p * n.Y : (p + 1) * n.Y] = m.o[pl.ds(t * UP + p, n.U, stride=n.P)].astype(o.dtype)

    lax.fori_loop(lo, hi, store, None)


def of_key_heads(n: Sizes, js: list[Any], lo: Any, hi: Any, s: Scratch, m: Chunk, state: Any, dtype: Any) -> None:
    """With the decay D_ij from behind row j to row i, and G_i from the chunk's start to row i:

    (I + tril(k k^T D, -1) beta) d = v - G k S;  o = G q S + tril(q k^T D) beta d;  S <- G_end S + (D_end k)^T beta d

    Factors of a matrix' columns lie in one register's lanes, for all rows at once: so beta is on the side of d here.
    """
    c, Y, Z, V, P, w = n.c, n.Y, n.Z, n.V, n.P, heads_in_pack(n)
    per_key = n.N // n.J
    packs = [(a, pack) for a in range(len(js)) for pack in range(V // w)]

    def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
        dims = (((contract[0],), (contract[1],)), ((), ()))
        if dtype == jnp.float32:
            return lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST)
        return lax.dot_general(a.astype(dtype), b.astype(dtype), dims, preferred_element_type=jnp.float32)

    row = iota((c, Y), 0)
    live = (row >= lo) & (row < hi)

    def convolved(j: Any, r: int) -> jax.Array:
        at = j * per_key + r
        u = sum(
            s.xs[pl.ds(t * n.pitch + at, c, stride=n.pitch)] * s.taps[pl.ds(t * n.pitch + at, 1)] for t in range(n.W)
        )
        return jnp.where(live, u * sigmoid(u), 0)

    i, column = iota((c, w * c), 0), iota((c, w * c), 1) % c
    later = iota((w * c, w * c), 0) > iota((w * c, w * c), 1)
    later &= iota((w * c, w * c), 0) // c == iota((w * c, w * c), 1) // c
    later = jnp.where(later, 1.0, 0.0).astype(jnp.bfloat16)

    def beside(x: jax.Array) -> jax.Array:
        """[c, w ..] of w heads -> block diagonal [w c, w ..]."""
        x = x.astype(dtype)
        if w == 1:
            return x
        of = iota(x.shape, 1) // (x.shape[1] // w)
        return jnp.concatenate([jnp.where(of == v, x, jnp.zeros_like(x)) for v in range(w)])

    def wide(xs: list[jax.Array]) -> jax.Array:
        """Factors of the rows of several heads' values, [.., 1] each."""
        return jnp.concatenate([jnp.broadcast_to(x, (len(x), Y)) for x in xs for _ in range(P)], 1)

    q = [normalise(convolved(j, 0)) * Y**-0.5 for j in js]
    k = [normalise(convolved(j, 1)) for j in js]
    k_w = [jnp.concatenate([x] * w) for x in k]
    qk = [jnp.concatenate(pair) for pair in zip(q, k)]
    scores = [dot(x, y, (1, 1)) for x, y in zip(qk, k_w)]
    S = [jnp.concatenate([state[j * V + v] for v in range(V)], 1) for j in js]
    from_state = [dot(x, y) for x, y in zip(qk, S)]
    k_w = [x.T for x in k_w]

    g, beta = ([m.gates[x, pl.ds(js[a] * (V // w) + pack, 1)] for a, pack in packs] for x in (DECAY, BETA))
    # Sums of each range, not differences of cumulated sums: those lose what is small beside a strong decay.
    parts = [[jnp.where(column <= i, part, 0) for part in split(x)] for x in g]
    sums = [jnp.dot(jnp.concatenate(x).astype(jnp.bfloat16), later, preferred_element_type=jnp.float32) for x in parts]
    D = [jnp.exp(x[:c] + x[c : 2 * c] + x[2 * c :]) for x in sums]
    A = [jnp.where(i > column, scores[a][c:] * x * y, 0) for (a, _), x, y in zip(packs, D, beta)]
    inverse = unit_lower_inverse(A, c, lambda xs, ys: [dot(x, beside(y)) for x, y in zip(xs, ys)])
    first = [x[:, h * c : h * c + 1] * jnp.exp(y[:, h * c : h * c + 1]) for x, y in zip(D, g) for h in range(w)]
    G = [wide(first[at * w : (at + 1) * w]) for at in range(len(packs))]
    values = [jnp.concatenate([convolved(js[a], 2 + pack * w * P + r) for r in range(w * P)], 1) for a, pack in packs]
    columns = [slice(pack * w * Z, (pack + 1) * w * Z) for _, pack in packs]
    d = [x - y * from_state[a][c:, at] for (a, _), x, y, at in zip(packs, values, G, columns)]
    d = [dot(x, beside(y)) for x, y in zip(inverse, d)]
    left = [
        jnp.concatenate([jnp.where(i >= column, scores[a][:c] * x, 0) * y, k_w[a] * (x[c - 1 :] * y)])
        for (a, _), x, y in zip(packs, D, beta)
    ]
    added = [dot(x, beside(y)) for x, y in zip(left, d)]
    for (a, pack), x, y, at in zip(packs, added, G, columns):
        out = y * from_state[a][:c, at] + x[:c]
        after = y[c - 1 :] * S[a][:, at].astype(jnp.float32) + x[c:]
        for h in range(w):
            u = js[a] * V + pack * w + h
            state[u] = after[:, h * Z : (h + 1) * Z].astype(state.dtype)
            for p in range(P):
                m.o[pl.ds(u * P + p, c, stride=n.U * P | 1)] = out[:, (h * P + p) * Y : (h * P + p + 1) * Y]


def unit_lower_inverse(A: list[jax.Array], c: int, products: Any) -> list[jax.Array]:
    """(I + A)^-1 of packs [c, w c] of strictly lower triangular matrices, c at most 64: of their diagonal blocks of 4,
    then of 16, then all.

    For blocks D = I + A of a size and what is left of A in blocks of four times the size, B, the inverse is
    (I + M)^-1 D^-1 with M = D^-1 B, and M^4 = 0: (I + M M) (I - M) D^-1.
    """
    i, column = iota(A[0].shape, 0), iota(A[0].shape, 1) % c
    add = lambda xs, ys: [x + y for x, y in zip(xs, ys)]  # noqa: E731
    M = [jnp.where(i // 4 == column // 4, x, 0) for x in A]
    E = [jnp.where(i == column, 1.0, 0.0) - x for x in M]
    D = add(E, products(products(M, M), E))
    for size in (4, 16):
        if size < c:
            here = (i // size != column // size) & (i // (4 * size) == column // (4 * size))
            M = products(D, [jnp.where(here, x, 0) for x in A])
            E = [x - y for x, y in zip(D, products(M, D))]
            D = add(E, products(products(M, M), E))
    return D
