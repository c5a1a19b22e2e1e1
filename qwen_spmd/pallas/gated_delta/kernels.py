# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet in Triton: one token a sequence in one launch, and the chunked (WY) form in three.

A program that needs a key head's channels convolves them itself from the inputs and the state: what the convolution
gives is never in memory. With 16-bit inputs, q, k and what is between the launches of the chunked form are 16-bit, too,
sums and states float32.
"""

import triton
import triton.language as tl

CHUNK = 64
CHUNK_SIZE = tl.constexpr(CHUNK)


@triton.jit
def silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def log_decay(a, a_log, dt_bias):
    x = a.to(tl.float32) + dt_bias
    softplus = tl.maximum(x, 0.0) + tl.log(1 + tl.exp(-tl.abs(x)))
    return -tl.exp(a_log) * softplus


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x.to(tl.float32)))


@triton.jit
def convolve_one(qkv, conv_w, conv, row, slot, fresh, channel, C: tl.constexpr, W: tl.constexpr):
    """silu of the convolution at one token, float32; `slot` is a row of the states of all layers."""
    x = tl.load(qkv + row * C + channel).to(tl.float32)
    total = x * tl.load(conv_w + (W - 1) * C + channel).to(tl.float32)
    for w in tl.static_range(W - 1):
        x = tl.load(conv + (slot * (W - 1) + w) * C + channel, mask=(channel >= 0) & (fresh == 0), other=0.0)
        total += x.to(tl.float32) * tl.load(conv_w + w * C + channel).to(tl.float32)
    return silu(total)


@triton.jit
def shift(qkv, conv, row, read, write, fresh, channel, C: tl.constexpr, W: tl.constexpr):
    """The last W - 1 inputs after one token. Reads each place before it is written, also where read is write."""
    for w in tl.static_range(1, W - 1):
        x = tl.load(conv + (read * (W - 1) + w) * C + channel, mask=(channel >= 0) & (fresh == 0), other=0.0)
        tl.store(conv + (write * (W - 1) + w - 1) * C + channel, x)
    tl.store(conv + (write * (W - 1) + W - 2) * C + channel, tl.load(qkv + row * C + channel))


@triton.jit
def normalise(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + 1e-6)


@triton.jit
def decode(
    qkv,
    b_TU,
    a_TU,
    conv_w,
    a_log,
    dt_bias,
    conv,
    rec,
    layer,
    q_start_B,
    live_B,
    read_B,
    write_B,
    fresh_B,
    o,
    T: tl.constexpr,
    B: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    J: tl.constexpr,
    U: tl.constexpr,
    Y: tl.constexpr,
    Z: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_Z: tl.constexpr,
):
    """A sequence's key head, or a SPLIT-th of its value heads' columns. o = S'^T q is read from the state before:

    S' = e^g S + k d^T, so o = e^g S^T q + (k . q) d. Without SPLIT, the convolution's state moves on, too: no other
    program reads these channels.
    """
    b, j, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    V: tl.constexpr = U // J
    TILES: tl.constexpr = V * (Z // BLOCK_Z) // SPLIT
    row, y, z = tl.load(q_start_B + b).to(tl.int64), tl.arange(0, Y), tl.arange(0, BLOCK_Z)
    live = tl.load(live_B + b) != 0
    # Rows without a token: its own if the sequence has none, or its share of those after the last sequence.
    if ONE_TOKEN:
        first = tl.where(live, T, b)
    else:
        first = tl.load(q_start_B + B) + b
    for t in range(first, T, B):
        for i in range(TILES):
            at = part * TILES + i
            u, z0 = j * V + at // (Z // BLOCK_Z), at % (Z // BLOCK_Z) * BLOCK_Z
            out_at = (t * U + u).to(tl.int64) * Z + z0 + z
            tl.store(o + out_at, tl.zeros([BLOCK_Z], o.dtype.element_ty))
    if not live:
        return
    stack = tl.load(layer).to(tl.int64) * R
    read, write = stack + tl.load(read_B + b), stack + tl.load(write_B + b)
    fresh = tl.load(fresh_B + b)
    channels = j * (2 * Y + V * Z)
    q = normalise(convolve_one(qkv, conv_w, conv, row, read, fresh, channels + y, C, W)) * Y**-0.5
    k = normalise(convolve_one(qkv, conv_w, conv, row, read, fresh, channels + Y + y, C, W))
    kq = tl.sum(k * q, 0)
    for i in range(TILES):
        at = part * TILES + i
        v, z0 = at // (Z // BLOCK_Z), at % (Z // BLOCK_Z) * BLOCK_Z
        u = j * V + v
        value_channel = channels + 2 * Y + v * Z + z0 + z
        value = convolve_one(qkv, conv_w, conv, row, read, fresh, value_channel, C, W)
        g = log_decay(tl.load(a_TU + row * U + u), tl.load(a_log + u), tl.load(dt_bias + u))
        beta, decay = sigmoid(tl.load(b_TU + row * U + u)), tl.exp(g)
        tile = y[:, None] * Z + z0 + z[None, :]
        known = (y >= 0)[:, None] & (z >= 0)[None, :] & (fresh == 0)
        # Once read and once written: nothing of it is worth a place in the L2 cache.
        state = tl.load(rec + (read * U + u) * (Y * Z) + tile, mask=known, other=0.0, eviction_policy="evict_first")
        state = state.to(tl.float32)
        d = beta * (value - decay * tl.sum(state * k[:, None], 0))
        out = decay * tl.sum(state * q[:, None], 0) + kq * d
        state = decay * state + k[:, None] * d[None, :]
        tl.store(rec + (write * U + u) * (Y * Z) + tile, state.to(rec.dtype.element_ty), cache_modifier=".cs")
        tl.store(o + (row * U + u) * Z + z0 + z, out.to(o.dtype.element_ty))
    if SPLIT == 1:
        tl.debug_barrier()  # all threads have read what some now write
        shift(qkv, conv, row, read, write, fresh, channels + y, C, W)
        shift(qkv, conv, row, read, write, fresh, channels + Y + y, C, W)
        values = tl.arange(0, Z)
        for v in tl.static_range(V):
            shift(qkv, conv, row, read, write, fresh, channels + 2 * Y + v * Z + values, C, W)


@triton.jit
def shift_all(
    qkv,
    layer,
    row_B,
    live_B,
    read_B,
    write_B,
    fresh_B,
    after,
    conv,
    R: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The convolution's states after `decode` in several parts; `after` is what that launch wrote."""
    b, c = tl.program_id(0), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    if tl.load(live_B + b) == 0:
        return
    stack = tl.load(layer).to(tl.int64) * R
    read, write, fresh = stack + tl.load(read_B + b), stack + tl.load(write_B + b), tl.load(fresh_B + b)
    row, inside = tl.load(row_B + b).to(tl.int64), c < C
    for w in tl.static_range(1, W - 1):
        x = tl.load(conv + (read * (W - 1) + w) * C + c, mask=inside & (fresh == 0), other=0.0)
        tl.store(conv + (write * (W - 1) + w - 1) * C + c, x, mask=inside)
    tl.store(conv + (write * (W - 1) + W - 2) * C + c, tl.load(qkv + row * C + c, mask=inside, other=0.0), mask=inside)


