# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet on a TPU, many tokens of a sequence at a time: the WY form (Yang et al. 2024).

With products of 16-bit inputs, operands are rounded to bfloat16, as a state between steps may be, too; sums, decays and
what has no product are float32. Matrices [c, c] of several value heads of a key head lie side by side in a register's
lanes, a pack.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
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
    convolve,
    normalise,
    put_tail,
    split,
    take_tail,
)

KEY_HEADS = 8
"""Computed at the same time: one's products go on while another waits for its own."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Of some key heads, what is known before their systems of equations are solved. In the inputs' dtype, but what has
    no product is float32.

    system  [packs, c, w c] strictly lower triangular
    right   [packs, c, w Z] right sides
    left    [packs, c + Y, w c] what the solutions are multiplied with, for outputs and for the states
    out     [packs, c, w Z] outputs' part from the state
    keep    [packs, 8, w Z] decay of the whole chunk
    """

    system: Any
    right: Any
    left: Any
    out: Any
    keep: Any

    @staticmethod
    def shapes(n: Sizes, dtype: Any) -> list[Any]:
        w = heads_in_pack(n)
        packs = n.V // w * together(n)
        given = (packs, n.c, w * n.c), (packs, n.c, w * n.Z), (packs, n.c + n.Y, w * n.c)
        own = (packs, n.c, w * n.Z), (packs, 8, w * n.Z)
        return [*(pltpu.VMEM(x, dtype) for x in given), *(pltpu.VMEM(x, jnp.float32) for x in own)]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """In VMEM, of one chunk; float32.

    gates     [2, U / w, w c] log decay and write strength of each row, a pack in a row
    turned    [2, U, c] the same, a head in a row
    o         [c (U P | 1), Y] outputs
    inverse, M, square  [packs, c, w c] of `unit_lower_inverse`; the latter two in the inputs' dtype
    from_state          [key heads, 2 c, V Z] products of q and k with the state
    prepared  two, of key heads that are being solved and of the following ones
    """

    gates: Any
    turned: Any
    o: Any
    inverse: Any
    from_state: Any
    M: Any
    square: Any
    prepared: tuple[Prepared, Prepared]

    @staticmethod
    def shapes(n: Sizes, dtype: Any) -> list[Any]:
        w = heads_in_pack(n)
        gates, turned, o = (2, n.U // w, w * n.c), (2, n.U, n.c), (n.c * (n.U * n.P | 1), n.Y)
        own = [pltpu.VMEM(shape, jnp.float32) for shape in (gates, turned, o)]
        packs = n.V // w * together(n)
        from_state = together(n), 2 * n.c, n.V * n.Z
        own += [pltpu.VMEM(shape, jnp.float32) for shape in ((packs, n.c, w * n.c), from_state)]
        own += [pltpu.VMEM((packs, n.c, w * n.c), dtype) for _ in range(2)]
        return [*own, *Prepared.shapes(n, dtype), *Prepared.shapes(n, dtype)]

    @staticmethod
    def of(refs: tuple[Any, ...]) -> Chunk:
        gates, turned, o, inverse, from_state, M, square, *prepared = refs
        half = len(prepared) // 2
        own = gates, turned, o, inverse, from_state, M, square
        return Chunk(*own, (Prepared(*prepared[:half]), Prepared(*prepared[half:])))


def together(n: Sizes) -> int:
    return math.gcd(n.J, KEY_HEADS)


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
    size = together(n)
    groups = n.J // size
    heads = lambda i: [i * size + j for j in range(size)]  # noqa: E731
    prepare_group = lambda i, to: prepare(n, heads(i), lo, hi, s, m, to, state, o.dtype)  # noqa: E731
    solve_group = lambda i, of: solve(n, heads(i), m, of, state, o.dtype)  # noqa: E731
    interleave(prepare_group(0, m.prepared[0]))
    for i in range(groups):
        following = [prepare_group(i + 1, m.prepared[(i + 1) % 2])] if i + 1 < groups else []
        interleave(solve_group(i, m.prepared[i % 2]), *following)

    def store(t: Any, _: Any = None) -> None:
        for p in range(n.P):
            o[t, :, p * n.Y : (p + 1) * n.Y] = m.o[pl.ds(t * UP + p, n.U, stride=n.P)].astype(o.dtype)

    def eight(i: Any, _: None) -> None:
        first = 8 * i
        full = (lo <= first) & (first + 8 <= hi)

        @pl.when(full)
        def _() -> None:
            for t in range(8):
                store(first + t)

        @pl.when(~full)
        def _() -> None:
            lax.fori_loop(jnp.maximum(lo, first), jnp.minimum(hi, first + 8), store, None)

    lax.fori_loop(lo // 8, (hi + 7) // 8, eight, None)


def multiply(a: jax.Array, b: jax.Array, dtype: Any, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    if dtype == jnp.float32:
        return lax.dot_general(a, b, dims, precision=lax.Precision.HIGHEST)
    return lax.dot_general(a.astype(dtype), b.astype(dtype), dims, preferred_element_type=jnp.float32)


def beside(x: jax.Array, w: int) -> jax.Array:
    """[c, w ..] of w heads -> block diagonal [w c, w ..]."""
    if w == 1:
        return x
    of = iota(x.shape, 1) // (x.shape[1] // w)
    return jnp.concatenate([jnp.where(of == v, x, jnp.zeros_like(x)) for v in range(w)])


def interleave(*parts: Iterator[None]) -> None:
    """A stage of each in turn. Solving is products that wait for each other, and preparing what other units do
    meanwhile; the compiler keeps products in the order in which they are written."""
    for _ in itertools.zip_longest(*parts):
        pass


def prepare(
    n: Sizes, js: list[Any], lo: Any, hi: Any, s: Scratch, m: Chunk, to: Prepared, state: Any, dtype: Any
) -> Iterator[None]:
    """With the decay D_ij from behind row j to row i, and G_i from the chunk's start to row i:

    (I + tril(k k^T D, -1) beta) d = v - G k S;  o = G q S + tril(q k^T D) beta d;  S <- G_end S + (D_end k)^T beta d

    Factors of a matrix' columns lie in one register's lanes, for all rows at once: so beta is on the side of d here.
    """
    c, Y, Z, V, P, w = n.c, n.Y, n.Z, n.V, n.P, heads_in_pack(n)
    per_key = n.N // n.J
    row = iota((c, Y), 0)
    live = (row >= lo) & (row < hi)

    def convolved(j: Any, r: int) -> jax.Array:
        at = [t * n.pitch + j * per_key + r for t in range(n.W)]
        u = convolve([s.xs[pl.ds(first, c, stride=n.pitch)] for first in at], [s.taps[pl.ds(first, 1)] for first in at])
        return jnp.where(live, u, 0)

    i, column = iota((c, w * c), 0), iota((c, w * c), 1) % c
    later = iota((w * c, w * c), 0) > iota((w * c, w * c), 1)
    later &= iota((w * c, w * c), 0) // c == iota((w * c, w * c), 1) // c
    later = jnp.where(later, 1.0, 0.0).astype(jnp.bfloat16)

    def wide(xs: list[jax.Array]) -> jax.Array:
        """Factors of the rows of several heads' values, [.., 1] each."""
        return jnp.concatenate([jnp.broadcast_to(x, (len(x), Y)) for x in xs for _ in range(P)], 1)

    for a, j in enumerate(js):
        q, k = normalise(convolved(j, 0)) * Y**-0.5, normalise(convolved(j, 1))
        k_w, qk = jnp.concatenate([k] * w), jnp.concatenate([q, k])
        scores = multiply(qk, k_w, dtype, (1, 1))
        S = jnp.concatenate([state[j * V + v] for v in range(V)], 1)
        m.from_state[a] = multiply(qk, S, dtype)
        k_w = k_w.T
        yield
        for pack in range(V // w):
            at = a * (V // w) + pack
            g, beta = (m.gates[x, pl.ds(j * (V // w) + pack, 1)] for x in (DECAY, BETA))
            # Sums of each range, not differences of cumulated sums: those lose what is small beside a strong decay.
            parts = jnp.concatenate([jnp.where(column <= i, part, 0) for part in split(g)])
            sums = jnp.dot(parts.astype(jnp.bfloat16), later, preferred_element_type=jnp.float32)
            D = jnp.exp(sums[:c] + sums[c : 2 * c] + sums[2 * c :])
            to.system[at] = jnp.where(i > column, scores[c:] * D * beta, 0).astype(dtype)
            first = jnp.exp(g)
            G = wide([D[:, h * c : h * c + 1] * first[:, h * c : h * c + 1] for h in range(w)])
            values = jnp.concatenate([convolved(j, 2 + pack * w * P + r) for r in range(w * P)], 1)
            columns = slice(pack * w * Z, (pack + 1) * w * Z)
            to.right[at] = (values - G * m.from_state[a, c:, columns]).astype(dtype)
            to.left[at, :c] = (jnp.where(i >= column, scores[:c] * D, 0) * beta).astype(dtype)
            to.left[at, c:] = (k_w * (D[c - 1 :] * beta)).astype(dtype)
            to.out[at] = G * m.from_state[a, :c, columns]
            to.keep[at] = jnp.broadcast_to(G[c - 1 :], (8, w * Z))
            yield


def solve(n: Sizes, js: list[Any], m: Chunk, of: Prepared, state: Any, dtype: Any) -> Iterator[None]:
    """The chunk's outputs, to `m.o`, and the states after it."""
    c, Y, Z, V, P, w = n.c, n.Y, n.Z, n.V, n.P, heads_in_pack(n)
    packs = [(j, pack) for j in js for pack in range(V // w)]

    yield from unit_lower_inverse(m, of, len(packs), dtype)
    for at in range(len(packs)):
        d = multiply(m.inverse[at], beside(of.right[at], w), dtype)
        of.right[at] = d.astype(dtype)
    yield
    added = [multiply(of.left[at], beside(of.right[at], w), dtype) for at in range(len(packs))]
    yield
    for at, (j, pack) in enumerate(packs):
        out = of.out[at] + added[at][:c]
        for h in range(w):
            u, columns = j * V + pack * w + h, slice(h * Z, (h + 1) * Z)
            after = of.keep[at, :1, columns] * state[u].astype(jnp.float32) + added[at][c:, columns]
            state[u] = after.astype(state.dtype)
            for p in range(P):
                m.o[pl.ds(u * P + p, c, stride=n.U * P | 1)] = out[:, (h * P + p) * Y : (h * P + p + 1) * Y]


def unit_lower_inverse(m: Chunk, of: Prepared, packs: int, dtype: Any) -> Iterator[None]:
    """(I + A)^-1 of strictly lower triangular matrices `of.system`, to `m.inverse`: of diagonal blocks of 4, then of
    16, then all.

    For blocks D = I + A of a size and what is left of A in blocks of four times the size, B, the inverse is
    (I + M)^-1 D^-1 with M = D^-1 B, and M^4 = 0: (I + M M) (I - M) D^-1.
    """
    _, c, width = of.system.shape
    i, column = iota((c, width), 0), iota((c, width), 1) % c

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return multiply(a, beside(b.astype(dtype), width // c), dtype)

    for at in range(packs):
        M = jnp.where(i // 4 == column // 4, of.system[at], 0)
        m.inverse[at] = jnp.where(i == column, 1.0, 0.0) - M.astype(jnp.float32)
        m.square[at] = product(M, M).astype(dtype)
    yield
    for at in range(packs):
        m.inverse[at] += product(m.square[at], m.inverse[at])
    yield
    for size in (4, 16):
        if size >= c:
            break
        here = (i // size != column // size) & (i // (4 * size) == column // (4 * size))
        for at in range(packs):
            m.M[at] = product(m.inverse[at], jnp.where(here, of.system[at], 0)).astype(dtype)
        yield
        for at in range(packs):
            m.inverse[at] -= product(m.M[at], m.inverse[at])
            m.square[at] = product(m.M[at], m.M[at]).astype(dtype)
        yield
        for at in range(packs):
            m.inverse[at] += product(m.square[at], m.inverse[at])
        yield
