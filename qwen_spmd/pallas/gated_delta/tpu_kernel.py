# SPDX-License-Identifier: Apache-2.0
"""The TPU's kernel of Gated DeltaNet: a step of its grid, and what moves between HBM and VMEM."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from qwen_spmd.pallas.gated_delta.tpu_chunk import Chunk, chunk
from qwen_spmd.pallas.gated_delta.tpu_pieces import BETA, DECAY, Scratch, Sizes, sigmoid
from qwen_spmd.pallas.gated_delta.tpu_token import one_token

BUFFERS = 4
AHEAD = 2
"""A state is read while the two sequences before it are computed, and may take two more to be written."""


WINDOW = 8
"""A step with more rows is a chunk."""


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
    scr = Scratch(*scratch[: len(Scratch.shapes(n))])
    i = pl.program_id(0)
    s, lo, hi = seq_M[i], lo_M[i], hi_M[i]
    buffer = s % BUFFERS

    def copies(seq: Any, write: int) -> list[Any]:
        at, slot = seq % BUFFERS, (write_B if write else read_B)[seq]
        ends = [(rec.at[layer[0], slot], states.at[at]), (conv.at[layer[0], slot], tails.at[at])]
        return [
            pltpu.make_async_copy(*((here, there) if write else (there, here)), semaphores.at[write, which, at])
            for which, (there, here) in enumerate(ends)
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
            scr.taps[pl.ds(row, n.W, stride=n.pitch)] = conv_w[:, row * n.Y : (row + 1) * n.Y].astype(jnp.float32)

    @pl.when((i == 0) | (block_M[i] != block_M[jnp.maximum(i - 1, 0)]))
    def _() -> None:
        @pl.when(hi - lo < n.c)
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
        x_NY = scr.xs[pl.ds((n.W - 1 + t) * n.pitch, n.N)]
        one_token(n, t, x_NY, scr, states.at[buffer], tails.at[buffer], o)

    if not n.chunks:
        lax.fori_loop(lo, hi, token, None)
    else:
        few = hi - lo <= WINDOW
        lax.fori_loop(lo, jnp.where(few, hi, lo), token, None)

        @pl.when(~few)
        def _() -> None:
            chunk(n, lo, hi, scr, Chunk.of(scratch[len(Scratch.shapes(n)) :]), states.at[buffer], tails.at[buffer], o)

    @pl.when((last_M[i] != 0) & (live_B[s] != 0))
    def _() -> None:
        for copy in copies(s, 1):
            copy.start()

    @pl.when(i == pl.num_programs(0) - 1)
    def _() -> None:
        for seq in range(max(0, n.B - (BUFFERS - AHEAD)), n.B):
            written(seq)


def take_block(n: Sizes, x: Any, b: Any, a: Any, a_log: Any, dt_bias: Any, s: Scratch) -> None:
    """A new block's inputs and gates."""
    size = 8 if n.c % 8 == 0 else n.c

    def some(r: Any, _: None) -> None:
        for row in range(n.N):
            part = x[pl.ds(pl.multiple_of(r * size, size), size), row * n.Y : (row + 1) * n.Y]
            s.xs[pl.ds((n.W - 1 + r * size) * n.pitch + row, size, stride=n.pitch)] = part.astype(jnp.float32)

    lax.fori_loop(0, n.c // size, some, None)
    z = a[...].astype(jnp.float32) + dt_bias[...]
    softplus = jnp.maximum(z, 0) + jnp.log1p(jnp.exp(-jnp.abs(z)))
    s.gates[DECAY] = -jnp.exp(a_log[...].astype(jnp.float32)) * softplus
    s.gates[BETA] = sigmoid(b[...].astype(jnp.float32))
