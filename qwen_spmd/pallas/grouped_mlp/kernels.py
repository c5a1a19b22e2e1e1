# SPDX-License-Identifier: Apache-2.0
"""The grouped matmul in Triton: of tiles of one expert's rows by some of its outputs, taken in turn by the programs."""

import triton
import triton.language as tl

from qwen_spmd.pallas.triton.kernels import silu

NEVER, AFTER, BEFORE, EACH = (tl.constexpr(i) for i in range(4))
"""When weights in eight bits get their scales: the product of a tile, its weights, or each weight its own."""


@triton.jit
def load_rows(x, x_at, live, first, i0, I: tl.constexpr, BLOCK_I: tl.constexpr, TMA: tl.constexpr):
    """[BLOCK_R, BLOCK_I] of x; zeros beyond I and, without TMA, of rows that are not live."""
    if TMA:
        rows = x.load([first, i0])
    elif I % BLOCK_I == 0:
        rows = tl.load(x_at + i0, mask=live[:, None], other=0.0)
    else:
        rows = tl.load(x_at + i0, mask=live[:, None] & (i0 + tl.arange(0, BLOCK_I) < I)[None, :], other=0.0)
    return rows


@triton.jit
def load_weights(w, matrix, i0, o0, I: tl.constexpr, O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr,
                 TMA: tl.constexpr):  # fmt: skip
    """[BLOCK_I, BLOCK_O] of a matrix of a stack [.., I, O]; zeros beyond its edges."""
    if TMA:
        tile = w.load([matrix * I + i0, o0])
    else:
        i, o = i0 + tl.arange(0, BLOCK_I), o0 + tl.arange(0, BLOCK_O)
        at = (matrix.to(tl.int64) * I + i)[:, None] * O + o[None, :]
        tile = tl.load(w + at, mask=(i < I)[:, None] & (o < O)[None, :], other=0.0)
    return tile


