# SPDX-License-Identifier: Apache-2.0
"""Paged attention in Triton: one query a sequence with the context split over programs, and tiles of many queries.

Rows of a tile are (token, query head of one KV head), tokens first, so that the heads of a group share what is loaded.
Positions of the context that nobody wrote may hold anything: where a tile can reach them, loads are masked.
"""

import triton
import triton.language as tl

from qwen_spmd.pallas.triton.kernels import find

LOG2E = tl.constexpr(1.4426950408889634)
MASKED = tl.constexpr(-1e30)  # finite: a tile that is masked as a whole must not give inf - inf


@triton.jit
def slab(pages, layer, b, k, pos, P: tl.constexpr, K: tl.constexpr, S: tl.constexpr, PAGES: tl.constexpr):
    """Number of the [S, H] slab of keys that holds position(s) `pos`, int64; that of values is the next one."""
    page = tl.load(pages + b.to(tl.int64) * PAGES + pos // S).to(tl.int64)
    return ((layer * P + page) * K + k) * 2


@triton.jit
def load_context(kv, pages, layer, b, k, pos, end, P: tl.constexpr, K: tl.constexpr, S: tl.constexpr,
                 PAGES: tl.constexpr, H: tl.constexpr, ONE_PAGE: tl.constexpr, MASK: tl.constexpr,
                 dtype: tl.constexpr):  # fmt: skip
    """Keys and values [BLOCK, H] of consecutive positions, of which those from `end` on are zeros if MASK."""
    h = tl.arange(0, H)
    if ONE_PAGE:
        kv += slab(pages, layer, b, k, tl.min(pos, 0), P, K, S, PAGES) * (S * H)
        at = (pos % S)[:, None] * H + h[None, :]
    else:
        held = tl.minimum(pos, end - 1) if MASK else pos
        at = ((slab(pages, layer, b, k, held, P, K, S, PAGES) * S + pos % S) * H)[:, None] + h[None, :]
    if MASK:
        written = (pos < end)[:, None]
        keys = tl.load(kv + at, mask=written, other=0.0)
        values = tl.load(kv + at + S * H, mask=written, other=0.0)
    else:
        keys = tl.load(kv + at)
        values = tl.load(kv + at + S * H)
    return keys.to(dtype), values.to(dtype)


@triton.jit
def accumulate(q, keys, values, seen, m, s, o, scale, MASK: tl.constexpr):
    """A tile of online softmax, in powers of two: seen [M, BLOCK] are the positions that a row attends to."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if MASK:
        scores = tl.where(seen, scores, MASKED)
    m_new = tl.maximum(m, tl.max(scores, 1) * scale)
    p = tl.exp2(scores * scale - m_new[:, None])
    if MASK:
        p = tl.where(seen, p, 0.0)
    decay = tl.exp2(m - m_new)
    s = s * decay + tl.sum(p, 1)
    o = tl.dot(p.to(values.dtype), values, o * decay[:, None], input_precision="ieee")
    return m_new, s, o


@triton.jit
def write(k_new, v_new, page_T, slot_T, valid_T, layer, kv, o, P: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
          S: tl.constexpr, H: tl.constexpr, LIMIT: tl.constexpr):  # fmt: skip
    """One row's keys and values of all heads into its page. Of padding rows, zeros into the result."""
    t, h = tl.program_id(0).to(tl.int64), tl.arange(0, H)
    if tl.load(valid_T + t) == 0:
        for head in range(N):
            tl.store(o + (t * N + head) * H + h, tl.zeros([H], o.dtype.element_ty))
    else:
        page, slot = tl.load(page_T + t).to(tl.int64), tl.load(slot_T + t)
        for k in tl.static_range(K):
            at = ((((tl.load(layer) * P + page) * K + k) * 2) * S + slot) * H + h
            tl.store(kv + at, to_page(tl.load(k_new + (t * K + k) * H + h), kv.dtype.element_ty, LIMIT))
            tl.store(kv + at + S * H, to_page(tl.load(v_new + (t * K + k) * H + h), kv.dtype.element_ty, LIMIT))


@triton.jit
def to_page(x, dtype: tl.constexpr, LIMIT: tl.constexpr):
    """In the pages' dtype; eight bits saturate."""
    if LIMIT > 0:
        x = tl.clamp(x.to(tl.float32), -LIMIT, LIMIT)
    return x.to(dtype)


@triton.jit
def unit(ends, i, B: tl.constexpr, K: tl.constexpr, BLOCK_B: tl.constexpr):
    """(sequence, KV head, number within that, how many it has) of the i-th block; see `decode`."""
    b = tl.arange(0, BLOCK_B)
    end = tl.load(ends + b, mask=b < B, other=2147483647)
    past = end <= i // K
    sequence = tl.sum(past.to(tl.int32), 0)
    first = tl.max(tl.where(past, end, 0), 0)
    blocks = tl.load(ends + sequence) - first
    i -= first * K
    return sequence, i // blocks, i % blocks, blocks


@triton.jit
def decode(
    q,
    k_new,
    v_new,
    kv,
    layer,
    row_B,
    len_B,
    ends_B,
    part,
    pages,
    o,
    part_o,
    part_ms,
    P: tl.constexpr,
    B: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    PAGES: tl.constexpr,
    LIMIT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sequences with one new token.

    All contexts are one row of blocks of BLOCK_N positions: sequences, in them KV heads, in them positions. ends_B are
    running sums of the blocks of a sequence's head; the last may lie past its end. The row is cut into parts of `part`
    blocks, equal work for all. What a part has of a sequence's head goes into the result if that is the whole of it.
    Otherwise `combine` adds it up, from the part's second place if it is the head's beginning, or else from its first.
    The one with the end has the new token, which it takes from its operands and writes into the page.
    """
    G: tl.constexpr = N // K
    dtype: tl.constexpr = q.dtype.element_ty
    scale = LOG2E / tl.sqrt(H * 1.0)
    l, size = tl.load(layer).to(tl.int64), tl.load(part)
    g, h, n = tl.arange(0, BLOCK_M), tl.arange(0, H), tl.arange(0, BLOCK_N)
    row_end = tl.load(ends_B + B - 1) * K
    for i in range(tl.program_id(0), (row_end + size - 1) // size, PROGRAMS):
        at, stop = i * size, tl.minimum((i + 1) * size, row_end)
        while at < stop:
            b, k, block, blocks = unit(ends_B, at, B, K, BLOCK_B)
            count = tl.minimum(blocks - block, stop - at)
            at += count
            row, length = tl.load(row_B + b).to(tl.int64), tl.load(len_B + b)
            start, last = block * BLOCK_N, block + count == blocks
            end = tl.minimum((block + count) * BLOCK_N, length - 1)  # of what is in pages already
            heads = (row * N + k * G + g)[:, None] * H + h[None, :]
            queries = tl.load(q + heads, mask=(g < G)[:, None], other=0.0)
            new_at = (row * K + k) * H + h
            new_key = to_page(tl.load(k_new + new_at), kv.dtype.element_ty, LIMIT)
            new_value = to_page(tl.load(v_new + new_at), kv.dtype.element_ty, LIMIT)
            if last:
                new_slot = (slab(pages, l, b, k, length - 1, P, K, S, PAGES) * S + (length - 1) % S) * H + h
                tl.store(kv + new_slot, new_key)
                tl.store(kv + new_slot + S * H, new_value)
            score = tl.sum(queries.to(tl.float32) * new_key.to(dtype).to(tl.float32)[None, :], 1) * scale
            m = tl.where(last, score, MASKED)
            s = tl.where(last, tl.full([BLOCK_M], 1.0, tl.float32), 0.0)
            total = tl.where(last, new_value.to(tl.float32), 0.0)[None, :] + tl.zeros([BLOCK_M, H], tl.float32)
            for first in range(start, end, BLOCK_N):
                pos = first + n
                one: tl.constexpr = S % BLOCK_N == 0
                keys, values = load_context(kv, pages, l, b, k, pos, end, P, K, S, PAGES, H, one, True, dtype)
                seen = (pos < end)[None, :] & (g >= 0)[:, None]
                m, s, total = accumulate(queries, keys, values, seen, m, s, total, scale, True)
            if count == blocks:
                tl.store(o + heads, (total / s[:, None]).to(dtype), mask=(g < G)[:, None])
            else:
                place = (i * 2 + (block == 0).to(tl.int32)).to(tl.int64) * G + g
                tl.store(part_o + place[:, None] * H + h[None, :], total, mask=(g < G)[:, None])
                tl.store(part_ms + place * 2, m, mask=g < G)
                tl.store(part_ms + place * 2 + 1, s, mask=g < G)


@triton.jit
def combine(
    row_B,
    len_B,
    ends_B,
    part,
    part_o,
    part_ms,
    o,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """BLOCK_H columns of a sequence's head from the parts that have some of it, in order; see `decode`.

    ZEROS: sequences without a token get zeros.
    """
    b, head = tl.program_id(0), tl.program_id(1)
    G: tl.constexpr = N // K
    k, g = head // G, head % G
    c, h = tl.arange(0, BLOCK_C), tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    at = (tl.load(row_B + b).to(tl.int64) * N + head) * H + h
    before, size = tl.load(ends_B + b - 1, mask=b > 0, other=0), tl.load(part)
    blocks = tl.load(ends_B + b) - before
    begin = before * K + blocks * k
    first, end = begin // size, (begin + blocks - 1) // size + 1
    if tl.load(len_B + b) == 0:
        if ZEROS:
            tl.store(o + at, tl.zeros([BLOCK_H], o.dtype.element_ty))
    elif end - first > 1:
        largest = tl.full([BLOCK_C], MASKED, tl.float32)
        for start in range(first, end, BLOCK_C):
            i = start + c
            place = (i * 2 + (i == first).to(tl.int32)).to(tl.int64) * G + g
            largest = tl.maximum(largest, tl.load(part_ms + place * 2, mask=i < end, other=MASKED))
        m = tl.max(largest, 0)
        s, total = tl.zeros([BLOCK_C], tl.float32), tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
        for start in range(first, end, BLOCK_C):
            i = start + c
            place, live = (i * 2 + (i == first).to(tl.int32)).to(tl.int64) * G + g, i < end
            weight = tl.exp2(tl.load(part_ms + place * 2, mask=live, other=MASKED) - m)
            s += weight * tl.load(part_ms + place * 2 + 1, mask=live, other=0.0)
            some = tl.load(part_o + place[:, None] * H + h[None, :], mask=live[:, None], other=0.0)
            total += weight[:, None] * some
        tl.store(o + at, (tl.sum(total, 0) / tl.sum(s, 0)).to(o.dtype.element_ty))


@triton.jit
def prefill(
    q,
    kv,
    kv_tiles,
    layer,
    q_start_B,
    kv_len_B,
    ends_B,
    pages,
    o,
    P: tl.constexpr,
    B: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    PAGES: tl.constexpr,
    TMA: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """TOKENS queries of one sequence and KV head, whose keys and values are all in pages.

    ends_B are running sums of the sequences' numbers of tiles. The last tiles have the longest contexts, so they begin.
    """
    G: tl.constexpr = N // K
    dtype: tl.constexpr = q.dtype.element_ty
    tiles = tl.load(ends_B + B - 1)
    tile, k = tiles - 1 - tl.program_id(0) // K, tl.program_id(0) % K
    if tile < 0:
        return
    scale = LOG2E / tl.sqrt(H * 1.0)
    l = tl.load(layer).to(tl.int64)
    b, i = find(ends_B, tile, B, BLOCK_B)
    first_row, end_row = tl.load(q_start_B + b), tl.load(q_start_B + b + 1)
    row = first_row + i * TOKENS
    pos = tl.load(kv_len_B + b) - end_row + row  # of the tile's first token
    count = tl.minimum(end_row - row, TOKENS)
    r, h, n = tl.arange(0, BLOCK_M), tl.arange(0, H), tl.arange(0, BLOCK_N)
    token = r // G
    live = (token < count) & (r < TOKENS * G)
    tile_at = (row.to(tl.int64) * N + k * G) * H
    heads = (token * N + r % G)[:, None] * H + h[None, :]
    queries = tl.load(q + tile_at + heads, mask=live[:, None], other=0.0)
    m = tl.full([BLOCK_M], MASKED, tl.float32)
    s = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, H], tl.float32)
    # Up to here, every row sees every position.
    whole = (pos + 1) // BLOCK_N * BLOCK_N
    for first in range(0, whole, BLOCK_N):
        if TMA:
            tile_row = (slab(pages, l, b, k, first, P, K, S, PAGES) * S + first % S).to(tl.int32)
            keys, values = kv_tiles.load([tile_row, 0]).to(dtype), kv_tiles.load([tile_row + S, 0]).to(dtype)
        else:
            one: tl.constexpr = S % BLOCK_N == 0
            keys, values = load_context(kv, pages, l, b, k, first + n, whole, P, K, S, PAGES, H, one, False, dtype)
        m, s, total = accumulate(queries, keys, values, 0, m, s, total, scale, False)
    end = pos + count
    for first in range(whole, end, BLOCK_N):
        at = first + n
        keys, values = load_context(kv, pages, l, b, k, at, end, P, K, S, PAGES, H, S % BLOCK_N == 0, True, dtype)
        seen = (at[None, :] <= (pos + token)[:, None]) & (at < end)[None, :]
        m, s, total = accumulate(queries, keys, values, seen, m, s, total, scale, True)
    total = total / tl.where(s == 0, 1.0, s)[:, None]
    tl.store(o + tile_at + heads, total.to(dtype), mask=live[:, None])
