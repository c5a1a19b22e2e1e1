# SPDX-License-Identifier: Apache-2.0
"""Weighted sums of experts' rows: a program gathers one row's X pieces of BLOCK_D columns and adds them in float32."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen_spmd.pallas.triton import ShapeDtypeStruct, launch


@triton.jit
def row_sum(y, pos, gates, t, d, D: tl.constexpr, X: tl.constexpr, BLOCK_D: tl.constexpr):
    """float32 [BLOCK_D]: row t's sum, at d."""
    total = tl.zeros([BLOCK_D], tl.float32)
    for x in tl.static_range(X):
        place = tl.load(pos + t * X + x).to(tl.int64)
        here = place >= 0
        gate = tl.where(here, tl.load(gates + t * X + x), 0.0)
        # The mask must be seen to be the same for 16 bytes, or single elements are loaded.
        row = tl.load(y + place * D + d, mask=here & (d < D), other=0.0)
        total += gate * row.to(tl.float32)
    return total


@triton.jit
def weighted_sum(y, pos, gates, out, D: tl.constexpr, X: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    tl.store(out + t * D + d, row_sum(y, pos, gates, t, d, D, X, BLOCK_D), mask=d < D)


def expert_sum(y_RD: jax.Array, pos_TX: jax.Array, gates_TX: jax.Array) -> jax.Array:
    (T, X), D = pos_TX.shape, y_RD.shape[1]
    block = min(triton.next_power_of_2(D), 512 if T * D < 1 << 19 else 2048)
    (y_TD,) = launch(
        weighted_sum,
        y_RD,
        pos_TX,
        gates_TX,
        out=(ShapeDtypeStruct((T, D), jnp.float32),),
        grid=(T, triton.cdiv(D, block)),
        warps=max(1, min(8, block // 256)),
        D=D,
        X=X,
        BLOCK_D=block,
    )
    return y_TD