@triton.jit
def load_scales(s, matrix, i0, o0, I: tl.constexpr, O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr,
                SCALE_I: tl.constexpr, SCALE_O: tl.constexpr, WHEN: tl.constexpr):  # fmt: skip
    """Of a tile of weights: a scalar where it lies in one block, else [BLOCK_O], or [BLOCK_I, BLOCK_O] for EACH."""
    rows: tl.constexpr = (I + SCALE_I - 1) // SCALE_I
    columns: tl.constexpr = (O + SCALE_O - 1) // SCALE_O
    base = s + matrix.to(tl.int64) * (rows * columns)
    i, o = i0 + tl.arange(0, BLOCK_I), o0 + tl.arange(0, BLOCK_O)
    if WHEN == EACH:
        at = (i // SCALE_I)[:, None] * columns + (o // SCALE_O)[None, :]
        scale = tl.load(base + at, mask=(i < I)[:, None] & (o < O)[None, :], other=0.0)
    elif SCALE_O % BLOCK_O == 0:
        scale = tl.load(base + tl.minimum(i0 // SCALE_I, rows - 1) * columns + o0 // SCALE_O)
    else:
        at = tl.minimum(i0 // SCALE_I, rows - 1) * columns + o // SCALE_O
        scale = tl.load(base + at, mask=o < O, other=0.0)
    return scale


@triton.jit
def multiply_add(rows, weights, scale, total, WHEN: tl.constexpr, SWAP: tl.constexpr):
    """total + rows weights, or its transpose; rows [BLOCK_R, BLOCK_I], weights [BLOCK_I, BLOCK_O] times scale."""
    if WHEN == BEFORE or WHEN == EACH:
        if scale.type.is_block() and len(scale.shape) == 1:
            scale = tl.expand_dims(scale, 0)
        weights = weights.to(tl.float32) * scale
    elif WHEN == AFTER:  # by way of float32: the machine is slow at 16 bits to 16
        weights = weights.to(tl.float32)
    weights = weights.to(rows.dtype)
    if SWAP:
        a, b = tl.trans(weights), tl.trans(rows)
    else:
        a, b = rows, weights
    if WHEN == AFTER:
        if scale.type.is_block():
            scale = tl.expand_dims(scale, 1 if SWAP else 0)
        total += scale * tl.dot(a, b, input_precision="ieee")
    else:
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def multiply(x, x_at, live, first, w, s, matrix, o0, I: tl.constexpr, O: tl.constexpr, BLOCK_R: tl.constexpr,
             BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr, SCALE_I: tl.constexpr, SCALE_O: tl.constexpr,
             WHEN: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, TMA_ROWS: tl.constexpr):  # fmt: skip
    """A tile's rows times its columns of w, float32 [BLOCK_R, BLOCK_O], or transposed."""
    total = tl.zeros([BLOCK_O, BLOCK_R] if SWAP else [BLOCK_R, BLOCK_O], tl.float32)
    scale = 1.0
    if WHEN == AFTER or WHEN == BEFORE:
        scale = load_scales(s, matrix, 0, o0, I, O, BLOCK_I, BLOCK_O, SCALE_I, SCALE_O, WHEN)
    for i0 in range(0, I, BLOCK_I):
        rows = load_rows(x, x_at, live, first, i0, I, BLOCK_I, TMA_ROWS)
        tile = load_weights(w, matrix, i0, o0, I, O, BLOCK_I, BLOCK_O, TMA)
        now = scale
        if WHEN == EACH:
            now = load_scales(s, matrix, i0, o0, I, O, BLOCK_I, BLOCK_O, SCALE_I, SCALE_O, WHEN)
        elif WHEN != NEVER:  # a step ahead
            scale = load_scales(s, matrix, i0 + BLOCK_I, o0, I, O, BLOCK_I, BLOCK_O, SCALE_I, SCALE_O, WHEN)
        total = multiply_add(rows, tile, now, total, WHEN, SWAP)
    return total


@triton.jit
def multiply_both(x, x_at, live, first, w, w_up, s, s_up, matrix, o0, I: tl.constexpr, O: tl.constexpr,
                  BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr, SCALE_I: tl.constexpr,
                  SCALE_O: tl.constexpr, WHEN: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
                  TMA_ROWS: tl.constexpr):  # fmt: skip
    """`multiply` by w and by w_up, of rows that are read once."""
    total = tl.zeros([BLOCK_O, BLOCK_R] if SWAP else [BLOCK_R, BLOCK_O], tl.float32)
    total_up = total
    scale, scale_up = 1.0, 1.0
    if WHEN == AFTER or WHEN == BEFORE:
        scale = load_scales(s, matrix, 0, o0, I, O, BLOCK_I, BLOCK_O, SCALE_I, SCALE_O, WHEN)
        scale_up = load_scales(s_up, matrix, 0, o0, I, O, BLOCK_I, BLOCK_O, SCALE_I, SCALE_O, WHEN)
    for i0 in range(0, I, BLOCK_I):
        rows = load_rows(x, x_at, live, first, i0, I, BLOCK_I, TMA_ROWS)
        tile = load_weights(w, matrix, i0, o0, I, O, BLOCK_I, BLOCK_O, TMA)
        tile_up = load_weights(w_up, matrix, i0, o0, I, O, BLOCK_I, BLOCK_O, TMA)
        now, now_up = scale, scale_up
        if WHEN == EACH:
            now = load_scales(s, matrix, i0, o0, I, O, BLOCK_I, BLOCK_O, SCALE_I, SCALE_O, WHEN)
            now_up = load_scales(s_up, matrix, i0, o0, I, O, BLOCK_I, BLOCK_O, SCALE_I, SCALE_O, WHEN)
        elif WHEN != NEVER:  # a step ahead
            scale = load_scales(s, matrix, i0 + BLOCK_I, o0, I, O, BLOCK_I, BLOCK_O, SCALE_I, SCALE_O, WHEN)
            scale_up = load_scales(s_up, matrix, i0 + BLOCK_I, o0, I, O, BLOCK_I, BLOCK_O, SCALE_I, SCALE_O, WHEN)
        total = multiply_add(rows, tile, now, total, WHEN, SWAP)
        total_up = multiply_add(rows, tile_up, now_up, total_up, WHEN, SWAP)
    return total, total_up


@triton.jit
def ends(sizes, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr):
    """Of each expert's rows and tiles, [BLOCK_E] both: tiles have BLOCK_R rows of one expert, the last one fewer."""
    e = tl.arange(0, BLOCK_E)
    size = tl.load(sizes + e, mask=e < E, other=0)
    return tl.cumsum(size, 0), tl.cumsum((size + BLOCK_R - 1) // BLOCK_R, 0)


@triton.jit
def find(tile, row_ends, tile_ends, BLOCK_R: tl.constexpr):
    """(expert, its first row in the tile, the end of its rows)."""
    before = tile_ends <= tile
    tiles_before = tl.max(tl.where(before, tile_ends, 0), 0)
    first = tl.max(tl.where(before, row_ends, 0), 0) + (tile - tiles_before) * BLOCK_R
    end = tl.min(tl.where(before, 0x7FFFFFFF, row_ends), 0)
    return tl.sum(before.to(tl.int32), 0), first, end


@triton.jit
def grouped_matmul(
    x,
    rows,
    sizes,
    layer,
    w,
    w_up,
    s,
    s_up,
    out,
    E: tl.constexpr,
    I: tl.constexpr,
    O: tl.constexpr,
    GATED: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    TMA_ROWS: tl.constexpr,
    SCALE_I: tl.constexpr,
    SCALE_O: tl.constexpr,
    WHEN: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """out[r] = silu(x[rows[r]] w) * (x[rows[r]] w_up) if GATED, else x[r] w, for the matrices of r's expert.

    SWAP              compute transposed
    SCALE_I, SCALE_O  block of a scale; WHEN it is applied
    FLATTEN           load a tile's first weights while the one before is finished
    """
    columns: tl.constexpr = (O + BLOCK_O - 1) // BLOCK_O
    dtype: tl.constexpr = out.dtype.element_ty
    row_ends, tile_ends = ends(sizes, E, BLOCK_E, BLOCK_R)
    first_matrix = tl.load(layer) * E
    # An expert's columns one after the other: they share rows, and the next rows find its weights in the L2 cache.
    for index in tl.range(tl.program_id(0), tl.max(tile_ends, 0) * columns, tl.num_programs(0), flatten=FLATTEN):
        tile, o0 = index // columns, index % columns * BLOCK_O
        expert, first, end = find(tile, row_ends, tile_ends, BLOCK_R)
        matrix = first_matrix + expert
        r, o = first + tl.arange(0, BLOCK_R), o0 + tl.arange(0, BLOCK_O)
        live = r < end
        x_at = x
        if not TMA_ROWS:
            row = tl.load(rows + r, mask=live, other=0) if GATED else r
            x_at = x + row.to(tl.int64)[:, None] * I + tl.arange(0, BLOCK_I)[None, :]
        # Offsets of 32 bits from the tile's own address: addresses of 64 would take twice the registers.
        out_at = out + (first.to(tl.int64) * O + o0)
        out_at += tl.arange(0, BLOCK_R)[:, None] * O + tl.arange(0, BLOCK_O)[None, :]
        kept = live[:, None] & (o < O)[None, :]
        if GATED:
            gate, up = multiply_both(x, x_at, live, first, w, w_up, s, s_up, matrix, o0, I, O, BLOCK_R, BLOCK_I,
                                     BLOCK_O, SCALE_I, SCALE_O, WHEN, SWAP, TMA, TMA_ROWS)  # fmt: skip
            total = silu(gate) * up
        else:
            total = multiply(x, x_at, live, first, w, s, matrix, o0, I, O, BLOCK_R, BLOCK_I, BLOCK_O, SCALE_I,
                             SCALE_O, WHEN, SWAP, TMA, TMA_ROWS)  # fmt: skip
        total = total.to(dtype)
        tl.store(out_at, tl.trans(total) if SWAP else total, mask=kept)
