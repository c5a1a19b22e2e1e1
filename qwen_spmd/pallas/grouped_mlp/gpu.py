# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls in Triton: gate and up with SwiGLU, then down, each in one launch over the experts that have rows.

A program computes BLOCK_R rows of one expert by BLOCK_O of its outputs. Where an expert has few rows, the product is
computed transposed, with the weights on the side of the matrix unit that takes 64 at least.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen_spmd.pallas.scaled import Scaled
from qwen_spmd.pallas.triton import Descriptor, ShapeDtypeStruct, configs, launch

Weights = jax.Array | Scaled


@triton.jit
def find_expert(sizes, tile, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr):
    """(expert, first row, end of its rows) of the tile-th BLOCK_R rows; expert is E beyond the last tile."""
    e = tl.arange(0, BLOCK_E)
    size = tl.load(sizes + e, mask=e < E, other=0)
    tiles = (size + BLOCK_R - 1) // BLOCK_R
    tile_ends = tl.cumsum(tiles, 0)
    expert = tl.sum((tile_ends <= tile).to(tl.int32), 0)
    expert = tl.minimum(expert, E)
    before = e < expert
    first_row = tl.sum(tl.where(before, size, 0), 0)
    first_tile = tl.sum(tl.where(before, tiles, 0), 0)
    end = first_row + tl.sum(tl.where(e == expert, size, 0), 0)
    return expert, first_row + (tile - first_tile) * BLOCK_R, end