@triton.jit
def find(ends, i, B: tl.constexpr, BLOCK_B: tl.constexpr):
    """(group of the i-th piece, its number within the group), of groups that end before piece `ends`."""
    b = tl.arange(0, BLOCK_B)
    end = tl.load(ends + b, mask=b < B, other=2147483647)
    group = tl.sum((end <= i).to(tl.int32), 0)
    first = tl.max(tl.where(b < group, end, 0), 0)
    return group, i - first


@triton.jit
def merge(D, B, identity, PRECISION: tl.constexpr):
    """(D^-1 + B)^-1, for B that leads four blocks of D^-1 into later ones.

    It is (I + M)^-1 D with M = D B, and M^4 = 0: (I + M)^-1 = I - M + M M - M M M.
    """
    M = tl.dot(D, B, input_precision=PRECISION)
    MM = tl.dot(M, M, input_precision=PRECISION)
    P = identity - M + MM - tl.dot(M, MM, input_precision=PRECISION)
    return tl.dot(P, D, input_precision=PRECISION)


@triton.jit
def unit_lower_inverse(A, PRECISION: tl.constexpr):
    """(I + A)^-1 for strictly lower triangular A [64, 64]: of its diagonal blocks of 4, then of 16, then all."""
    n = tl.arange(0, 64)
    identity = tl.where(n[:, None] == n[None, :], 1.0, 0.0)
    in_4, in_16 = (n // 4)[:, None] == (n // 4)[None, :], (n // 16)[:, None] == (n // 16)[None, :]
    M = tl.where(in_4, A, 0.0)
    MM = tl.dot(M, M, input_precision=PRECISION)
    D = identity - M + MM - tl.dot(M, MM, input_precision=PRECISION)
    D = merge(D, tl.where(in_16 & (in_4 == 0), A, 0.0), identity, PRECISION)
    return merge(D, tl.where(in_16, 0.0, A), identity, PRECISION)


@triton.jit
def convolve(
    qkv,
    conv_w,
    conv,
    layer,
    q_start_B,
    ends_B,
    read_B,
    fresh_B,
    q_out,
    k_out,
    v_out,
    B: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    J: tl.constexpr,
    U: tl.constexpr,
    Y: tl.constexpr,
    Z: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """A chunk's queries, keys (normalised) or values of one head; zeros beyond the sequence's end."""
    chunk, j, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if chunk >= tl.load(ends_B + B - 1):
        return
    V: tl.constexpr = U // J
    SIZE: tl.constexpr = max(Y, Z)
    b, part = find(ends_B, chunk, B, BLOCK_B)
    first_row = tl.load(q_start_B + b).to(tl.int64)
    c, n = tl.arange(0, CHUNK_SIZE), tl.arange(0, SIZE)
    i = part * CHUNK_SIZE + c
    live = i < tl.load(q_start_B + b + 1) - first_row
    size = tl.where(which < 2, Y, Z)
    channel = j * (2 * Y + V * Z) + tl.where(which < 2, which * Y, 2 * Y + (which - 2) * Z) + n
    inside = live[:, None] & (n < size)[None, :]
    total = tl.zeros([CHUNK_SIZE, SIZE], tl.float32)
    for w in tl.static_range(W):
        back = i - (W - 1) + w
        mask = inside & (back >= 0)[:, None]
        x = tl.load(qkv + (first_row + back)[:, None] * C + channel[None, :], mask=mask, other=0.0)
        total += x.to(tl.float32) * tl.load(conv_w + w * C + channel, mask=n < size, other=0.0).to(tl.float32)[None, :]
    if (part == 0) & (tl.load(fresh_B + b) == 0):
        slot = tl.load(layer).to(tl.int64) * R + tl.load(read_B + b)
        for w in tl.static_range(W - 1):
            back = i - (W - 1) + w
            mask = inside & (back < 0)[:, None]
            x = tl.load(conv + (slot * (W - 1) + back + W - 1)[:, None] * C + channel[None, :], mask=mask, other=0.0)
            taps = tl.load(conv_w + w * C + channel, mask=n < size, other=0.0).to(tl.float32)
            total += x.to(tl.float32) * taps[None, :]
    x = tl.where(inside, silu(total), 0.0)
    dtype: tl.constexpr = qkv.dtype.element_ty
    if which < 2:
        x = x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
        at = (chunk.to(tl.int64) * J + j) * (CHUNK_SIZE * Y) + c[:, None] * Y + n[None, :]
        if which == 0:
            tl.store(q_out + at, (x * Y**-0.5).to(dtype), mask=(n < Y)[None, :])
        else:
            tl.store(k_out + at, x.to(dtype), mask=(n < Y)[None, :])
    else:
        at = (chunk.to(tl.int64) * U + j * V + which - 2) * (CHUNK_SIZE * Z) + c[:, None] * Z + n[None, :]
        tl.store(v_out + at, x.to(dtype), mask=(n < Z)[None, :])


@triton.jit
def chunks(
    b_TU,
    a_TU,
    a_log,
    dt_bias,
    q_start_B,
    ends_B,
    q_in,
    k_in,
    v_in,
    qk_out,
    w_out,
    v_out,
    decay_out,
    to_end_out,
    B: tl.constexpr,
    J: tl.constexpr,
    U: tl.constexpr,
    Y: tl.constexpr,
    Z: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What a value head's chunk needs that no state has a part in. With G the running sum of log decays, and all rows
    beyond the sequence's end as if they did nothing:

    (q k^T) * decay; w = T (beta e^G k) and v = T (beta v), with T the inverse of I + beta (k k^T) * decay below the
    diagonal; e^G, and the decay from each row to the chunk's end.
    """
    chunk, u = tl.program_id(0), tl.program_id(1)
    if chunk >= tl.load(ends_B + B - 1):
        return
    dtype: tl.constexpr = q_in.dtype.element_ty
    b, part = find(ends_B, chunk, B, BLOCK_B)
    first_row = tl.load(q_start_B + b).to(tl.int64)
    c, y, z = tl.arange(0, CHUNK_SIZE), tl.arange(0, Y), tl.arange(0, Z)
    i = part * CHUNK_SIZE + c
    live = i < tl.load(q_start_B + b + 1) - first_row
    at = (first_row + i) * U + u
    a = tl.load(a_TU + at, mask=live, other=0.0)
    g = tl.where(live, log_decay(a, tl.load(a_log + u), tl.load(dt_bias + u)), 0.0)
    beta = tl.where(live, sigmoid(tl.load(b_TU + at, mask=live, other=0.0)), 0.0)
    G = tl.cumsum(g, 0)
    since_start = tl.exp(G)
    below = c[:, None] > c[None, :]
    if PRECISION == "ieee":
        # Sums over each segment: differences of cumulated ones lose what is small beside a large decay.
        later = tl.where(below, g[:, None], 0.0)
        decay = tl.exp(tl.cumsum(later, 0))
        to_end = tl.exp(tl.sum(later, 0))
    else:
        # What the differences lose is less than the rounding of 16-bit operands.
        decay = tl.exp(tl.minimum(G[:, None] - G[None, :], 0.0))
        to_end = tl.exp(tl.minimum(tl.sum(g, 0) - G, 0.0))
    of_head = (chunk.to(tl.int64) * U + u) * CHUNK_SIZE + c
    tl.store(decay_out + of_head, since_start)
    tl.store(to_end_out + of_head, to_end)

    of_key = (chunk.to(tl.int64) * J + u // (U // J)) * (CHUNK_SIZE * Y) + c[:, None] * Y + y[None, :]
    k = tl.load(k_in + of_key)
    qk = tl.dot(tl.load(q_in + of_key), tl.trans(k), input_precision="ieee")
    qk = tl.where(c[:, None] >= c[None, :], qk * decay, 0.0)
    tl.store(qk_out + of_head[:, None] * CHUNK_SIZE + c[None, :], qk.to(dtype))
    kk = tl.dot(k, tl.trans(k), input_precision="ieee")
    T = unit_lower_inverse(tl.where(below, beta[:, None] * kk * decay, 0.0), PRECISION)
    w = tl.dot((T * (beta * since_start)[None, :]).to(dtype), k, input_precision="ieee")
    tl.store(w_out + of_head[:, None] * Y + y[None, :], w.to(dtype))
    value = tl.load(v_in + of_head[:, None] * Z + z[None, :])
    value = tl.dot((T * beta[None, :]).to(dtype), value, input_precision="ieee")
    tl.store(v_out + of_head[:, None] * Z + z[None, :], value.to(dtype))


@triton.jit
def recurrence(
    q_in,
    k_in,
    qk_in,
    w_in,
    v_in,
    decay_in,
    to_end_in,
    qkv,
    layer,
    q_start_B,
    ends_B,
    read_B,
    write_B,
    fresh_B,
    conv,
    rec,
    o,
    B: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    J: tl.constexpr,
    U: tl.constexpr,
    Y: tl.constexpr,
    Z: tl.constexpr,
    BLOCK_Z: tl.constexpr,
):
    """A sequence's chunks one after the other, for BLOCK_Z columns of one value head. Then the convolution's state."""
    part, u, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = tl.load(q_start_B + b).to(tl.int64)
    length = tl.load(q_start_B + b + 1) - first_row
    if length < 2:
        return
    V: tl.constexpr = U // J
    dtype: tl.constexpr = qkv.dtype.element_ty
    j = u // V
    stack = tl.load(layer).to(tl.int64) * R
    read, write, fresh = stack + tl.load(read_B + b), stack + tl.load(write_B + b), tl.load(fresh_B + b)
    c, y, z = tl.arange(0, CHUNK_SIZE), tl.arange(0, Y), part * BLOCK_Z + tl.arange(0, BLOCK_Z)
    tile = u * (Y * Z) + y[:, None] * Z + z[None, :]
    known = (y >= 0)[:, None] & (z >= 0)[None, :] & (fresh == 0)
    state = tl.load(rec + read * (U * Y * Z) + tile, mask=known, other=0.0).to(tl.float32)
    end = tl.load(ends_B + b)
    first = tl.load(ends_B + b - 1, mask=b > 0, other=0)
    for chunk in range(first, end):
        at_chunk = first.to(tl.int64) + (chunk - first)
        of_key = (at_chunk * J + j) * CHUNK_SIZE + c
        of_head = (at_chunk * U + u) * CHUNK_SIZE + c
        q = tl.load(q_in + of_key[:, None] * Y + y[None, :])
        k = tl.load(k_in + of_key[:, None] * Y + y[None, :])
        w = tl.load(w_in + of_head[:, None] * Y + y[None, :])
        qk = tl.load(qk_in + of_head[:, None] * CHUNK_SIZE + c[None, :])
        v = tl.load(v_in + of_head[:, None] * Z + z[None, :]).to(tl.float32)
        decay, to_end = tl.load(decay_in + of_head), tl.load(to_end_in + of_head)
        before = state.to(dtype)
        n = v - tl.dot(w, before, input_precision="ieee")
        out = decay[:, None] * tl.dot(q, before, input_precision="ieee")
        out += tl.dot(qk, n.to(dtype), input_precision="ieee")
        i = (chunk - first) * CHUNK_SIZE + c
        at = ((first_row + i) * U + u)[:, None] * Z + z[None, :]
        tl.store(o + at, out.to(o.dtype.element_ty), mask=(i < length)[:, None])
        through = tl.load(decay_in + (at_chunk * U + u) * CHUNK_SIZE + CHUNK_SIZE - 1)
        state = through * state + tl.dot(tl.trans(k), (to_end[:, None] * n).to(dtype), input_precision="ieee")
    tl.store(rec + write * (U * Y * Z) + tile, state.to(rec.dtype.element_ty))

    channels = j * (2 * Y + V * Z)
    keep(qkv, conv, first_row, length, read, write, fresh, channels + 2 * Y + (u % V) * Z + z, C, W)
    if (u % V == 0) & (part == 0):
        keep(qkv, conv, first_row, length, read, write, fresh, channels + y, C, W)
        keep(qkv, conv, first_row, length, read, write, fresh, channels + Y + y, C, W)


@triton.jit
def keep(qkv, conv, first_row, length, read, write, fresh, channel, C: tl.constexpr, W: tl.constexpr):
    """The last W - 1 inputs of a sequence, some of which may be of the old state."""
    for w in tl.static_range(W - 1):
        back = length - (W - 1) + w
        every = channel >= 0
        x = tl.load(qkv + (first_row + back) * C + channel, mask=every & (back >= 0), other=0.0)
        old = conv + (read * (W - 1) + back + W - 1) * C + channel
        x += tl.load(old, mask=every & (back < 0) & (fresh == 0), other=0.0)
        tl.store(conv + (write * (W - 1) + w) * C + channel, x)
