# SPDX-License-Identifier: Apache-2.0
"""Sorting choices by expert without a sort: a choice's place is the number of choices that come before it.

Few choices: each is compared with all others, in one launch. Many: blocks of them are counted by expert first, and each
is compared with its own block's.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen_spmd.pallas.triton import ShapeDtypeStruct, launch

BLOCK = 64
"""Choices, or experts, of a program."""

COUNTED = 512
"""Choices of a block that is counted."""

FEW = 4096
"""Up to here, comparing all with all is one launch of a few microseconds."""


@triton.jit
def compare_all(choices, rows, pos, sizes, N: tl.constexpr, X: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr):
    """The first programs place BLOCK choices each, the others count the choices of BLOCK experts each."""
    program = tl.program_id(0)
    placing: tl.constexpr = (N + BLOCK - 1) // BLOCK
    others = tl.arange(0, BLOCK)
    if program < placing:
        n = program * BLOCK + tl.arange(0, BLOCK)
        expert = tl.load(choices + n, mask=n < N, other=-1)
        before = tl.zeros([BLOCK], tl.int32)
        for start in range(0, N, BLOCK):
            m = start + others
            other = tl.load(choices + m, mask=m < N, other=-1)[None, :]
            earlier = (other < expert[:, None]) | ((other == expert[:, None]) & (m[None, :] < n[:, None]))
            before += tl.sum(((other >= 0) & (other < E) & earlier).to(tl.int32), 1)
        here = (n < N) & (expert >= 0) & (expert < E)
        tl.store(pos + n, before, mask=here)
        tl.store(rows + before, n // X, mask=here)
    else:
        e = (program - placing) * BLOCK + tl.arange(0, BLOCK)
        count = tl.zeros([BLOCK], tl.int32)
        for start in range(0, N, BLOCK):
            m = start + others
            other = tl.load(choices + m, mask=m < N, other=-1)
            count += tl.sum((other[None, :] == e[:, None]).to(tl.int32), 1)
        tl.store(sizes + e, count, mask=e < E)


@triton.jit
def count(choices, counts, N: tl.constexpr, E: tl.constexpr, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """counts[b, e]: choices of expert e in block b."""
    b, e = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, COUNTED, BLOCK):
        m = b * COUNTED + start + tl.arange(0, BLOCK)
        other = tl.load(choices + m, mask=m < N, other=-1)
        total += tl.sum((other[None, :] == e[:, None]).to(tl.int32), 1)
    tl.store(counts + b * E + e, total, mask=e < E)


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
):
    """first[b, e]: the place of the first choice of expert e in block b."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = tl.program_id(0) * BLOCK // COUNTED
    expert = tl.load(choices + n, mask=n < N, other=-1)
    here = (n < N) & (expert >= 0) & (expert < E)
    at = tl.load(first + b * E + expert, mask=here, other=0)
    for start in range(b * COUNTED, (tl.program_id(0) + 1) * BLOCK, BLOCK):
        m = start + tl.arange(0, BLOCK)
        other = tl.load(choices + m, mask=m < N, other=-1)
        at += tl.sum(((other[None, :] == expert[:, None]) & (m[None, :] < n[:, None])).to(tl.int32), 1)
    tl.store(pos + n, at, mask=here)
    tl.store(rows + at, n // X, mask=here)


def expert_sort(experts_TX: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    (T, X), E = experts_TX.shape, num_experts
    N, sizes = T * X, {"N": T * X, "X": X, "E": E, "BLOCK": BLOCK}
    rows_and_pos = ShapeDtypeStruct((N,), jnp.int32), ShapeDtypeStruct((T, X), jnp.int32)
    by_expert = triton.cdiv(E, BLOCK)
    if N <= FEW:
        out = (*rows_and_pos, ShapeDtypeStruct((E,), jnp.int32))
        rows_R, pos_TX, sizes_E = launch(
            compare_all, experts_TX, out=out, grid=(triton.cdiv(N, BLOCK) + by_expert,), **sizes
        )
        return rows_R, pos_TX, sizes_E
    blocks = triton.cdiv(N, COUNTED)
    counts_E = {"N": N, "E": E, "COUNTED": COUNTED, "BLOCK": BLOCK}
    out = (ShapeDtypeStruct((blocks, E), jnp.int32),)
    (counts,) = launch(count, experts_TX, out=out, grid=(blocks, by_expert), **counts_E)
    sizes_E = jnp.sum(counts, 0)
    starts_E = jnp.cumsum(sizes_E) - sizes_E
    first = (starts_E + jnp.cumsum(counts, 0) - counts).astype(jnp.int32)
    rows_R, pos_TX = launch(
        place, experts_TX, first, out=rows_and_pos, grid=(triton.cdiv(N, BLOCK),), COUNTED=COUNTED, **sizes
    )
    return rows_R, pos_TX, sizes_E.astype(jnp.int32)
