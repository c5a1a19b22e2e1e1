# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet in Triton: recurrent for one token a sequence, and the chunked (WY) form in three launches.

`decode` convolves the channels that a program needs itself. For longer sequences `convolve` and `chunks` make, for all
chunks at once, what no state has a part in, and `recurrence` goes from chunk to chunk. With 16-bit inputs, what is
between these launches and what is multiplied is 16-bit, too; sums and decays are float32, and so are states
until they are stored.
"""

import triton
import triton.language as tl

from qwen_spmd.pallas.triton.kernels import find, silu

CHUNK = 64
CHUNK_SIZE = tl.constexpr(CHUNK)


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
def load_state(rec, read, fresh, first, at, Y: tl.constexpr, Z: tl.constexpr, U: tl.constexpr, BLOCK_Z: tl.constexpr):
    """[Y, BLOCK_Z], the at-th such tile of the heads from `first` on.

    Read once and written once: nothing of it is worth a place in the L2 cache.
    """
    u, z0 = first + at // (Z // BLOCK_Z), at % (Z // BLOCK_Z) * BLOCK_Z
    y, z = tl.arange(0, Y), tl.arange(0, BLOCK_Z)
    known = (y >= 0)[:, None] & (z >= 0)[None, :] & (fresh == 0)
    tile = rec + (read * U + u) * (Y * Z) + y[:, None] * Z + z0 + z[None, :]
    return tl.load(tile, mask=known, other=0.0, eviction_policy="evict_first")


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
    PREFETCH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A sequence's key head, or a SPLIT-th of its value heads' columns. o = S'^T q is read from the state before:

    S' = e^g S + k d^T, so o = e^g S^T q + (k . q) d. Without SPLIT, the convolution's state moves on, too: no other
    program reads these channels.
    """
    b, j, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    V: tl.constexpr = U // J
    TILES: tl.constexpr = V * (Z // BLOCK_Z) // SPLIT
    y, z = tl.arange(0, Y), tl.arange(0, BLOCK_Z)
    # All at once, before anything waits for one of them: with few sequences, latencies are what a launch takes.
    row, live, fresh = tl.load(q_start_B + b).to(tl.int64), tl.load(live_B + b) != 0, tl.load(fresh_B + b)
    stack = tl.load(layer).to(tl.int64) * R
    read, write = stack + tl.load(read_B + b), stack + tl.load(write_B + b)
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
    channels = j * (2 * Y + V * Z)
    if PREFETCH:
        state = load_state(rec, read, fresh, j * V, part * TILES, Y, Z, U, BLOCK_Z)
    q = normalise(convolve_one(qkv, conv_w, conv, row, read, fresh, channels + y, C, W)) * Y**-0.5
    k = normalise(convolve_one(qkv, conv_w, conv, row, read, fresh, channels + Y + y, C, W))
    kq = tl.sum(k * q, 0)
    for i in tl.range(TILES, num_stages=STAGES):
        at = part * TILES + i
        v, z0 = at // (Z // BLOCK_Z), at % (Z // BLOCK_Z) * BLOCK_Z
        u = j * V + v
        value_channel = channels + 2 * Y + v * Z + z0 + z
        value = convolve_one(qkv, conv_w, conv, row, read, fresh, value_channel, C, W)
        g = log_decay(tl.load(a_TU + row * U + u), tl.load(a_log + u), tl.load(dt_bias + u))
        beta, decay = sigmoid(tl.load(b_TU + row * U + u)), tl.exp(g)
        if PREFETCH:
            before = state.to(tl.float32)
            if TILES > 1:
                following = tl.minimum(at + 1, part * TILES + TILES - 1)
                state = load_state(rec, read, fresh, j * V, following, Y, Z, U, BLOCK_Z)
        else:
            before = load_state(rec, read, fresh, j * V, at, Y, Z, U, BLOCK_Z).to(tl.float32)
        d = beta * (value - decay * tl.sum(before * k[:, None], 0))
        out = decay * tl.sum(before * q[:, None], 0) + kq * d
        after = decay * before + k[:, None] * d[None, :]
        tile = y[:, None] * Z + z0 + z[None, :]
        tl.store(rec + (write * U + u) * (Y * Z) + tile, after.to(rec.dtype.element_ty), cache_modifier=".cs")
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
    conv,
    R: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The convolution's states, after all parts of `decode` have read them."""
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
def product(A, B, DTYPE: tl.constexpr):
    return tl.dot(A.to(DTYPE), B.to(DTYPE), input_precision="ieee")


@triton.jit
def merge(D, B, DTYPE: tl.constexpr):
    """(D^-1 + B)^-1, for B that leads four blocks of D^-1 into later ones.

    It is (I + M)^-1 D with M = D B, and M^4 = 0: (I + M)^-1 = (I + M M) (I - M).
    """
    M = product(D, B, DTYPE)
    E = D - product(M, D, DTYPE)
    return E + product(product(M, M, DTYPE), E, DTYPE)


@triton.jit
def unit_lower_inverse(A, DTYPE: tl.constexpr):
    """(I + A)^-1 for strictly lower triangular A [64, 64]: of its diagonal blocks of 4, then of 16, then all.

    DTYPE is of the operands. What is multiplied here is of unit size, where float16 keeps as much as tf32 does.
    """
    n, A = tl.arange(0, 64), A.to(DTYPE)
    in_4, in_16 = (n // 4)[:, None] == (n // 4)[None, :], (n // 16)[:, None] == (n // 16)[None, :]
    M = tl.where(in_4, A, 0.0)
    E = tl.where(n[:, None] == n[None, :], 1.0, 0.0) - M.to(tl.float32)
    D = E + product(product(M, M, DTYPE), E, DTYPE)
    D = merge(D, tl.where(in_16 & (in_4 == 0), A, 0.0), DTYPE)
    return merge(D, tl.where(in_16, 0.0, A), DTYPE)


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
    which, j, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)  # neighbours read neighbouring channels
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
    rows = qkv + (first_row + part * CHUNK_SIZE - (W - 1)) * C  # offsets from here fit into 32 bits
    inside = live[:, None] & (n < size)[None, :]
    total = tl.zeros([CHUNK_SIZE, SIZE], tl.float32)
    for w in tl.static_range(W):
        back = i - (W - 1) + w
        mask = inside & (back >= 0)[:, None]
        x = tl.load(rows + ((c + w)[:, None] * C + channel[None, :]), mask=mask, other=0.0)
        total += x.to(tl.float32) * tl.load(conv_w + w * C + channel, mask=n < size, other=0.0).to(tl.float32)[None, :]
    if (part == 0) & (tl.load(fresh_B + b) == 0):
        tail = conv + (tl.load(layer).to(tl.int64) * R + tl.load(read_B + b)) * ((W - 1) * C)
        for w in tl.static_range(W - 1):
            back = i - (W - 1) + w
            mask = inside & (back < 0)[:, None]
            x = tl.load(tail + ((c + w)[:, None] * C + channel[None, :]), mask=mask, other=0.0)
            taps = tl.load(conv_w + w * C + channel, mask=n < size, other=0.0).to(tl.float32)
            total += x.to(tl.float32) * taps[None, :]
    x = tl.where(inside, silu(total), 0.0)
    dtype: tl.constexpr = qkv.dtype.element_ty
    if which < 2:
        x = x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
        first = (chunk.to(tl.int64) * J + j) * (CHUNK_SIZE * Y)
        at = c[:, None] * Y + n[None, :]
        if which == 0:
            tl.store(q_out + first + at, (x * Y**-0.5).to(dtype), mask=(n < Y)[None, :])
        else:
            tl.store(k_out + first + at, x.to(dtype), mask=(n < Y)[None, :])
    else:
        first = (chunk.to(tl.int64) * U + j * V + which - 2) * (CHUNK_SIZE * Z)
        tl.store(v_out + first + (c[:, None] * Z + n[None, :]), x.to(dtype), mask=(n < Z)[None, :])


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
    qk_out,
    inverse_out,
    decay_out,
    to_end_out,
    B: tl.constexpr,
    J: tl.constexpr,
    U: tl.constexpr,
    Y: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """What a value head's chunk needs that no state has a part in. With all rows beyond the sequence's end as if they
    did nothing: (q k^T) * decay; (I + beta (k k^T) * decay, below the diagonal)^-1 beta; the decay from the chunk's
    start to each row, and from each row to its end.
    """
    u, chunk = tl.program_id(0), tl.program_id(1)  # neighbours share q and k
    if chunk >= tl.load(ends_B + B - 1):
        return
    dtype: tl.constexpr = q_in.dtype.element_ty
    EXACT: tl.constexpr = dtype == tl.float32
    b, part = find(ends_B, chunk, B, BLOCK_B)
    first_row = tl.load(q_start_B + b).to(tl.int64)
    c, y = tl.arange(0, CHUNK_SIZE), tl.arange(0, Y)
    i = part * CHUNK_SIZE + c
    live = i < tl.load(q_start_B + b + 1) - first_row
    at = (first_row + i) * U + u
    a = tl.load(a_TU + at, mask=live, other=0.0)
    g = tl.where(live, log_decay(a, tl.load(a_log + u), tl.load(dt_bias + u)), 0.0)
    beta = tl.where(live, sigmoid(tl.load(b_TU + at, mask=live, other=0.0)), 0.0)
    below = c[:, None] > c[None, :]
    if EXACT:
        # Sums over each segment: differences of cumulated ones lose what is small beside a large decay.
        later = tl.where(below, g[:, None], 0.0)
        decay = tl.exp(tl.cumsum(later, 0))
        to_end = tl.exp(tl.sum(later, 0))
    else:
        # Nothing is left after e^-40 either, and what differences of such sums lose is less than 16 bits do.
        g = tl.maximum(g, -40.0)
        G = tl.cumsum(g, 0)
        decay = tl.exp(tl.minimum(G[:, None] - G[None, :], 0.0))
        to_end = tl.exp(tl.minimum(tl.sum(g, 0) - G, 0.0))
    of_head = (chunk.to(tl.int64) * U + u) * CHUNK_SIZE
    tl.store(decay_out + of_head + c, tl.exp(tl.cumsum(g, 0)))
    tl.store(to_end_out + of_head + c, to_end)

    of_key = (chunk.to(tl.int64) * J + u // (U // J)) * (CHUNK_SIZE * Y)
    tile, square = c[:, None] * Y + y[None, :], c[:, None] * CHUNK_SIZE + c[None, :]
    k = tl.load(k_in + of_key + tile)
    qk = tl.dot(tl.load(q_in + of_key + tile), tl.trans(k), input_precision="ieee")
    qk = tl.where(c[:, None] >= c[None, :], qk * decay, 0.0)
    tl.store(qk_out + of_head * CHUNK_SIZE + square, qk.to(dtype))
    kk = tl.dot(k, tl.trans(k), input_precision="ieee")
    inverse = unit_lower_inverse(tl.where(below, beta[:, None] * kk * decay, 0.0), tl.float32 if EXACT else tl.float16)
    tl.store(inverse_out + of_head * CHUNK_SIZE + square, (inverse * beta[None, :]).to(dtype))


@triton.jit
def recurrence(
    q_in,
    k_in,
    qk_in,
    inverse_in,
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
    """A sequence's chunks one after the other, for BLOCK_Z columns of one value head. Then the convolution's state.

    Here q k^T, the inverse and the decays are those of `chunks`.
    """
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
        of_key, of_head = (at_chunk * J + j) * CHUNK_SIZE, (at_chunk * U + u) * CHUNK_SIZE
        k = tl.load(k_in + of_key * Y + (c[:, None] * Y + y[None, :]))
        q = tl.load(q_in + of_key * Y + (c[:, None] * Y + y[None, :]))
        v = tl.load(v_in + of_head * Z + (c[:, None] * Z + z[None, :])).to(tl.float32)
        inverse = tl.load(inverse_in + of_head * CHUNK_SIZE + (c[:, None] * CHUNK_SIZE + c[None, :]))
        qk = tl.load(qk_in + of_head * CHUNK_SIZE + (c[:, None] * CHUNK_SIZE + c[None, :]))
        decay, to_end = tl.load(decay_in + of_head + c)[:, None], tl.load(to_end_in + of_head + c)[:, None]
        through = tl.load(decay_in + of_head + CHUNK_SIZE - 1)
        before = state.to(dtype)
        n = v - decay * tl.dot(k, before, input_precision="ieee")
        n = tl.dot(inverse, n.to(dtype), input_precision="ieee")
        out = decay * tl.dot(q, before, input_precision="ieee")
        state = through * state + tl.dot(tl.trans(k), (to_end * n).to(dtype), input_precision="ieee")
        out += tl.dot(qk, n.to(dtype), input_precision="ieee")
        i = (chunk - first) * CHUNK_SIZE + c
        rows = o + (first_row + (chunk - first) * CHUNK_SIZE) * (U * Z)
        at = c[:, None] * (U * Z) + u * Z + z[None, :]
        tl.store(rows + at, out.to(o.dtype.element_ty), mask=(i < length)[:, None])
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
