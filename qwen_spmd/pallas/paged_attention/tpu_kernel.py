# SPDX-License-Identifier: Apache-2.0
"""Paged attention on a TPU, the kernel.

There is no schedule: the kernel walks the batch's own metadata (`q_start_B`, `kv_len_B`, `pages_BP` in scalar memory),
so that nothing is computed for a call, and no list of work can overflow. Work is cut into items, a tile of
`tokens` query rows of a sequence each, and an item's context into blocks of `pages` pages. `streams` items are under
way at once, each in a place of its own; a stream that has finished an item takes the batch's next. Every trip of the
loop starts the copies of the next block of each stream, waits for the current ones and computes them.

New keys and values reach their pages here, too. A sequence of one token puts it into the last block it has loaded
anyway, and copies back the aligned group of rows around it, the least that a copy can write. Longer sequences have
theirs written page by page before the walk begins.

Whatever lies in a page past a sequence's end must have no influence. Keys there are masked in the scores; values would
still turn a weight of zero into NaN, so the last block of an item has zeros written over them, in VMEM.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

MASKED = -1e30  # finite: inf - inf is NaN
LANES = 128


class State(NamedTuple):
    """Where a stream is: block `block` of `blocks` of a tile of sequence b, which sees positions up to `end`.

    par: which of two places its queries are in. Past the batch's end, b is B.
    """

    b: Any
    tile: Any
    block: Any
    par: Any
    end: Any
    blocks: Any


class Chunk(NamedTuple):
    """Pages of a block, and the position of their first token."""

    pages: Any
    first: Any


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How work is cut.

    tokens   query rows of an item
    streams  items under way
    pages    of a block
    chunk    of these, for a block that not every row sees as a whole
    sub      query rows of one product
    """

    tokens: int
    streams: int
    pages: int
    chunk: int
    sub: int


def subs_of(K: int) -> int:
    """Sub-tiles of an item that a trip takes, so that they have a multiple of eight units: of two, four times."""
    return 8 // math.gcd(K, 8)


def div(x: Any, y: int) -> Any:
    """Of what is not negative: `//` is several instructions more."""
    return jax.lax.div(x, jnp.full_like(x, y))


def wide(x: jax.Array, width: int) -> jax.Array:
    """x [rows, LANES] of which all lanes are the same, with that many."""
    return jnp.concatenate([x] * pl.cdiv(width, LANES), axis=1)[:, :width]


