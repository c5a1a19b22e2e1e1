# SPDX-License-Identifier: Apache-2.0
"""The grouped matmul of microscaled rows and weights in Triton, over the tiles of `kernels.grouped_matmul`."""

import triton
import triton.language as tl

from qwen_spmd.pallas.grouped_mlp.kernels import ends, find
from qwen_spmd.pallas.triton.kernels import silu


@triton.jit
def load_part(x, line, live, i0, I: tl.constexpr, GROUP: tl.constexpr, BLOCK_I: tl.constexpr):
    """[lines, BLOCK_I / GROUP] of lines [.., I / GROUP], from element i0 of I; GROUP elements share an entry."""
    i = i0 // GROUP + tl.arange(0, BLOCK_I // GROUP)
    at = x + line[:, None] * (I // GROUP) + i[None, :]
    if I % BLOCK_I == 0:
        part = tl.load(at, mask=live[:, None], other=0.0)
    else:
        part = tl.load(at, mask=live[:, None] & (i < I // GROUP)[None, :], other=0.0)
    return part


@triton.jit
def load_weights(w, s, matrix, o0, i0, I: tl.constexpr, O: tl.constexpr, W_PACK: tl.constexpr, GROUP: tl.constexpr,
                 BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """(values [BLOCK_O, BLOCK_I / W_PACK], scales [BLOCK_O, BLOCK_I / GROUP]) of a matrix of stacks [.., O, I]."""
    line = tl.arange(0, BLOCK_O)
    live, first = o0 + line < O, matrix.to(tl.int64) * O + o0
    if TMA:
        values = w.load([matrix * O + o0, i0 // W_PACK])
    else:
        values = load_part(w + first * (I // W_PACK), line, live, i0, I, W_PACK, BLOCK_I)
    return values, load_part(s + first * (I // GROUP), line, live, i0, I, GROUP, BLOCK_I)


@triton.jit
def grouped_matmul_mx(
    x,
    x_scales,
    x_scales_up,
    x_scale,
    rows,
    sizes,
    layer,
    w,
    w_up,
    s,
    s_up,
    scale,
    scale_up,
    out,
    E: tl.constexpr,
    I: tl.constexpr,
    O: tl.constexpr,
    GATED: tl.constexpr,
    TMA: tl.constexpr,
    X_PACK: tl.constexpr,
    W_PACK: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """out[r] = silu(x[rows[r]] w) * (x[rows[r]] w_up) if GATED, else x[r] w, for the matrices of r's expert.

    x        values [.., I / X_PACK], x_scales [.., I / GROUP], x_scale float32 [..], one a row; x_scales_up is x_scales
             again, for triton 3.6 fails where two products share what was loaded of it
    w        values [.., E, O, I / W_PACK], s [.., E, O, I / GROUP], scale float32 [.., E]; w_up likewise
    X_PACK, W_PACK  how many values a byte holds: e4m3 or e2m1
    SCALED   whether there are x_scale and scale

    The product is computed transposed: the matrix unit takes weights 128 outputs at a time, and rows from 16 on.
    """
    columns: tl.constexpr = (O + BLOCK_O - 1) // BLOCK_O
    W_FORMAT: tl.constexpr = "e2m1" if W_PACK == 2 else "e4m3"
    X_FORMAT: tl.constexpr = "e2m1" if X_PACK == 2 else "e4m3"
    row_ends, tile_ends = ends(sizes, E, BLOCK_E, BLOCK_R)
    first_matrix = tl.load(layer) * E
    for index in tl.range(tl.program_id(0), tl.max(tile_ends, 0) * columns, tl.num_programs(0)):
        tile, o0 = index // columns, index % columns * BLOCK_O
        expert, first, end = find(tile, row_ends, tile_ends, BLOCK_R)
        matrix = first_matrix + expert
        r, o = first + tl.arange(0, BLOCK_R), o0 + tl.arange(0, BLOCK_O)
        live = r < end
        row = (tl.load(rows + r, mask=live, other=0) if GATED else r).to(tl.int64)
        total = tl.zeros([BLOCK_O, BLOCK_R], tl.float32)
        total_up = total
        for i0 in range(0, I, BLOCK_I):
            b = tl.trans(load_part(x, row, live, i0, I, X_PACK, BLOCK_I))
            b_scales = load_part(x_scales, row, live, i0, I, GROUP, BLOCK_I)
            a, a_scales = load_weights(w, s, matrix, o0, i0, I, O, W_PACK, GROUP, BLOCK_I, BLOCK_O, TMA)
            total = tl.dot_scaled(a, a_scales, W_FORMAT, b, b_scales, X_FORMAT, total)
            if GATED:
                b_scales = load_part(x_scales_up, row, live, i0, I, GROUP, BLOCK_I)
                a, a_scales = load_weights(w_up, s_up, matrix, o0, i0, I, O, W_PACK, GROUP, BLOCK_I, BLOCK_O, TMA)
                total_up = tl.dot_scaled(a, a_scales, W_FORMAT, b, b_scales, X_FORMAT, total_up)
        if SCALED:
            row_scale = tl.load(x_scale + row, mask=live, other=0.0)[None, :]
            total *= row_scale * tl.load(scale + matrix)
            if GATED:
                total_up *= row_scale * tl.load(scale_up + matrix)
        if GATED:
            total = silu(total) * total_up
        out_at = out + (first.to(tl.int64) * O + o0)
        out_at += tl.arange(0, BLOCK_R)[:, None] * O + tl.arange(0, BLOCK_O)[None, :]
        tl.store(out_at, tl.trans(total.to(out.dtype.element_ty)), mask=live[:, None] & (o < O)[None, :])
