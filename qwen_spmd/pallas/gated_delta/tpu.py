# SPDX-License-Identifier: Apache-2.0
"""What Gated DeltaNet launches on a TPU: one kernel that goes from sequence to sequence, and its work list.

A step of the grid is a sequence's rows within one block of `BLOCK` rows of the batch. Sequences follow each other in
the order of their rows, so a block of inputs is fetched once, and no sequence needs rows of padding.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from qwen_spmd.pallas.gated_delta.tpu_chunk import Chunk
from qwen_spmd.pallas.gated_delta.tpu_kernel import AHEAD, BUFFERS, WINDOW, kernel
from qwen_spmd.pallas.gated_delta.tpu_pieces import Scratch, Sizes
from qwen_spmd.state import Ragged

BLOCK = 64


def gated_delta(
    qkv_TC: jax.Array,
    b_TU: jax.Array,
    a_TU: jax.Array,
    conv_w_WC: jax.Array,
    a_log_U: jax.Array,
    dt_bias_U: jax.Array,
    conv: jax.Array,
    rec: jax.Array,
    layer: jax.Array,
    rows: Ragged,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    T, C = qkv_TC.shape
    _, _, U, Y, Z = rec.shape
    J, c = (C - U * Z) // (2 * Y), min(BLOCK, T)
    chunks = not rows.one_token and c > WINDOW
    n = Sizes(c=c, C=C, W=len(conv_w_WC), J=J, U=U, Y=Y, Z=Z, B=len(rows.kv_len_B), chunks=chunks)
    if Z % Y:
        raise ValueError(f"heads of {Y}x{Z}: values are taken in parts as long as keys")
    steps = work(rows, n.c)

    def block(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((n.c, width), lambda i, blocks, *_: (blocks[i], 0))

    everything = pl.BlockSpec(memory_space=pltpu.VMEM)
    pool = pl.BlockSpec(memory_space=pl.ANY)
    o_TUZ, conv, rec = pl.pallas_call(
        functools.partial(kernel, n),
        name="gated_delta",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(steps) + 1,
            grid=(len(steps[0]),),
            in_specs=[block(C), block(U), block(U), everything, everything, everything, pool, pool],
            out_specs=[pl.BlockSpec((n.c, U, Z), lambda i, blocks, *_: (blocks[i], 0, 0)), pool, pool],
            scratch_shapes=[
                pltpu.VMEM((BUFFERS, U, Y, Z), rec.dtype),
                pltpu.VMEM((BUFFERS, n.W - 1, C), conv.dtype),
                pltpu.SemaphoreType.DMA((2, 2, BUFFERS)),
                *Scratch.shapes(n),
                *(Chunk.shapes(n, qkv_TC.dtype) if chunks else ()),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((T, U, Z), qkv_TC.dtype), *(jax.typeof(x) for x in (conv, rec))],
        input_output_aliases={len(steps) + 7: 1, len(steps) + 8: 2},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=56 << 20),
    )(*steps, layer[None], qkv_TC, b_TU, a_TU, conv_w_WC, a_log_U[None], dt_bias_U[None], conv, rec)
    return o_TUZ, conv, rec


def work(rows: Ragged, c: int) -> tuple[jax.Array, ...]:
    """Steps of the grid, int32: (block, seq, lo, hi, first, last) of each step and (live, read, write, fresh) of each
    sequence. A step is rows lo to hi of its block, if any; after the last sequence come blocks of padding.

    Sequences without rows have a step, too: reads are started, and writes awaited, a number of sequences apart.
    """
    T, B = len(rows.seq_T), len(rows.kv_len_B)
    blocks = -(-T // c)
    start_B, q_len_B = rows.q_start_B[:-1], rows.q_len_B
    end_B = start_B + q_len_B
    live_B = q_len_B > 0
    first_B = jnp.minimum(start_B // c, blocks - 1)
    last_B = jnp.where(live_B, (end_B - 1) // c, first_B)
    ends_B = jnp.cumsum(last_B - first_B + 1)
    step_M = jnp.arange(B if rows.one_token else B + blocks)
    seq_M = jnp.sum(ends_B <= step_M[:, None], 1)
    at_M = jnp.minimum(seq_M, B - 1)
    before_M = jnp.where(at_M > 0, ends_B[at_M - 1], 0)
    # Beyond the last sequence, this goes on to its next blocks.
    block_M = jnp.minimum(first_B[at_M] + step_M - before_M, blocks - 1)
    lo_M = jnp.maximum(start_B[at_M] - block_M * c, 0)
    hi_M = jnp.where(live_B[at_M] & (seq_M < B), jnp.minimum(end_B[at_M] - block_M * c, c), lo_M)
    first_M = (seq_M < B) & (step_M == before_M)
    last_M = (seq_M < B) & (step_M == ends_B[at_M] - 1)
    of_seq = (jnp.pad(x, (0, AHEAD + 1)) for x in (live_B, rows.read_slot_B, rows.write_slot_B, rows.fresh_B))
    return tuple(x.astype(jnp.int32) for x in (block_M, seq_M, lo_M, hi_M, first_M, last_M, *of_seq))