@triton.jit
def load_weights(w, s, matrix, i0, o0, I, O, TMA: tl.constexpr, SCALE_I: tl.constexpr, SCALE_O: tl.constexpr,
                 BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """[BLOCK_I, BLOCK_O] of a matrix of a stack [.., I, O], in `dtype`; zeros beyond its edges."""
    i, o = i0 + tl.arange(0, BLOCK_I), o0 + tl.arange(0, BLOCK_O)
    if TMA:
        tile = w.load([matrix * I + i0, o0])
    else:
        at = (matrix.to(tl.int64) * I + i)[:, None] * O + o[None, :]
        tile = tl.load(w + at, mask=(i < I)[:, None] & (o < O)[None, :], other=0.0)
    if SCALE_I > 0:
        rows_of_scales: tl.constexpr = (I + SCALE_I - 1) // SCALE_I
        columns: tl.constexpr = (O + SCALE_O - 1) // SCALE_O
        base = s + matrix.to(tl.int64) * (rows_of_scales * columns)
        if SCALE_I % BLOCK_I == 0:
            scale = tl.load(base + (i0 // SCALE_I) * columns + o // SCALE_O, mask=o < O, other=0.0)[None, :]
        else:
            at = (i // SCALE_I)[:, None] * columns + (o // SCALE_O)[None, :]
            scale = tl.load(base + at, mask=(i < I)[:, None] & (o < O)[None, :], other=0.0)
        tile = tile.to(tl.float32) * scale
    return tile.to(dtype)


@triton.jit
def multiply(x, w, total, SWAP: tl.constexpr):
    """total += x w, or its transpose; x [BLOCK_R, BLOCK_I], w [BLOCK_I, BLOCK_O]."""
    if SWAP:
        total = tl.dot(tl.trans(w), tl.trans(x), total, input_precision="ieee")
    else:
        total = tl.dot(x, w, total, input_precision="ieee")
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
    R: tl.constexpr,
    E: tl.constexpr,
    I: tl.constexpr,
    O: tl.constexpr,
    GATED: tl.constexpr,
    SWAP: tl.constexpr,
    TMA: tl.constexpr,
    SCALE_I: tl.constexpr,
    SCALE_O: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """out[r] = silu(x[rows[r]] w) * (x[rows[r]] w_up) if GATED, else x[r] w, for the matrices of r's expert."""
    columns: tl.constexpr = (O + BLOCK_O - 1) // BLOCK_O
    # An expert's columns one after the other: they share rows, and the next rows find its weights in the L2 cache.
    tile, column = tl.program_id(0) // columns, tl.program_id(0) % columns
    expert, first, end = find_expert(sizes, tile, E, BLOCK_E, BLOCK_R)
    if expert == E:
        return
    matrix = tl.load(layer) * E + expert
    r = first + tl.arange(0, BLOCK_R)
    live = r < end
    row = (tl.load(rows + r, mask=live, other=0) if GATED else r).to(tl.int64)
    dtype: tl.constexpr = x.dtype.element_ty
    if SWAP:
        total = tl.zeros([BLOCK_O, BLOCK_R], tl.float32)
        total_up = tl.zeros([BLOCK_O, BLOCK_R], tl.float32)
    else:
        total = tl.zeros([BLOCK_R, BLOCK_O], tl.float32)
        total_up = tl.zeros([BLOCK_R, BLOCK_O], tl.float32)
    o0 = column * BLOCK_O
    for i0 in range(0, I, BLOCK_I):
        i = i0 + tl.arange(0, BLOCK_I)
        inside = live[:, None] if I % BLOCK_I == 0 else live[:, None] & (i < I)[None, :]
        part = tl.load(x + row[:, None] * I + i[None, :], mask=inside, other=0.0)
        tile_w = load_weights(w, s, matrix, i0, o0, I, O, TMA, SCALE_I, SCALE_O, BLOCK_I, BLOCK_O, dtype)
        total = multiply(part, tile_w, total, SWAP)
        if GATED:
            tile_up = load_weights(w_up, s_up, matrix, i0, o0, I, O, TMA, SCALE_I, SCALE_O, BLOCK_I, BLOCK_O, dtype)
            total_up = multiply(part, tile_up, total_up, SWAP)
    if GATED:
        total = total / (1 + tl.exp(-total)) * total_up
    total = total.to(dtype)
    if SWAP:
        total = tl.trans(total)
    o = o0 + tl.arange(0, BLOCK_O)
    tl.store(out + r.to(tl.int64)[:, None] * O + o[None, :], total, mask=live[:, None] & (o < O)[None, :])


def grouped_mlp(
    x_TD: jax.Array,
    rows_R: jax.Array,
    sizes_E: jax.Array,
    w_gate: Weights,
    w_up: Weights,
    w_down: Weights,
    layer: jax.Array,
    expected: int,
) -> jax.Array:
    h_RM = gate_up(x_TD, rows_R, sizes_E, w_gate, w_up, layer, expected)
    return down(h_RM, rows_R, sizes_E, w_down, layer, expected)


def gate_up(
    x_TD: jax.Array,
    rows_R: jax.Array,
    sizes_E: jax.Array,
    w_gate: Weights,
    w_up: Weights,
    layer: jax.Array,
    expected: int,
) -> jax.Array:
    """silu(x[rows] w_gate) * (x[rows] w_up), [R, M]."""
    return _grouped("gate_up", x_TD, rows_R, sizes_E, w_gate, w_up, layer, expected)


def down(
    h_RM: jax.Array, rows_R: jax.Array, sizes_E: jax.Array, w_down: Weights, layer: jax.Array, expected: int
) -> jax.Array:
    """h w_down, [R, D]."""
    return _grouped("down", h_RM, rows_R, sizes_E, w_down, None, layer, expected)


def _grouped(
    kernel: str,
    x: jax.Array,
    rows_R: jax.Array,
    sizes_E: jax.Array,
    w: Weights,
    w_up: Weights | None,
    layer: jax.Array,
    expected: int,
) -> jax.Array:
    _, E, I, O = w.shape
    R = rows_R.shape[0]
    scaled = isinstance(w, Scaled)
    values = w.values if isinstance(w, Scaled) else w
    c = _config(kernel, x, values, expected)
    block_o, block_i, block_r = c["block_o"], c["block_i"], c["block_r"]
    # Without edges in the way: what lies beyond the last row of an expert is another's.
    tma = bool(c["tma"]) and I % block_i == 0 and O % block_o == 0

    def operands(w: Weights) -> tuple:
        values, scales = (w.values, w.scales) if isinstance(w, Scaled) else (w, sizes_E)
        return (Descriptor(values.reshape(-1, O), (block_i, block_o)) if tma else values), scales

    (w_0, s_0), (w_1, s_1) = operands(w), operands(w if w_up is None else w_up)
    tiles = min(R, E) + R // block_r  # at most: one for each expert, and those that are full
    (out,) = launch(
        grouped_matmul,
        x,
        rows_R,
        sizes_E,
        layer,
        w_0,
        w_1,
        s_0,
        s_1,
        out=(ShapeDtypeStruct((R, O), x.dtype),),
        grid=(tiles * triton.cdiv(O, block_o),),
        warps=c["warps"],
        stages=c["stages"],
        R=R,
        E=E,
        I=I,
        O=O,
        GATED=w_up is not None,
        SWAP=bool(c["swap"]),
        TMA=tma,
        SCALE_I=w.block[0] if scaled else 0,
        SCALE_O=w.block[1] if scaled else 0,
        BLOCK_E=triton.next_power_of_2(E),
        BLOCK_R=block_r,
        BLOCK_I=block_i,
        BLOCK_O=block_o,
    )
    return out


def _config(kernel: str, x: jax.Array, w: jax.Array, expected: int) -> configs.Config:
    """By the mean number of an expert's rows."""
    _, E, I, O = w.shape
    mean = triton.next_power_of_2(max(1, triton.cdiv(expected, E)))
    if mean <= 32:
        rule = {"block_r": max(16, mean), "block_o": 128, "block_i": 64, "warps": 4, "stages": 4, "swap": 1, "tma": 1}
    elif mean <= 64:
        rule = {"block_r": 64, "block_o": 128, "block_i": 64, "warps": 8, "stages": 4, "swap": 1, "tma": 1}
    else:
        rule = {"block_r": 128, "block_o": 128, "block_i": 64, "warps": 8, "stages": 4, "swap": 0, "tma": 1}
    name = f"{w.dtype.name} {I}x{O}, {mean} rows of {E}"
    c = configs.choose("grouped_mlp", kernel, name, rule)
    fit = lambda size, block: min(block, max(16, triton.next_power_of_2(size)))  # noqa: E731
    c = c | {"block_o": fit(O, c["block_o"]), "block_i": fit(I, c["block_i"])}
    if x.dtype == jnp.float32:  # twice the bytes; computed without the matrix unit
        c |= {"block_r": min(32, c["block_r"]), "block_o": min(64, c["block_o"]), "block_i": 16, "stages": 2}
    return c
