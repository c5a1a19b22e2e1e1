# SPDX-License-Identifier: Apache-2.0
"""Few rows by whole weights in one launch: a program streams a column of tiles of one weight through the matrix unit.

Where an output has too few columns to occupy all processors, programs share the sum as well (`linear_parts`). More
rows than FEW are XLA's.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax.typing import DTypeLike

from qwen_spmd.pallas.linear import reference
from qwen_spmd.pallas.triton import ShapeDtypeStruct, configs, launch, processors

FEW = 64
"""Rows of a tile at most."""

MOST = 4
"""Weights of whole vectors of columns that one launch takes, and one of any width."""

VECTOR = 16


@triton.jit
def product(x, w, o0, part, O, T: tl.constexpr, I: tl.constexpr, SHARE: tl.constexpr, EVEN: tl.constexpr,
            BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """[BLOCK_T, BLOCK_O] of x w from column o0 on: the sum over SHARE of the I, of the part-th such share.

    EVEN: no tile lies over an edge.
    """
    SWAP: tl.constexpr = BLOCK_T < 64 and BLOCK_O >= 64  # the matrix unit takes 64 on one side
    t, o = tl.arange(0, BLOCK_T), o0 + tl.arange(0, BLOCK_O)
    total = tl.zeros([BLOCK_O, BLOCK_T] if SWAP else [BLOCK_T, BLOCK_O], tl.float32)
    for step in tl.range(0, SHARE, BLOCK_I, num_stages=STAGES):
        i = part * SHARE + step + tl.arange(0, BLOCK_I)
        x_at, w_at = x + t[:, None] * I + i[None, :], w + i[:, None] * O + o[None, :]
        if EVEN:
            rows = tl.load(x_at, mask=(t < T)[:, None], other=0.0)
            weights = tl.load(w_at, eviction_policy="evict_first")
        else:
            rows = tl.load(x_at, mask=(t < T)[:, None] & (i < I)[None, :], other=0.0)
            weights = tl.load(w_at, mask=(i < I)[:, None] & (o < O)[None, :], other=0.0)
        weights = weights.to(rows.dtype)
        if SWAP:
            total = tl.dot(tl.trans(weights), tl.trans(rows), total, input_precision="ieee")
        else:
            total = tl.dot(rows, weights, total, input_precision="ieee")
    return tl.trans(total) if SWAP else total


@triton.jit
def put(result, out, o0, part, T: tl.constexpr, O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr):
    t, o = tl.arange(0, BLOCK_T), o0 + tl.arange(0, BLOCK_O)
    at = out + part * (T * O) + t[:, None] * O + o[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=(t < T)[:, None] & (o < O)[None, :])


@triton.jit
def few_rows(x, w_0, w_1, w_2, w_3, w_4, out_0, out_1, out_2, out_3, out_4,
             T: tl.constexpr, I: tl.constexpr, SHARE: tl.constexpr, O_0: tl.constexpr, O_1: tl.constexpr,
             O_2: tl.constexpr, O_3: tl.constexpr, O_4: tl.constexpr,
             BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr, STAGES: tl.constexpr,
             WHOLE: tl.constexpr):  # fmt: skip
    """Programs (tile of the first four outputs' columns one after the other, then of the last's; part). What has 0
    columns is not there. WHOLE: the shares are whole tiles, and I is all of them."""
    first_1: tl.constexpr = (O_0 + BLOCK_O - 1) // BLOCK_O
    first_2: tl.constexpr = first_1 + (O_1 + BLOCK_O - 1) // BLOCK_O
    first_3: tl.constexpr = first_2 + (O_2 + BLOCK_O - 1) // BLOCK_O
    first_4: tl.constexpr = first_3 + (O_3 + BLOCK_O - 1) // BLOCK_O
    narrow: tl.constexpr = O_0 % BLOCK_O + O_1 % BLOCK_O + O_2 % BLOCK_O + O_3 % BLOCK_O
    even: tl.constexpr = WHOLE and narrow == 0
    c, part = tl.program_id(0), tl.program_id(1)
    if c < first_4:
        # One loop for all of them: each loop has buffers of its own, and they would not fit.
        w, first, O = w_0, c * 0, c * 0 + O_0
        if c >= first_1:
            w, first, O = w_1, c * 0 + first_1, c * 0 + O_1
        if c >= first_2:
            w, first, O = w_2, c * 0 + first_2, c * 0 + O_2
        if c >= first_3:
            w, first, O = w_3, c * 0 + first_3, c * 0 + O_3
        o0 = (c - first) * BLOCK_O
        result = product(x, w, o0, part, O, T, I, SHARE, even, BLOCK_T, BLOCK_I, BLOCK_O, STAGES)
        if c < first_1:
            put(result, out_0, o0, part, T, O_0, BLOCK_T, BLOCK_O)
        elif c < first_2:
            put(result, out_1, o0, part, T, O_1, BLOCK_T, BLOCK_O)
        elif c < first_3:
            put(result, out_2, o0, part, T, O_2, BLOCK_T, BLOCK_O)
        else:
            put(result, out_3, o0, part, T, O_3, BLOCK_T, BLOCK_O)
    elif O_4 > 0:  # of any width: rows of the others are known to begin at whole vectors
        o0 = (c - first_4) * BLOCK_O
        result = product(x, w_4, o0, part, O_4, T, I, SHARE, False, BLOCK_T, BLOCK_I, BLOCK_O, 2)
        put(result, out_4, o0, part, T, O_4, BLOCK_T, BLOCK_O)


def linear(x: jax.Array, ws: Sequence[jax.Array], out_dtypes: Sequence[DTypeLike]) -> tuple[jax.Array, ...]:
    if x.ndim != 2 or not _few(x, ws):
        return reference.linear(x, ws, out_dtypes)
    made = _launches("linear", x, [w.reshape(len(w), -1) for w in ws], out_dtypes, 1)
    return tuple(y.reshape(len(x), *w.shape[1:]) for y, w in zip(made, ws, strict=True))


def linear_parts(x: jax.Array, ws: Sequence[jax.Array], dtype: DTypeLike) -> tuple[jax.Array, ...]:
    if x.ndim != ws[0].ndim or not _few(x, ws):
        return reference.linear_parts(x, ws, dtype)
    x, ws = x.reshape(len(x), -1), [w.reshape(-1, w.shape[-1]) for w in ws]
    # About a program for each processor; parts are written and read, so no more of them than that.
    tiles = sum(triton.cdiv(w.shape[1], 64) for w in ws)
    parts = max(1, min(processors() / tiles, 8, x.shape[1] / 64))
    return tuple(_launches("parts", x, ws, [jnp.float32] * len(ws), 1 << round(math.log2(parts))))


def _few(x: jax.Array, ws: Sequence[jax.Array]) -> bool:
    """Few rows, and weights that the kernel takes: of one dtype, with offsets of 32 bits."""
    return x.shape[0] <= FEW and len({w.dtype for w in ws}) == 1 and all(w.size < 1 << 31 for w in ws)


Product = tuple[jax.Array, DTypeLike]
"""A weight [I, O], and what its result is."""


def _launches(
    kernel: str, x: jax.Array, ws: Sequence[jax.Array], out_dtypes: Sequence[DTypeLike], parts: int
) -> list[jax.Array]:
    """[parts, T, O] of each weight [I, O]."""
    odd = [i for i, w in enumerate(ws) if w.shape[1] % VECTOR]
    even = [i for i in range(len(ws)) if i not in odd]
    done: dict[int, jax.Array] = {}
    while even or odd:
        some, one = even[:MOST], odd[:1]
        even, odd = even[MOST:], odd[1:]
        made = _launch(kernel, x, *([(ws[i], out_dtypes[i]) for i in which] for which in (some, one)), parts)
        done |= zip(some + one, made, strict=True)
    return [done[i] for i in range(len(ws))]


def _launch(kernel: str, x: jax.Array, even: list[Product], odd: list[Product], parts: int) -> list[jax.Array]:
    """Of at most MOST weights of whole vectors of columns, and one of any width."""
    (T, I), widths = x.shape, [w.shape[1] for w, _ in even + odd]
    block_t = max(16, triton.next_power_of_2(T))
    # As wide as leaves something to do for most processors: wider reads are faster.
    programs = lambda width: sum(triton.cdiv(O, width) for O in widths) * parts  # noqa: E731
    block_o = next((width for width in (128, 64, 32) if programs(width) >= processors() * 0.6), 16)
    if kernel == "parts":
        block_o = 64
    rule = {"block_o": block_o, "block_i": 64, "warps": 4, "stages": 5}
    if kernel == "parts":
        rule |= {"parts": parts}
    if block_o <= 64 and block_t <= 32:
        rule |= {"block_i": 128, "stages": 4}
    name = f"{x.dtype.name} {T} rows of {I} by {'+'.join(map(str, widths))}"
    c = configs.choose("linear", kernel, name, rule)
    parts = c["parts"] if kernel == "parts" else 1
    fit = lambda size, block: min(block, max(16, triton.next_power_of_2(size)))  # noqa: E731
    block_o, block_i = fit(max(widths), c["block_o"]), fit(triton.cdiv(I, parts), c["block_i"])
    if x.dtype == jnp.float32:  # computed without the matrix unit
        block_o, block_i = min(32, block_o), 16
    share = triton.cdiv(triton.cdiv(I, parts), block_i) * block_i
    # The kernel has parameters for all that there may be; a weight that is not read stands for what is not.
    slots = [*even, *[None] * (MOST - len(even)), *(odd or [None])]
    ws = [slot[0] if slot else (even + odd)[0][0] for slot in slots]
    nothing = ShapeDtypeStruct((1,), jnp.float32)
    made = launch(
        few_rows,
        x,
        *ws,
        out=tuple(
            ShapeDtypeStruct((parts, T, slot[0].shape[1]), jnp.dtype(slot[1])) if slot else nothing for slot in slots
        ),
        grid=(sum(triton.cdiv(O, block_o) for O in widths), parts),
        warps=c["warps"],
        T=T,
        I=I,
        SHARE=share,
        **{f"O_{i}": slot[0].shape[1] if slot else 0 for i, slot in enumerate(slots)},
        BLOCK_T=block_t,
        BLOCK_I=block_i,
        BLOCK_O=block_o,
        STAGES=c["stages"],
        WHOLE=I == parts * share,
        vary=tuple((x, w) for w in ws),  # some are sharded and some are not
    )
    return [y for y, slot in zip(made, slots, strict=True) if slot]