def kernel(
    layer_ref: Any, q_start: Any, kv_len: Any, pages: Any, q_hbm: Any, new_hbm: Any, *refs: Any,
    c: Blocks, T: int, B: int, several: bool, one_token: bool, names: tuple[str, ...], scale: float, given: bool,
) -> None:  # fmt: skip
    refs = refs[1 + given :]  # the aliased inputs
    o_hbm, kv_hbm = refs[:2]
    r = dict(zip(names, refs[2:], strict=True))
    kv_buf, q_buf, o_buf, new_buf, out_buf, pending, skipped = (
        r[name] for name in ("kv_buf", "q_buf", "o_buf", "new_buf", "out_buf", "pending", "skipped")
    )
    _, _, PB, K, _, S, H = kv_buf.shape
    G, keys, table = q_buf.shape[4], PB * S, pages.shape[0] // B
    layer = layer_ref[0]
    group = min(32, S)
    log2 = scale * math.log2(math.e)

    def q_len(b):
        return jnp.where(kv_len[b] > 0, 1, 0) if one_token else q_start[b + 1] - q_start[b]

    def next_seq(b):
        """The first sequence from b on that is ours, or B."""

        def other(b):
            n = q_len(jnp.minimum(b, B - 1))
            return (b < B) & ((n <= 1) if several else (n != 1))

        def skip(b):
            if one_token:  # a row of padding
                zero_row(b).start()
                skipped[0] += 1
            return b + 1

        return jax.lax.while_loop(other, skip, b)

    def zero_row(b):
        return pltpu.make_async_copy(r["zeros"].at[pl.ds(0, 1)], o_hbm.at[pl.ds(b, 1)], r["z_sem"])

    def item(b, tile):
        """(row, first position, rows) of a tile of sequence b."""
        b = jnp.minimum(b, B - 1)
        done = tile * c.tokens
        rows = jnp.minimum(q_len(b) - done, c.tokens)
        return q_start[b] + done, kv_len[b] - q_len(b) + done, rows

    # --- copies ---------------------------------------------------------------------------------------------------

    def page_copy(slot, j, s, p):
        page = pages[s.b * table + s.block * PB + p]
        return pltpu.make_async_copy(kv_hbm.at[layer, page], kv_buf.at[slot, j, p], r["kv_sem"].at[slot, j])

    def whole_block(slot, j, s, act):
        if act is wait:  # for all at once
            act(pltpu.make_async_copy(kv_buf.at[slot, j], kv_buf.at[slot, j], r["kv_sem"].at[slot, j]))
        else:
            for p in range(PB):
                act(page_copy(slot, j, s, p))

    def kv_copies(slot, j, s, act):
        """Of the pages of a block that are there."""
        here = jnp.where(s.b < B, s.end - s.block * keys, 0)

        @pl.when(here > (PB - 1) * S)
        def _():
            whole_block(slot, j, s, act)

        if PB > 1:

            @pl.when(here <= (PB - 1) * S)
            def _():
                jax.lax.fori_loop(0, div(here + S - 1, S), lambda p, _: act(page_copy(slot, j, s, p)), None)

    def q_copies(par, j, b, tile, act):
        row, _, _ = item(b, tile)
        row = jnp.minimum(row, T - c.tokens)
        dst = q_buf.at[par, j, pl.ds(0, c.tokens)]
        act(pltpu.make_async_copy(q_hbm.at[pl.ds(row, c.tokens)], dst, r["q_sem"].at[par, j]))
        if not several:
            act(pltpu.make_async_copy(new_hbm.at[pl.ds(row, 1)], new_buf.at[par, j], r["q_sem"].at[par, j]))

    def row_copies(src, row, rows, sem, act):
        """Of the first `rows` of src, a number known at run time only: in powers of two."""
        size = pl.next_power_of_2(src.shape[0])
        while size:
            if size <= src.shape[0]:

                @pl.when((rows & size) != 0)
                def _(size=size):
                    at = rows & ~(2 * size - 1)
                    act(pltpu.make_async_copy(src.at[pl.ds(at, size)], o_hbm.at[pl.ds(row + at, size)], sem))

            size //= 2

    def start(copy):
        copy.start()

    def wait(copy):
        copy.wait()

    # --- rows of zeros --------------------------------------------------------------------------------------------

    def tail(act):
        """Copies of zeros to the rows after the last sequence."""
        size = r["zeros"].shape[0]

        def one(i, _):
            row = q_start[B] + i * size
            row_copies(r["zeros"], row, jnp.minimum(T - row, size), r["z_sem"], act)

        jax.lax.fori_loop(0, div(T - q_start[B] + size - 1, size), one, None)

    skipped[0] = jnp.int32(0)
    if one_token or several:
        r["zeros"][...] = jnp.zeros_like(r["zeros"])
    if several:
        tail(start)

    # --- new rows of longer sequences -----------------------------------------------------------------------------

    def write_page(b, page_index):
        page = pages[b * table + page_index]
        begin = page_index * S
        row = q_start[b] + begin - (kv_len[b] - q_len(b))  # that of the page's first place, if it has one
        window = min(T, S)
        at = jnp.clip(row, 0, T - window)
        load = pltpu.make_async_copy(kv_hbm.at[layer, page], out_buf, r["kv_sem"].at[0, 0])
        news = pltpu.make_async_copy(new_hbm.at[pl.ds(at, window)], new_buf.at[pl.ds(S, window)], r["q_sem"].at[0, 0])
        load.start()
        news.start()
        load.wait()
        news.wait()

        def one_group(g, _):
            pos = begin + g * group + jax.lax.broadcasted_iota(jnp.int32, (group, H), 0)
            fresh = (pos >= kv_len[b] - q_len(b)) & (pos < kv_len[b])
            place = pl.ds(pl.multiple_of(g * group, group), group)
            for k in range(K):
                for i in range(2):
                    x = new_buf[pl.ds(S + row - at + g * group, group), i * K + k]
                    old = out_buf[k, i, place].astype(jnp.float32)
                    out_buf[k, i, place] = jnp.where(fresh, x, old).astype(out_buf.dtype)

        jax.lax.fori_loop(0, S // group, one_group, None)
        store = pltpu.make_async_copy(out_buf, kv_hbm.at[layer, page], r["kv_sem"].at[0, 0])
        store.start()
        store.wait()

    if several:

        def write_seq(b, _):
            @pl.when(q_len(b) > 1)
            def _():
                begin = (kv_len[b] - q_len(b)) // S
                jax.lax.fori_loop(begin, (kv_len[b] + S - 1) // S, lambda p, _: write_page(b, p), None)

        jax.lax.fori_loop(0, B, write_seq, None)

    # --- a block --------------------------------------------------------------------------------------------------

    def clean(slot, j, s, chunks):
        """In an item's last block: the new token of a sequence of one, and zeros for values past the end."""
        end = s.end
        g = div(end - 1 - s.block * keys, group)

        def place(g):
            at = g * group
            return div(at, S), pl.ds(pl.multiple_of(jax.lax.rem(at, S), group), group)

        pos = s.block * keys + g * group + jax.lax.broadcasted_iota(jnp.int32, (group, H), 0)
        p, at = place(g)
        for k in range(K):
            for i in range(2):
                x = kv_buf[slot, j, p, k, i, at].astype(jnp.float32)
                if not several:
                    x = jnp.where(pos == end - 1, new_buf[s.par, j, 0, pl.ds(i * K + k, 1)], x)
                    out_buf[j, k, i] = x.astype(out_buf.dtype)
                kv_buf[slot, j, p, k, i, at] = (jnp.where(pos < end, x, 0) if i else x).astype(kv_buf.dtype)

        def zero(g, _):
            p, at = place(g)
            for k in range(K):
                kv_buf[slot, j, p, k, 1, at] = jnp.zeros((group, H), kv_buf.dtype)

        jax.lax.fori_loop(g + 1, chunks * (c.chunk * S // group), zero, None)

    def copy_back(j, b, act):
        last = jnp.maximum(kv_len[b] - 1, 0)  # a wait may name any sequence
        page = pages[b * table + div(last, S)]
        at = pl.ds(pl.multiple_of(div(jax.lax.rem(last, S), group) * group, group), group)
        act(pltpu.make_async_copy(out_buf.at[j], kv_hbm.at[layer, page, :, :, at], r["o_sem"].at[j]))

    def product(x, y, contract):
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        dims = (((1,), (contract,)), ((), ()))
        return jax.lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)

    def score(unit, slot, j, par, k, sub, off, first, chunk, masked):
        """Products of the queries in rows sub * c.sub on of key head k and a block's keys, and their new maxima.

        They go into the places that `unit` has for them, and wait there for `accumulate`. The maximum is the same in
        all lanes.
        """
        row = jnp.minimum(off + sub * c.sub, c.tokens)  # past the end there are none of the item's
        q = q_buf[par, j, pl.ds(row, c.sub), k].reshape(c.sub * G, H)
        scores = product(q, kv_buf[slot, j, chunk.pages, k, 0].reshape(-1, H).astype(q.dtype), 1)
        if masked:
            pos = chunk.first + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
            token = div(jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0), G)
            scores = jnp.where(pos <= first + sub * c.sub + token, scores, MASKED)
        m = r["m"].at[j, k, pl.ds(pl.multiple_of(sub * c.sub * G, c.sub * G), c.sub * G)]
        m_old = m[...]
        m_new = jnp.maximum(m_old, scores.max(-1, keepdims=True))
        m[...] = m_new
        r[f"scores{unit}"][:, : scores.shape[1]] = scores
        r[f"max{unit}"][...] = m_new
        r[f"decay{unit}"][...] = jnp.exp2((m_old - m_new) * log2)

    def accumulate(unit, slot, j, k, sub, chunk):
        """Online softmax, in powers of two. Its sum is one for each lane, to be summed up at the end."""
        at = pl.ds(pl.multiple_of(sub * c.sub * G, c.sub * G), c.sub * G)
        decay = r[f"decay{unit}"][...]
        value = kv_buf[slot, j, chunk.pages, k, 1].reshape(-1, H).astype(q_buf.dtype)
        n = len(value)
        p = jnp.exp2((r[f"scores{unit}"][:, :n] - wide(r[f"max{unit}"][...], n)) * log2)
        r["l"][j, k, at] = r["l"][j, k, at] * decay + sum(p[:, i : i + LANES] for i in range(0, n, LANES))
        r["acc"][j, k, at] = r["acc"][j, k, at] * wide(decay, H) + product(p.astype(value.dtype), value, 0)

    def begin(j):
        for name, x in (("m", MASKED), ("l", 0.0), ("acc", 0.0)):
            r[name][j] = jnp.full_like(r[name][j], x)

    def compute_one(slot, streams, chunk=None):
        """All scores first: there is much to interleave, and the compiler keeps to the order of memory."""
        place = pl.ds(0, PB) if chunk is None else pl.ds(chunk * c.chunk, c.chunk)
        begin = 0 if chunk is None else chunk * c.chunk * S
        units = [(j * K + k, j, k, s, Chunk(place, s.block * keys + begin)) for j, s in streams for k in range(K)]
        for unit, j, k, s, here in units:
            score(unit, slot, j, s.par, k, 0, 0, s.end - 1, here, True)
        for unit, j, k, _, here in units:
            accumulate(unit, slot, j, k, 0, here)

    def compute_chunks(slot, streams):
        """As far as the longest of the streams' blocks."""
        most = functools.reduce(jnp.maximum, [chunks(s) for _, s in streams])
        for chunk in range(PB // c.chunk):

            @pl.when(chunk < most)
            def _(chunk=chunk):
                compute_one(slot, streams, chunk)

    def compute_several(slot, streams):
        """A block that all rows see as a whole, and of others chunk after chunk as far as the last row sees."""
        ((j, s),) = streams
        row, first, rows = item(s.b, s.tile)
        start = s.block * keys

        @pl.when(start + keys <= first + 1)
        def _():
            rows_of_chunk(slot, j, s, row, first, rows, Chunk(pl.ds(0, PB), start), False)

        @pl.when(start + keys > first + 1)
        def _():
            def some(i, _):
                chunk = Chunk(pl.ds(i * c.chunk, c.chunk), start + i * c.chunk * S)
                for masked in (False, True):

                    @pl.when((chunk.first + c.chunk * S > first + 1) == masked)
                    def _(masked=masked):
                        rows_of_chunk(slot, j, s, row, first, rows, chunk, masked)

            jax.lax.fori_loop(0, chunks(s), some, None)

    def chunks(s):
        """Of a block: those that the last row sees any of."""
        return div(jnp.minimum(s.end - s.block * keys, keys) + c.chunk * S - 1, c.chunk * S)

    def rows_of_chunk(slot, j, s, row, first, rows, chunk, masked):
        """The scores of the next two units, each of rows and a key head, while the softmax of two is computed.

        A product with values sums up in one matrix unit, and there are two.
        """
        off = row - jnp.minimum(row, T - c.tokens)
        subs = subs_of(K)
        last = c.tokens // c.sub - 1
        units = [(a, k) for a in range(subs) for k in range(K)]

        def scores(place, units):
            for n, (sub, k) in enumerate(units):
                score(place + n, slot, j, s.par, k, sub, off, first, chunk, masked)

        def some(i, _):
            here = [(i * subs + a, k) for a, k in units]
            here += [(jnp.minimum((i + 1) * subs + a, last), k) for a, k in units[:2]]
            for n in range(0, len(units), 2):
                scores(2 - n % 4, here[n + 2 : n + 4])
                for m in (0, 1):
                    sub, k = here[n + m]
                    accumulate(n % 4 + m, slot, j, k, sub, chunk)

        scores(0, units[:2])
        jax.lax.fori_loop(0, div(rows + c.sub * subs - 1, c.sub * subs), some, None)

    def divide(j):
        for k in range(K):
            o = r["acc"][j, k] / r["l"][j, k].sum(-1, keepdims=True)
            o_buf[j, :, k] = o.reshape(c.tokens, G, H).astype(o_buf.dtype)

    def send(j, b, tile):
        row, _, rows = item(b, tile)
        row_copies(o_buf.at[j], row, rows, r["o_sem"].at[j], start)
        if not several:
            copy_back(j, b, start)
        pending[j] = rows

    def wait_pending(j):
        """For the rows that stream j sent last."""
        row_copies(o_buf.at[j], 0, pending[j], r["o_sem"].at[j], wait)
        if not several:

            @pl.when(pending[j] > 0)
            def _():
                copy_back(j, 0, wait)

    # --- the walk -------------------------------------------------------------------------------------------------

    def advance(states, cursor, slot):
        """Each stream's next block, whose copies are started."""
        nexts = []
        for j, s in enumerate(states):

            def claim(b, tile, s=s):
                _, first, rows = item(b, tile)
                end = first + rows
                s = State(b, tile, jnp.int32(0), 1 - s.par, end, div(end + keys - 1, keys))
                more = (tile + 1) * c.tokens < q_len(jnp.minimum(b, B - 1))
                return s, (next_seq(jnp.where(more, b, b + 1)), jnp.where(more, tile + 1, 0))

            def proceed(b, tile, s=s):
                return s._replace(block=s.block + 1), (b, tile)

            over = s.block + 1 >= s.blocks
            s, cursor = jax.lax.cond(over, claim, proceed, *cursor)
            kv_copies(slot, j, s, start)

            @pl.when((s.block == 0) & (s.b < B))
            def _(j=j, s=s):
                q_copies(s.par, j, s.b, s.tile, start)

            nexts.append(s)
        return nexts, cursor

    zero_i = jnp.int32(0)
    for j in range(c.streams):
        pending[j] = zero_i
    # A state past the batch's end has no blocks: it claims the first item there is.
    none = State(jnp.int32(B), zero_i, zero_i, zero_i, zero_i, zero_i)
    states, cursor = advance([none] * c.streams, (next_seq(zero_i), zero_i), zero_i)

    def live(carry):
        _, states, _ = carry
        return functools.reduce(jnp.logical_or, [s.b < B for s in states])

    def slow_trip(slot, states, cursor):
        nexts, cursor = advance(states, cursor, 1 - slot)
        # Streams that are computed together have zeros where the longest of them has values.
        deepest = functools.reduce(jnp.maximum, [jnp.where(s.b < B, chunks(s), 0) for s in states])
        for j, s in enumerate(states):
            kv_copies(slot, j, s, wait)

            @pl.when((s.b < B) & (s.block + 1 == s.blocks))
            def _(j=j, s=s):
                wait_pending(j)
                clean(slot, j, s, deepest)

        compute = compute_several if several else compute_chunks
        every = functools.reduce(jnp.logical_and, [s.b < B for s in states])

        @pl.when(every)
        def _():  # as one, for the compiler to interleave
            compute(slot, list(enumerate(states)))

        if c.streams > 1:
            for j, s in enumerate(states):

                @pl.when(~every & (s.b < B))
                def _(j=j, s=s):
                    compute(slot, [(j, s)])

        ends = [(s.b < B) & (s.block + 1 == s.blocks) for s in states]
        together = functools.reduce(jnp.logical_and, ends)

        @pl.when(together)
        def _():
            for j in range(c.streams):
                divide(j)

        for j, s in enumerate(states):
            if c.streams > 1:

                @pl.when(ends[j] & ~together)
                def _(j=j):
                    divide(j)

            @pl.when(ends[j])
            def _(j=j, s=s):
                send(j, s.b, s.tile)

        return tuple(nexts), cursor

    def fast_trip(_, carry):
        """Of streams that are all within an item, with a whole block next: without branches."""
        slot, states = carry
        nexts = tuple(s._replace(block=s.block + 1) for s in states)
        for j, s in enumerate(nexts):
            whole_block(1 - slot, j, s, start)
        for j, s in enumerate(states):
            whole_block(slot, j, s, wait)
        compute_one(slot, list(enumerate(states)))
        return 1 - slot, nexts

    def trip(carry):
        slot, states, cursor = carry
        first = [(s.b < B) & (s.block == 0) for s in states]

        @pl.when(functools.reduce(jnp.logical_or, first))
        def _():
            for j, s in enumerate(states):

                @pl.when(first[j])
                def _(j=j, s=s):
                    q_copies(s.par, j, s.b, s.tile, wait)
                    begin(j)

        if not several:
            whole = [jnp.where(s.b < B, div(s.end, keys) - s.block - 1, 0) for s in states]
            slot, states = jax.lax.fori_loop(0, functools.reduce(jnp.minimum, whole), fast_trip, (slot, states))
        states, cursor = slow_trip(slot, states, cursor)
        return 1 - slot, states, cursor

    jax.lax.while_loop(live, trip, (zero_i, tuple(states), cursor))
    for j in range(c.streams):
        wait_pending(j)
    if several:
        tail(wait)
    if one_token:
        jax.lax.fori_loop(0, skipped[0], lambda b, _: zero_row(b).wait(), None)
