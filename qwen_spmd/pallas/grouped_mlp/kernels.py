# SPDX-License-Identifier: Apache-2.0
"""The grouped matmul in Triton: of tiles of one expert's rows by some of its outputs, taken in turn by the programs."""

import triton
import triton.language as tl


@triton.jit
def load_weights(w, matrix, i0, o0, I, O, TMA: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr):
    """[BLOCK_I, BLOCK_O] of a matrix of a stack [.., I, O]; zeros beyond its edges."""
    if TMA:
        tile = w.load([matrix * I + i0, o0])
    else:
        i, o = i0 + tl.arange(0, BLOCK_I), o0 + tl.arange(0, BLOCK_O)
        at = (matrix.to(tl.int64) * I + i)[:, None] * O + o[None, :]
        tile = tl.load(w + at, mask=(i < I)[:, None] & (o < O)[None, :], other=0.0)
    return tile


@triton.jit
def load_scales(s, matrix, i0, o0, I: tl.constexpr, O: tl.constexpr, SCALE_I: tl.constexpr, SCALE_O: tl.constexpr,
                BLOCK_O: tl.constexpr):  # fmt: skip
    """Of the row of blocks that i0 is in: a scalar where all BLOCK_O columns have the same, else [BLOCK_O]."""
    rows: tl.constexpr = (I + SCALE_I - 1) // SCALE_I
    columns: tl.constexpr = (O + SCALE_O - 1) // SCALE_O
    base = s + matrix.to(tl.int64) * (rows * columns) + i0 // SCALE_I * columns
    if SCALE_O % BLOCK_O == 0:
        scale = tl.load(base + o0 // SCALE_O)
    else:
        o = o0 + tl.arange(0, BLOCK_O)
        scale = tl.load(base + o // SCALE_O, mask=o < O, other=0.0)
    return scale


@triton.jit
def scale_weights(tile, s, matrix, i0, o0, I: tl.constexpr, O: tl.constexpr, SCALE_I: tl.constexpr,
                  SCALE_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr):  # fmt: skip
    """Each of [BLOCK_I, BLOCK_O] by its own scale, in float32."""
    rows: tl.constexpr = (I + SCALE_I - 1) // SCALE_I
    columns: tl.constexpr = (O + SCALE_O - 1) // SCALE_O
    i, o = i0 + tl.arange(0, BLOCK_I), o0 + tl.arange(0, BLOCK_O)
    at = matrix.to(tl.int64) * (rows * columns) + (i // SCALE_I)[:, None] * columns + (o // SCALE_O)[None, :]
    return tile.to(tl.float32) * tl.load(s + at, mask=(i < I)[:, None] & (o < O)[None, :], other=0.0)


@triton.jit
def multiply_add(x, w, total, scale, SCALED: tl.constexpr, SWAP: tl.constexpr):
    """total + scale (x w), or its transpose; x [BLOCK_R, BLOCK_I], w [BLOCK_I, BLOCK_O], scale [BLOCK_O] or scalar."""
    if SWAP:
        a, b = tl.trans(w), tl.trans(x)
    else:
        a, b = x, w
    if SCALED:
        if scale.type.is_block():
            scale = tl.expand_dims(scale, 1 if SWAP else 0)
        total += scale * tl.dot(a, b, input_precision="ieee")
    else:
        total = tl.dot(a, b, total, input_precision="ieee")
    return total


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
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """out[r] = silu(x[rows[r]] w) * (x[rows[r]] w_up) if GATED, else x[r] w, for the matrices of r's expert.

    SCALE_I, SCALE_O  block of a scale, 0: the weights have none
    """
    columns: tl.constexpr = (O + BLOCK_O - 1) // BLOCK_O
    dtype: tl.constexpr = out.dtype.element_ty
    # Scales that a whole tile's rows share are left for the product of that tile.
    late: tl.constexpr = SCALE_I > 0 and SCALE_I % BLOCK_I == 0
    early: tl.constexpr = SCALE_I > 0 and SCALE_I % BLOCK_I != 0
    e = tl.arange(0, BLOCK_E)
    size = tl.load(sizes + e, mask=e < E, other=0)
    row_ends = tl.cumsum(size, 0)
    tile_ends = tl.cumsum((size + BLOCK_R - 1) // BLOCK_R, 0)
    first_matrix = tl.load(layer) * E
    # An expert's columns one after the other: they share rows, and the next rows find its weights in the L2 cache.
    for index in tl.range(tl.program_id(0), tl.max(tile_ends, 0) * columns, tl.num_programs(0), flatten=FLATTEN):
        tile, o0 = index // columns, index % columns * BLOCK_O
        before = tile_ends <= tile
        matrix = first_matrix + tl.sum(before.to(tl.int32), 0)
        tiles_before = tl.max(tl.where(before, tile_ends, 0), 0)
        first = tl.max(tl.where(before, row_ends, 0), 0) + (tile - tiles_before) * BLOCK_R
        end = tl.min(tl.where(before, 0x7FFFFFFF, row_ends), 0)
        r = first + tl.arange(0, BLOCK_R)
        live = r < end
        row = tl.load(rows + r, mask=live, other=0) if GATED else r
        if not TMA_ROWS:
            x_row = x + row.to(tl.int64)[:, None] * I + tl.arange(0, BLOCK_I)[None, :]
        if SWAP:
            total = tl.zeros([BLOCK_O, BLOCK_R], tl.float32)
            total_up = tl.zeros([BLOCK_O, BLOCK_R], tl.float32)
        else:
            total = tl.zeros([BLOCK_R, BLOCK_O], tl.float32)
            total_up = tl.zeros([BLOCK_R, BLOCK_O], tl.float32)
        scale, scale_up = 1.0, 1.0
        if late:
            scale = load_scales(s, matrix, 0, o0, I, O, SCALE_I, SCALE_O, BLOCK_O)
            if GATED:
                scale_up = load_scales(s_up, matrix, 0, o0, I, O, SCALE_I, SCALE_O, BLOCK_O)
        for i0 in range(0, I, BLOCK_I):
            if TMA_ROWS:
                part = x.load([first, i0])
            elif I % BLOCK_I == 0:
                part = tl.load(x_row + i0, mask=live[:, None], other=0.0)
            else:
                part = tl.load(x_row + i0, mask=live[:, None] & (i0 + tl.arange(0, BLOCK_I) < I)[None, :], other=0.0)
            tile_w = load_weights(w, matrix, i0, o0, I, O, TMA, BLOCK_I, BLOCK_O)
            if early:
                tile_w = scale_weights(tile_w, s, matrix, i0, o0, I, O, SCALE_I, SCALE_O, BLOCK_I, BLOCK_O)
            if late:  # the next ones, early enough
                next_i0 = tl.minimum(i0 + BLOCK_I, I - 1)
                next_scale = load_scales(s, matrix, next_i0, o0, I, O, SCALE_I, SCALE_O, BLOCK_O)
            total = multiply_add(part, tile_w.to(dtype), total, scale, late, SWAP)
            if late:
                scale = next_scale
            if GATED:
                tile_up = load_weights(w_up, matrix, i0, o0, I, O, TMA, BLOCK_I, BLOCK_O)
                if early:
                    tile_up = scale_weights(tile_up, s_up, matrix, i0, o0, I, O, SCALE_I, SCALE_O, BLOCK_I, BLOCK_O)
                if late:
                    next_up = load_scales(s_up, matrix, next_i0, o0, I, O, SCALE_I, SCALE_O, BLOCK_O)
                total_up = multiply_add(part, tile_up.to(dtype), total_up, scale_up, late, SWAP)
                if late:
                    scale_up = next_up
        if GATED:
            total = total / (1 + tl.exp(-total)) * total_up
        total = total.to(dtype)
        if SWAP:
            total = tl.trans(total)
        o = o0 + tl.arange(0, BLOCK_O)
        tl.store(out + r.to(tl.int64)[:, None] * O + o[None, :], total, mask=live[:, None] & (o < O)[None, :])
