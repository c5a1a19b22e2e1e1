# SPDX-License-Identifier: Apache-2.0
"""Sorting choices by expert without a sort: a choice's place is the number of choices that come before it.

Few choices: each is compared with all others, in one launch. Many, in three: blocks of them are counted by expert, the
counts are added up, and each choice is compared with those of its own block.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen_spmd.pallas.triton import ShapeDtypeStruct, launch

FEW = 4096
"""Up to here, comparing all with all is one launch of a few microseconds."""

BLOCK_FEW = 16
"""Choices, or experts, of a program that compares with all others: few, so that programs are many and short."""

COUNTED = 512
"""Of many: choices of a block that is counted."""

BLOCK_COUNT = 64
"""Experts of a program that counts."""

BLOCK_SUM = 16
"""Experts of a program that adds up."""

BLOCK_PLACE = 32
"""Choices of a program that places."""


@triton.jit
def compare_all(
    choices,
    rows,
    pos,
    sizes,
    N: tl.constexpr,
    X: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """The first programs place BLOCK choices each, the others count the choices of BLOCK experts each."""
    program = tl.program_id(0)
    placing: tl.constexpr = (N + BLOCK - 1) // BLOCK
    others = tl.arange(0, ACROSS)
    total = tl.zeros([BLOCK, ACROSS], tl.int32)
    if program < placing:
        n = program * BLOCK + tl.arange(0, BLOCK)
        expert = tl.load(choices + n, mask=n < N, other=-1)
        here = (expert >= 0) & (expert < E)
        # By expert, then by choice, in one number; what is not here is after all others.
        key = expert * N + n
        for start in range(0, N, ACROSS):
            m = start + others
            other = tl.load(choices + m, mask=m < N, other=-1)
            other_key = tl.where((other >= 0) & (other < E), other * N + m, E * N)
            total += (other_key[None, :] < key[:, None]).to(tl.int32)
        before = tl.sum(total, 1)
        tl.store(pos + n, tl.where(here, before, -1), mask=n < N)
        tl.store(rows + before, n // X, mask=here)
    else:
        e = (program - placing) * BLOCK + tl.arange(0, BLOCK)
        for start in range(0, N, ACROSS):
            m = start + others
            other = tl.load(choices + m, mask=m < N, other=-1)
            total += (other[None, :] == e[:, None]).to(tl.int32)
        tl.store(sizes + e, tl.sum(total, 1), mask=e < E)


@triton.jit
def count(choices, counts, N: tl.constexpr, E: tl.constexpr, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """counts[b, e]: choices of expert e in block b."""
    b, e = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], tl.int32)
    for start in range(0, COUNTED, BLOCK):
        m = b * COUNTED + start + tl.arange(0, BLOCK)
        other = tl.load(choices + m, mask=m < N, other=-1)
        total += (other[None, :] == e[:, None]).to(tl.int32)
    tl.store(counts + b * E + e, tl.sum(total, 1), mask=e < E)


@triton.jit
def add_up(
    counts,
    first,
    sizes,
    BLOCKS: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """first[b, e]: the place of the first choice of expert e in block b, of BLOCK experts a program."""
    ahead = tl.program_id(0) * BLOCK
    below = tl.arange(0, BLOCK_E)
    e = ahead + tl.arange(0, BLOCK)
    smaller = tl.zeros([BLOCK_B, BLOCK_E], tl.int32)
    total = tl.zeros([BLOCK_B, BLOCK], tl.int32)
    for start in range(0, BLOCKS, BLOCK_B):
        b = (start + tl.arange(0, BLOCK_B))[:, None]
        smaller += tl.load(counts + b * E + below[None, :], mask=(b < BLOCKS) & (below[None, :] < ahead), other=0)
        total += tl.load(counts + b * E + e[None, :], mask=(b < BLOCKS) & (e[None, :] < E), other=0)
    size = tl.sum(total, 0)
    tl.store(sizes + e, size, mask=e < E)
    place = tl.sum(tl.sum(smaller, 1), 0) + tl.cumsum(size, 0) - size
    for start in range(0, BLOCKS, BLOCK_B):
        b = (start + tl.arange(0, BLOCK_B))[:, None]
        inside = (b < BLOCKS) & (e[None, :] < E)
        n = tl.load(counts + b * E + e[None, :], mask=inside, other=0)
        tl.store(first + b * E + e[None, :], place[None, :] + tl.cumsum(n, 0) - n, mask=inside)
        place += tl.sum(n, 0)


@triton.jit
def place(
    choices,
    first,
    rows,
    pos,
    N: tl.constexpr,
    X: tl.constexpr,
    E: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """BLOCK choices a program, from the places of the first ones of their experts in their block of COUNTED."""
    begin = tl.program_id(0) * BLOCK
    n = begin + tl.arange(0, BLOCK)
    b = begin // COUNTED
    expert = tl.load(choices + n, mask=n < N, other=-1)
    here = (expert >= 0) & (expert < E)
    total = tl.zeros([BLOCK, ACROSS], tl.int32)
    for start in range(b * COUNTED, begin + BLOCK, ACROSS):
        m = start + tl.arange(0, ACROSS)
        other = tl.load(choices + m, mask=m < N, other=-1)
        total += ((other[None, :] == expert[:, None]) & (m[None, :] < n[:, None])).to(tl.int32)
    at = tl.load(first + b * E + expert, mask=here, other=0) + tl.sum(total, 1)
    tl.store(pos + n, tl.where(here, at, -1), mask=n < N)
    tl.store(rows + at, n // X, mask=here)


def expert_sort(experts_TX: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    (T, X), E = experts_TX.shape, num_experts
    N, int32 = T * X, jnp.int32
    rows_and_pos = ShapeDtypeStruct((N,), int32), ShapeDtypeStruct((T, X), int32)
    if N <= FEW:
        rows_R, pos_TX, sizes_E = launch(
            compare_all,
            experts_TX,
            out=(*rows_and_pos, ShapeDtypeStruct((E,), int32)),
            grid=(triton.cdiv(N, BLOCK_FEW) + triton.cdiv(E, BLOCK_FEW),),
            N=N,
            X=X,
            E=E,
            BLOCK=BLOCK_FEW,
            ACROSS=min(256, max(16, triton.next_power_of_2(N))),
        )
        return rows_R, pos_TX, sizes_E
    blocks = triton.cdiv(N, COUNTED)
    by_block = ShapeDtypeStruct((blocks, E), int32)
    (counts,) = launch(
        count,
        experts_TX,
        out=(by_block,),
        grid=(blocks, triton.cdiv(E, BLOCK_COUNT)),
        N=N,
        E=E,
        COUNTED=COUNTED,
        BLOCK=BLOCK_COUNT,
    )
    first, sizes_E = launch(
        add_up,
        counts,
        out=(by_block, ShapeDtypeStruct((E,), int32)),
        grid=(triton.cdiv(E, BLOCK_SUM),),
        warps=8,
        BLOCKS=blocks,
        E=E,
        BLOCK=BLOCK_SUM,
        BLOCK_B=32,
        BLOCK_E=triton.next_power_of_2(E),
    )
    rows_R, pos_TX = launch(
        place,
        experts_TX,
        first,
        out=rows_and_pos,
        grid=(triton.cdiv(N, BLOCK_PLACE),),
        N=N,
        X=X,
        E=E,
        COUNTED=COUNTED,
        BLOCK=BLOCK_PLACE,
        ACROSS=128,
    )
    return rows_R, pos_TX, sizes_E
