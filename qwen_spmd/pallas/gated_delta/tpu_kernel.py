# SPDX-License-Identifier: Apache-2.0
"""The TPU's kernel of Gated DeltaNet.

All that is of one token lies in rows of Y lanes, one for each head's query, key or value (several if values are longer
than keys), N in all: a token's convolution then works on full registers, and the rows of one head over many tokens
are a strided load.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BUFFERS = 4
AHEAD = 2
"""A state is read while the two sequences before it are computed, and may take two more to be written."""


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
    xs: Any,
    ws: Any,
    gates: Any,
    us: Any,
    gate: Any,
    qk: Any,
    os: Any,
) -> None:
    """x [c, C], b, a [c, U], conv_w [W, C], a_log, dt_bias [1, U], o [c, U, Z]; conv and rec are all layers' pools.

    states    [BUFFERS, U, Y, Z] in rec's dtype, tails [BUFFERS, W-1, C] in conv's; computed where they are read to
    xs        [(W-1 + c) N, Y] the block's inputs in float32, after the last W-1 of the block before
    ws        [W N, Y] taps
    gates     [2, c, U] log decay and write strength
    us        [N, Y] one token after convolution and silu; qk [2, J, Y] normalised, os [U P, Y] its outputs
    gate      [2, U, Y] decay and write strength of one token, the same in all lanes
    """
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
            ws[pl.ds(row, n.W, stride=n.N)] = conv_w[:, row * n.Y : (row + 1) * n.Y].astype(jnp.float32)

    @pl.when((i == 0) | (block_M[i] != block_M[jnp.maximum(i - 1, 0)]))
    def _() -> None:
        o[...] = jnp.zeros_like(o)
        take_block(n, x, b, a, a_log, dt_bias, xs, gates)

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

        @pl.when(live_B[s] != 0)
        def _() -> None:
            # In the place of the rows before: their sequences have been computed.
            for row in range(n.N):
                tail = tails[buffer, :, row * n.Y : (row + 1) * n.Y]
                xs[pl.ds(lo * n.N + row, n.W - 1, stride=n.N)] = tail.astype(jnp.float32)

    def token(t: Any, _: None) -> None:
        one_token(n, t, xs, ws, gates, us, gate, qk, os, states.at[buffer], o)

    lax.fori_loop(lo, hi, token, None)

    @pl.when((last_M[i] != 0) & (live_B[s] != 0))
    def _() -> None:
        for row in range(n.N):
            tail = xs[pl.ds(hi * n.N + row, n.W - 1, stride=n.N)]
            tails[buffer, :, row * n.Y : (row + 1) * n.Y] = tail.astype(tails.dtype)
        for copy in copies(s, 1):
            copy.start()

    @pl.when(i == pl.num_programs(0) - 1)
    def _() -> None:
        for seq in range(n.B - (BUFFERS - AHEAD), n.B):
            written(seq)


def take_block(n: Sizes, x: Any, b: Any, a: Any, a_log: Any, dt_bias: Any, xs: Any, gates: Any) -> None:
    """A new block's inputs and gates."""
    kept = (n.W - 1) * n.N
    xs[:kept] = xs[n.c * n.N :]
    size = 8 if n.c % 8 == 0 else n.c

    def some(r: Any, _: None) -> None:
        for row in range(n.N):
            part = x[pl.ds(pl.multiple_of(r * size, size), size), row * n.Y : (row + 1) * n.Y]
            xs[pl.ds(kept + r * size * n.N + row, size, stride=n.N)] = part.astype(jnp.float32)

    lax.fori_loop(0, n.c // size, some, None)
    z = a[...].astype(jnp.float32) + dt_bias[...]
    softplus = jnp.maximum(z, 0) + jnp.log1p(jnp.exp(-jnp.abs(z)))
    gates[0] = -jnp.exp(a_log[...].astype(jnp.float32)) * softplus
    gates[1] = sigmoid(b[...].astype(jnp.float32))


def sigmoid(x: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp(-x))


def normalise(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def one_token(
    n: Sizes, t: Any, xs: Any, ws: Any, gates: Any, us: Any, gate: Any, qk: Any, os: Any, state: Any, o: Any
) -> None:
    """Row t of the block. `state` [U, Y, Z] moves on by a token, rounded to its dtype.

    o = S'^T q with S' = e^g S + k d^T is read from the state before: e^g S^T q + (k . q) d.
    """
    Y, P = n.Y, n.P
    u = sum(xs[pl.ds((t + w) * n.N, n.N)] * ws[w * n.N : (w + 1) * n.N] for w in range(n.W))
    us[...] = u * sigmoid(u)
    per_key = n.N // n.J
    qk[0] = normalise(us[pl.ds(0, n.J, stride=per_key)]) * Y**-0.5
    qk[1] = k_JY = normalise(us[pl.ds(1, n.J, stride=per_key)])
    k_YJ, q_YJ = k_JY.T, None if state.dtype == jnp.bfloat16 else qk[0].T
    diagonal = lax.broadcasted_iota(jnp.int32, (n.U, n.U), 0) == lax.broadcasted_iota(jnp.int32, (n.U, n.U), 1)
    for which, f in enumerate((jnp.exp, lambda beta: beta)):
        row = f(gates[which, pl.ds(t, 1)])
        column = jnp.sum(jnp.where(diagonal, row, 0), -1, keepdims=True)
        gate[which] = jnp.broadcast_to(column, (n.U, Y))

    def every_row(ref: Any, *at: int) -> jax.Array:
        """[8, Y] of a row."""
        return jnp.broadcast_to(ref[*at[:-1], pl.ds(at[-1], 1)], (8, Y))

    for j in range(n.J):
        q, k = every_row(qk, 0, j), every_row(qk, 1, j)
        k_Y1 = k_YJ[:, j : j + 1]
        kq = jnp.sum(k * q, -1, keepdims=True)
        tiles = [(u, p) for u in range(j * n.V, (j + 1) * n.V) for p in range(P)]
        before = [state[u, :, p * Y : (p + 1) * Y] for u, p in tiles]
        if q_YJ is None:
            products = multiply(q, k, before)
        else:
            columns = k_Y1, q_YJ[:, j : j + 1]
            products = [[jnp.sum(S.astype(jnp.float32) * c, 0, keepdims=True) for c in columns] for S in before]
        for m, ((u, p), S, (kS, qS)) in enumerate(zip(tiles, before, products)):
            decay, beta, v = every_row(gate, 0, u), every_row(gate, 1, u), every_row(us, j * per_key + 2 + m)
            d = beta * (v - decay * kS)
            os[u * P + p : u * P + p + 1] = (decay * qS + kq * d)[:1]
            after = decay[:1] * S.astype(jnp.float32) + k_Y1 * d[:1]
            state[u, :, p * Y : (p + 1) * Y] = after.astype(state.dtype)
    for p in range(P):
        o[t, :, p * Y : (p + 1) * Y] = os[pl.ds(p, n.U, stride=P)].astype(o.dtype)


def multiply(q: jax.Array, k: jax.Array, states: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    """(S^T k, S^T q) of bfloat16 states [Y, Y], all rows alike as in q and k [8, Y], float32.

    To the matrix unit such a state is exact, and so is a float32 vector as the sum of three of its bfloat16 rows.
    """
    Y = k.shape[1]
    rows = [jnp.concatenate(pair) for pair in zip(split(k), split(q))]
    products = jnp.dot(
        jnp.concatenate(rows).astype(jnp.bfloat16), jnp.concatenate(states, 1), preferred_element_type=jnp.float32
    )
    kS, qS = (products[at : at + 8] + products[at + 16 : at + 24] + products[at + 32 : at + 40] for at in (0, 8))
    return [(kS[:, m * Y : (m + 1) * Y], qS[:, m * Y : (m + 1) * Y]) for m in range(len(states))]


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
