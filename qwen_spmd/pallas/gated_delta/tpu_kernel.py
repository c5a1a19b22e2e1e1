# SPDX-License-Identifier: Apache-2.0
"""The TPU's kernel of Gated DeltaNet.

All that is of one token lies in rows of Y lanes, one for each head's query, key or value (several if values are longer
than keys), N in all: a token's convolution then works on full registers, and the rows of one head over many tokens
are a strided load.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BUFFERS = 4
AHEAD = 2
"""A state is read while the two sequences before it are computed, and may take two more to be written."""


KEY_HEADS = 4
"""Of which states are read and written together."""
Heads = range


@dataclasses.dataclass(frozen=True)
class Sizes:
    """c rows in a block, B sequences, and the contract's C, W, J, U, Y and Z."""

    c: int
    C: int
    W: int
    J: int
    U: int
    Y: int
    Z: int
    B: int

    @property
    def N(self) -> int:
        return self.C // self.Y

    @property
    def P(self) -> int:
        """Rows of a value."""
        return self.Z // self.Y

    @property
    def V(self) -> int:
        """Value heads of a key head."""
        return self.U // self.J

    def groups(self, size: int) -> list[Heads]:
        return [range(j, min(j + size, self.J)) for j in range(0, self.J, size)]

    def tiles(self, heads: Heads) -> list[tuple[int, int, int, int]]:
        """(key head, value head, part, row of [U P]) of each square part of the states of some key heads."""
        us = range(heads[0] * self.V, (heads[-1] + 1) * self.V)
        return [(u // self.V, u, p, u * self.P + p) for u in us for p in range(self.P)]


DECAY, BETA, V, KQ, KS, QS, D, O = range(8)


@dataclasses.dataclass(frozen=True)
class Scratch:
    """float32 in VMEM.

    xs        [c N, Y] the block's inputs
    taps      [W N, Y] conv_w
    gates     [2, c, U] log decay and write strength

    of one token:
    window    [W N, Y] its inputs and those before it
    u         [N, Y] silu of its convolution
    of_value  [8, U P, Y] decay, write strength, value, k . q, S^T k, S^T q, d and o
    rows      [8 J, Y] three parts of k, and of q
    products  [8 U P, Y] of rows and states
    """

    xs: Any
    taps: Any
    gates: Any
    window: Any
    u: Any
    of_value: Any
    rows: Any
    products: Any

    @staticmethod
    def shapes(n: Sizes) -> list[Any]:
        rows = (n.c * n.N, n.Y), (n.W * n.N, n.Y)
        token = (n.W * n.N, n.Y), (n.N, n.Y), (8, n.U * n.P, n.Y), (8 * n.J, n.Y), (8 * n.U * n.P, n.Y)
        return [pltpu.VMEM(shape, jnp.float32) for shape in (*rows, (2, n.c, n.U), *token)]


def kernel(
    n: Sizes,
    block_M: Any,
    seq_M: Any,
    lo_M: Any,
    hi_M: Any,
    first_M: Any,
    last_M: Any,
    live_B: Any,
    read_B: Any,
    write_B: Any,
    fresh_B: Any,
    layer: Any,
    x: Any,
    b: Any,
    a: Any,
    conv_w: Any,
    a_log: Any,
    dt_bias: Any,
    _conv: Any,
    _rec: Any,
    o: Any,
    conv: Any,
    rec: Any,
    states: Any,
    tails: Any,
    semaphores: Any,
    *scratch: Any,
) -> None:
    """x [c, C], b, a [c, U], conv_w [W, C], a_log, dt_bias [1, U], o [c, U, Z]; conv and rec are all layers' pools.

    states [BUFFERS, U, Y, Z] in rec's dtype and tails [BUFFERS, W-1, C] in conv's are computed where they are read to.
    """
    scr = Scratch(*scratch)
    i = pl.program_id(0)
    s, lo, hi = seq_M[i], lo_M[i], hi_M[i]
    buffer = s % BUFFERS

    def copies(seq: Any, write: int) -> list[Any]:
        at, slot = seq % BUFFERS, (write_B if write else read_B)[seq]
        ends = [(rec.at[layer[0], slot], states.at[at]), (conv.at[layer[0], slot], tails.at[at])]
        return [
            pltpu.make_async_copy(*(reversed(pair) if write else pair), semaphores.at[write, which, at])
            for which, pair in enumerate(ends)
        ]

    def read_ahead(seq: Any) -> None:
        @pl.when((live_B[seq] != 0) & (fresh_B[seq] == 0))
        def _() -> None:
            for copy in copies(seq, 0):
                copy.start()

    def written(seq: Any) -> None:
        @pl.when((seq >= 0) & (live_B[jnp.maximum(seq, 0)] != 0))
        def _() -> None:
            for copy in copies(seq, 1):
                copy.wait()

    @pl.when(i == 0)
    def _() -> None:
        for seq in range(AHEAD):
            read_ahead(seq)
        for row in range(n.N):
            scr.taps[pl.ds(row, n.W, stride=n.N)] = conv_w[:, row * n.Y : (row + 1) * n.Y].astype(jnp.float32)

    @pl.when((i == 0) | (block_M[i] != block_M[jnp.maximum(i - 1, 0)]))
    def _() -> None:
        o[...] = jnp.zeros_like(o)
        take_block(n, x, b, a, a_log, dt_bias, scr)

    @pl.when(first_M[i] != 0)
    def _() -> None:
        written(s - (BUFFERS - AHEAD))
        read_ahead(s + AHEAD)

        @pl.when((live_B[s] != 0) & (fresh_B[s] != 0))
        def _() -> None:
            states[buffer] = jnp.zeros(states.shape[1:], states.dtype)
            tails[buffer] = jnp.zeros(tails.shape[1:], tails.dtype)

        @pl.when((live_B[s] != 0) & (fresh_B[s] == 0))
        def _() -> None:
            for copy in copies(s, 0):
                copy.wait()

    def token(t: Any, _: None) -> None:
        x_NY = scr.xs[pl.ds(pl.multiple_of(t * n.N, n.N), n.N)]
        one_token(n, t, x_NY, scr, states.at[buffer], tails.at[buffer], o)

    lax.fori_loop(lo, hi, token, None)

    @pl.when((last_M[i] != 0) & (live_B[s] != 0))
    def _() -> None:
        for copy in copies(s, 1):
            copy.start()

    @pl.when(i == pl.num_programs(0) - 1)
    def _() -> None:
        for seq in range(n.B - (BUFFERS - AHEAD), n.B):
            written(seq)


def take_block(n: Sizes, x: Any, b: Any, a: Any, a_log: Any, dt_bias: Any, s: Scratch) -> None:
    """A new block's inputs and gates."""
    size = 8 if n.c % 8 == 0 else n.c

    def some(r: Any, _: None) -> None:
        for row in range(n.N):
            part = x[pl.ds(pl.multiple_of(r * size, size), size), row * n.Y : (row + 1) * n.Y]
            s.xs[pl.ds(r * size * n.N + row, size, stride=n.N)] = part.astype(jnp.float32)

    lax.fori_loop(0, n.c // size, some, None)
    z = a[...].astype(jnp.float32) + dt_bias[...]
    softplus = jnp.maximum(z, 0) + jnp.log1p(jnp.exp(-jnp.abs(z)))
    s.gates[DECAY] = -jnp.exp(a_log[...].astype(jnp.float32)) * softplus
    s.gates[BETA] = sigmoid(b[...].astype(jnp.float32))


def sigmoid(x: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp(-x))


def normalise(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def one_token(n: Sizes, t: Any, x: jax.Array, s: Scratch, state: Any, tail: Any, o: Any) -> None:
    """Row t of the block, x [N, Y]. `state` [U, Y, Z] and `tail` [W-1, C] move on by a token, in their dtypes: a window
    of several tokens leaves what as many steps of one leave.

    o = S'^T q with S' = e^g S + k d^T is read from the state before: e^g S^T q + (k . q) d.
    """
    Y, P, J, VP = n.Y, n.P, n.J, n.V * n.P
    for row in range(n.N):
        s.window[pl.ds(row, n.W - 1, stride=n.N)] = tail[:, row * Y : (row + 1) * Y].astype(jnp.float32)
    s.window[(n.W - 1) * n.N :] = x
    for row in range(n.N):
        tail[:, row * Y : (row + 1) * Y] = s.window[pl.ds(n.N + row, n.W - 1, stride=n.N)].astype(tail.dtype)
    u = sum(s.window[w * n.N : (w + 1) * n.N] * s.taps[w * n.N : (w + 1) * n.N] for w in range(n.W))
    s.u[...] = u * sigmoid(u)
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
    groups = n.groups(KEY_HEADS)
    some = multiply(n, q, k, s, state)
    some(groups[0])
    for here, following in zip(groups, [*groups[1:], ()]):
        if following:  # the matrix unit's work goes on while these states are written
            some(following)
        at = slice(here[0] * VP, (here[-1] + 1) * VP)
        decay, beta, v, kq, kS, qS = (s.of_value[which, at] for which in (DECAY, BETA, V, KQ, KS, QS))
        d = beta * (v - decay * kS)
        s.of_value[D, at] = d
        s.of_value[O, at] = decay * qS + kq * d
        for j, u, p, at in n.tiles(here):
            columns = slice(p * Y, (p + 1) * Y)
            decay, d = s.of_value[DECAY, at : at + 1], s.of_value[D, at : at + 1]
            after = decay * state[u, :, columns].astype(jnp.float32) + k_YJ[:, j : j + 1] * d
            state[u, :, columns] = after.astype(state.dtype)
    for p in range(P):
        o[t, :, p * Y : (p + 1) * Y] = s.of_value[O, pl.ds(p, n.U, stride=P)].astype(o.dtype)


def multiply_float32(n: Sizes, q: jax.Array, k: jax.Array, s: Scratch, state: Any) -> Callable[[Heads], None]:
    """What puts S^T k and S^T q of some key heads' float32 states into `s.of_value`; q and k [J, Y]."""
    of_key = (KS, k.T), (QS, q.T)

    def some(heads: Heads) -> None:
        for j, u, p, at in n.tiles(heads):
            S = state[u, :, p * n.Y : (p + 1) * n.Y]
            for which, x in of_key:
                s.of_value[which, at : at + 1] = jnp.sum(S * x[:, j : j + 1], 0, keepdims=True)

    return some


def multiply_bfloat16(n: Sizes, q: jax.Array, k: jax.Array, s: Scratch, state: Any) -> Callable[[Heads], None]:
    """The same of bfloat16 states, which are exact in the matrix unit. So is a float32 vector in three rows.

    Two key heads share a product, with zeros in each one's rows where the other's states are: 256 rows fill the unit.
    """
    Y, VP = n.Y, n.V * n.P
    for r, part in enumerate((*split(k), *split(q), jnp.zeros_like(k), jnp.zeros_like(k))):
        s.rows[pl.ds(r, n.J, stride=8)] = part

    def some(heads: Heads) -> None:
        for pair in (heads[i : i + 2] for i in range(0, len(heads), 2)):
            own = [s.rows[8 * j : 8 * j + 8] for j in pair]
            rows = [jnp.concatenate([x if x is y else jnp.zeros_like(x) for y in own], 1) for x in own]
            states = [jnp.concatenate([state[j * n.V + v] for v in range(n.V)], 1) for j in pair]
            products = jnp.dot(
                jnp.concatenate(rows).astype(jnp.bfloat16), jnp.concatenate(states), preferred_element_type=jnp.float32
            )
            for i, j in enumerate(pair):
                for m in range(VP):
                    tile = products[8 * i : 8 * i + 8, m * Y : (m + 1) * Y]
                    s.products[8 * (j * VP + m) : 8 * (j * VP + m + 1)] = tile
        first, size = heads[0] * VP, len(heads) * VP
        for r, which in ((0, KS), (3, QS)):
            parts = [s.products[pl.ds(8 * first + r + i, size, stride=8)] for i in range(3)]
            s.of_value[which, first : first + size] = parts[0] + parts[1] + parts[2]

    return some


def split(x: jax.Array) -> list[jax.Array]:
    """Three float32 that bfloat16 holds, and whose sum is x.

    Bits are cut, not rounded by conversions: compilers take the latter for excess precision and drop them.
    """
    parts = []
    for _ in range(3):
        bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        parts.append(lax.bitcast_convert_type(bits, jnp.float32))
        x = x - parts[-1]
    return parts
