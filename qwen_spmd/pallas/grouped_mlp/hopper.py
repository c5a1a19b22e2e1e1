# SPDX-License-Identifier: Apache-2.0
"""Gate and up for Hopper in Gluon, of many rows in bfloat16: warps that load beside warps that multiply.

A program is three groups of four warps. One fills a ring in shared memory, whose stages hold 64 of the inner dimension
of 128 rows of x and of 128 columns of either matrix; the other two multiply 64 of the rows each by both, as one product
of 256 columns, and give a stage back once their matrix units have read it. So the loads of a tile go on while the one
before is finished. Programs persist and take tiles in turn; each group finds the same ones for itself.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BLOCK_R = gl.constexpr(128)
BLOCK_I = gl.constexpr(64)
BLOCK_O = gl.constexpr(128)
STAGES = gl.constexpr(4)
LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16))
"""Of tiles in shared memory: columns of 64 one after the other, each with rows of 128 bytes."""

WARPS = gl.constexpr(4)
"""Of each of the three groups."""

REGISTERS = {"maxnreg": 168}
LOADER = gl.constexpr(56)
MULTIPLIER = gl.constexpr(224)
"""Registers of a thread: on average, and once the groups have parted."""

# By the names of triton 3.6 or of 3.9.
_load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_load_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def ends(sizes, E: gl.constexpr, BLOCK_E: gl.constexpr):
    """(where each expert's rows end, where its tiles), [BLOCK_E]; every warp has all of them."""
    layout: gl.constexpr = gl.BlockedLayout([BLOCK_E // 32], [32], [gl.num_warps()], [0])
    e = gl.arange(0, BLOCK_E, layout)
    size = gl.load(sizes + e, mask=e < E, other=0)
    row_ends = gl.associative_scan(size, 0, add)
    tile_ends = gl.associative_scan((size + BLOCK_R - 1) // BLOCK_R, 0, add)
    return row_ends, tile_ends


@gluon.jit
def find(row_ends, tile_ends, tile):
    """(expert, first row, end of the expert's rows) of a tile."""
    before = tile_ends <= tile
    expert = gl.sum(before.to(gl.int32), 0)
    tiles_before = gl.max(gl.where(before, tile_ends, 0), 0)
    first = gl.max(gl.where(before, row_ends, 0), 0) + (tile - tiles_before) * BLOCK_R
    end = gl.min(gl.where(before, 0x7FFFFFFF, row_ends), 0)
    return expert, first, end


@gluon.jit
def advance(stage, phase):
    """To the next stage of the ring; its barriers turn to their other phase at each round."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def load(x, rows, sizes, layer, w, w_up, x_ring, w_ring, full, empty, E: gl.constexpr, I: gl.constexpr,
         O: gl.constexpr, BLOCK_E: gl.constexpr):  # fmt: skip
    """Fill x_ring [STAGES, BLOCK_R, BLOCK_I] and w_ring [2 STAGES, BLOCK_I, BLOCK_O], gate before up."""
    columns: gl.constexpr = O // BLOCK_O
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    row_ends, tile_ends = ends(sizes, E, BLOCK_E)
    first_matrix = gl.load(layer) * E
    stage = 0
    phase = 1
    for index in range(gl.program_id(0), gl.max(tile_ends, 0) * columns, gl.num_programs(0)):
        expert, first, end = find(row_ends, tile_ends, index // columns)
        o0 = index % columns * BLOCK_O
        w_at = (first_matrix + expert) * I
        r = first + gl.arange(0, BLOCK_R, gl.SliceLayout(1, layout))
        row = gl.load(rows + r, mask=r < end, other=0)  # results of row 0 in place of none are not kept
        x_at = x + row.to(gl.int64)[:, None] * I + gl.arange(0, BLOCK_I, gl.SliceLayout(0, layout))[None, :]
        for i0 in range(0, I, BLOCK_I):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, 2 * BLOCK_I * BLOCK_O * 2)
            _load_tile(w, [w_at + i0, o0], ready, w_ring.index(2 * stage))
            _load_tile(w_up, [w_at + i0, o0], ready, w_ring.index(2 * stage + 1))
            _load_rows(x_ring.index(stage), x_at + i0)
            async_copy.mbarrier_arrive(ready, increment_count=False)
            stage, phase = advance(stage, phase)


@gluon.jit
def multiply(sizes, out, x_ring, w_ring, full, empty, HALF: gl.constexpr, E: gl.constexpr, I: gl.constexpr,
             O: gl.constexpr, BLOCK_E: gl.constexpr):  # fmt: skip
    """Half of each tile's rows, of x_ring [2 STAGES, BLOCK_R / 2, BLOCK_I] and w_ring [STAGES, BLOCK_I, 2 BLOCK_O]."""
    rows: gl.constexpr = BLOCK_R // 2
    columns: gl.constexpr = O // BLOCK_O
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 2 * BLOCK_O, 16])
    row_ends, tile_ends = ends(sizes, E, BLOCK_E)
    stage = 0
    last = STAGES - 1  # a value of its own: what equals another where a loop begins is not carried by it
    phase = 0
    for index in range(gl.program_id(0), gl.max(tile_ends, 0) * columns, gl.num_programs(0)):
        _, first, end = find(row_ends, tile_ends, index // columns)
        first += rows * HALF
        if HALF == 0 or first < end:  # a tile has a row at least
            total = gl.zeros([rows, 2 * BLOCK_O], gl.float32, layout)
            for i0 in range(0, I, BLOCK_I):
                mbarrier.wait(full.index(stage), phase)
                fence_async_shared()  # rows of x came by another way than the matrix unit reads
                product = warpgroup_mma(x_ring.index(2 * stage + HALF), w_ring.index(stage), total, use_acc=i0 > 0,
                                        is_async=True)  # fmt: skip
                total = warpgroup_mma_wait(1, deps=[product])
                mbarrier.arrive(empty.index(last), pred=i0 > 0)
                last = stage
                stage, phase = advance(stage, phase)
            total = warpgroup_mma_wait(0, deps=[total])
            mbarrier.arrive(empty.index(last))
            gate, up = gl.split(gl.permute(gl.reshape(total, [rows, 2, BLOCK_O]), [0, 2, 1]))
            store(gate / (1 + gl.exp(-gate)) * up, out, first, end, index % columns * BLOCK_O, O)
        else:
            for _ in range(0, I, BLOCK_I):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage))
                last = stage
                stage, phase = advance(stage, phase)


@gluon.jit
def store(tile, out, first, end, o0, O: gl.constexpr):
    """Rows of a tile [64, 128] that come before `end`. Lanes exchange columns, so that each writes eight at once."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [64, 128])  # fmt: skip
    tile = gl.convert_layout(tile.to(out.dtype.element_ty), layout)
    r = gl.arange(0, 64, gl.SliceLayout(1, layout))
    o = gl.arange(0, 128, gl.SliceLayout(0, layout))
    at = out + (first.to(gl.int64) * O + o0) + (r[:, None] * O + o[None, :])
    gl.store(at, tile, mask=(first + r < end)[:, None] & (o < 128)[None, :])


@gluon.jit
def seen_as(ring, shape: gl.constexpr):
    if _REINTERPRET:
        return ring.reinterpret(ring.dtype, shape, LAYOUT)
    else:
        return ring._reinterpret(ring.dtype, shape, LAYOUT)


@gluon.jit
def gate_up_matmul(
    x,
    rows,
    sizes,
    layer,
    w,
    w_up,
    out,
    E: gl.constexpr,
    I: gl.constexpr,
    O: gl.constexpr,
    BLOCK_E: gl.constexpr,
):
    """out[r] = silu(x[rows[r]] w) * (x[rows[r]] w_up), for the matrices of r's expert.

    w, w_up  tensor descriptors of matrices [I, O] one after the other, in tiles [BLOCK_I, BLOCK_O]; of which I and O
             are multiples
    """
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_R, BLOCK_I], LAYOUT)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_I, 2 * BLOCK_O], LAYOUT)
    x_halves = seen_as(x_ring, [2 * STAGES, BLOCK_R // 2, BLOCK_I])
    w_halves = seen_as(w_ring, [2 * STAGES, BLOCK_I, BLOCK_O])
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + 32 * WARPS)  # of what comes by TMA, and each thread's part of x
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (multiply, (sizes, out, x_halves, w_ring, full, empty, 0, E, I, O, BLOCK_E)),
            (multiply, (sizes, out, x_halves, w_ring, full, empty, 1, E, I, O, BLOCK_E)),
            (load, (x, rows, sizes, layer, w, w_up, x_ring, w_halves, full, empty, E, I, O, BLOCK_E)),
        ],
        [WARPS, WARPS],
        [MULTIPLIER, LOADER],
    )
