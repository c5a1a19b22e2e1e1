# SPDX-License-Identifier: Apache-2.0
"""Scheduler, against a simulated device that notices any page, slot, position or flag that is wrong.

Each rank's device keeps what a real one keeps (pages, recurrent slots, last tokens, stop flags) as token ids with their
owner, and its model's next token depends on every token before it. Always one step is in flight. Not here: real
programs.
"""

import dataclasses
import types
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_spmd.limits import FROM_SLOT
from qwen_spmd.serve.blocks import Blocks
from qwen_spmd.serve.request import Request, SamplingParams, Status
from qwen_spmd.serve.scheduler import QueueFull, Scheduler
from qwen_spmd.serve.scheduler_config import SchedulerConfig
from qwen_spmd.serve.work import DECODE_COST, HORIZON

VOCAB = 11
DTYPES = {"temperature_B": "f4", "top_p_B": "f4", "min_p_B": "f4", "seed_B": "u4", "fresh_B": "?", "emit_B": "?"}
PADDING = {"top_p_B": 1, "stop_ids_B": -1}


def next_token(tokens, seed, stops, min_len):
    start = zlib.crc32(repr((int(seed), [int(t) for t in tokens])).encode())
    order = [(start + i) % VOCAB for i in range(VOCAB)]
    return next(t for t in order if len(tokens) >= min_len or t not in stops)


def alone(r):
    """What the request gives if it has the device for itself."""
    tokens, min_len = list(r.prompt), len(r.prompt) + r.params.min_tokens
    while True:
        tokens.append(next_token(tokens, r.seed, r.stop_ids, min_len))
        if tokens[-1] in r.stop_ids and len(tokens) > min_len:
            return tokens[len(r.prompt) :], "stop"
        if len(tokens) == r.max_len:
            return tokens[len(r.prompt) :], "length"


def of_rank(plan, rank):
    """A plan as one rank sees it."""
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    return types.SimpleNamespace(**{k: v if k == "iterations" else v[rank] for k, v in fields.items()})


class Device:
    """One rank's."""

    def __init__(self, page_size):
        self.page_size = page_size
        self.pages, self.memory, self.token, self.stopped = {}, {}, {}, {0: True}

    def run(self, plan):
        n = max(1, plan.iterations)
        return np.array([[self.row(plan, b, i) for i in range(n)] for b in range(len(plan.kv_len_B))], np.int32)

    def row(self, plan, b, i):
        slot, kv_len = plan.write_slot_B[b], plan.kv_len_B[b] + i
        if plan.kv_len_B[b] == 0:
            return -1
        assert slot == plan.read_slot_B[b] != 0
        if plan.fresh_B[b]:
            self.memory[slot], self.stopped[slot] = [], False
        if self.stopped[slot]:
            return -1
        name, where = plan.rows[b].id, lambda pos: (plan.pages_BP[b, pos // self.page_size], pos % self.page_size)
        ids = plan.tokens_T[plan.q_start_B[b] : plan.q_start_B[b + 1]]
        ids = [int(self.token[slot] if t == FROM_SLOT else t) for t in ids]
        assert len(self.memory[slot]) == kv_len - len(ids), "the slot is at another position"
        self.memory[slot] = self.memory[slot] + ids
        for pos, token in enumerate(ids, kv_len - len(ids)):
            assert where(pos)[0] != 0, "written to the null page"
            self.pages[where(pos)] = (name, pos, token)
        assert [self.pages[where(pos)] for pos in range(kv_len)] == [(name, *x) for x in enumerate(self.memory[slot])]
        if not plan.emit_B[b]:
            return -1
        stops, min_len = plan.stop_ids_B[b], plan.min_len_B[b]
        token = self.token[slot] = next_token(self.memory[slot], plan.seed_B[b], stops, min_len)
        self.stopped[slot] = (token in stops and kv_len >= min_len) or kv_len + 1 >= plan.max_len_B[b]
        return token


class Watched(Scheduler):
    """Notes at each admission which ranks had all but perhaps the budget, and their order."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seats = []

    def fits(self, request):
        pages, most = self.blocks[0].pages_for(request.length + 1), self.config.max_num_seqs
        ranks = zip(self.blocks, self.running_by_rank)
        return [k for k, (b, n) in enumerate(ranks) if n < most and b.free_slots and b.free_pages >= pages]

    def order(self, rank):
        work, blocks = 0, self.blocks[rank]
        for r in self._prefilling[rank]:
            work += len(r.prompt) + len(r.output) - r.computed
            work += DECODE_COST * min(HORIZON, r.max_len - len(r.prompt) - len(r.output))
        for r in self._decoding[rank]:
            work += DECODE_COST * min(HORIZON, r.max_len - r.computed)
        return work, -blocks.free_pages, -blocks.free_slots, rank

    def _seat(self, request, rank):
        fits = self.fits(request)
        assert rank in fits
        self.seats.append((self.order(rank), [self.order(k) for k in fits]))
        super()._seat(request, rank)


class Loop:
    """The engine's loop: plan a step, dispatch it, commit the one before."""

    def __init__(self, *, ranks=1, pages=64, page_size=2, slots=9, **config):
        config = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
            "max_model_len": 48,
            "token_buckets": (4, 8, 16, 32),
            "seq_buckets": (1, 2, 4, 8),
            "decode_window": 4,
        } | config
        self.config = SchedulerConfig(**config)
        self.all_blocks = [Blocks(pages + 1, page_size, slots) for _ in range(ranks)]
        self.blocks, self.page_size = self.all_blocks[0], page_size
        self.scheduler = Watched(self.config, self.all_blocks)
        self.devices, self.requests, self.got = [Device(page_size) for _ in range(ranks)], [], {}
        self.flight, self.steps = None, 0
        self.totals, self.padding, self.imbalance = [0] * ranks, 0, []

    def add(self, prompt=3, new=5, **fields):
        i = len(self.requests)
        params = SamplingParams(min_tokens=fields.pop("min_tokens", 0))
        ids = [(7 * i + j) % VOCAB for j in range(prompt)]
        fields = {"id": f"{i:03}", "arrival": float(i), "max_len": prompt + new, "seed": i, "params": params} | fields
        r = Request(prompt=ids, **fields)
        self.scheduler.add(r)
        self.requests.append(r)
        self.got[r.id] = []
        return r

    def run(self, plan):
        return np.stack([device.run(of_rank(plan, rank)) for rank, device in enumerate(self.devices)])

    def step(self):
        scheduler, key, flight, self.steps = self.scheduler, self.scheduler._key, self.flight, self.steps + 1
        before = [(r, r.rank, r.preemptions) for r in self.requests]
        assert self.steps < 1000, "no progress"
        scheduler.seats = []
        plan = scheduler.schedule()
        seated = [r for r, rank, n in before if r.rank >= 0 and (rank < 0 or r.preemptions > n)]
        waiting = [r for r in self.requests if r.status is Status.WAITING]
        lost = {rank for r, rank, n in before if r.preemptions > n}
        assert all(key(r) < key(s) for r in seated for s in waiting), "passed another"
        assert not lost & {r.rank for r in seated}, "took what another lost"
        assert plan or flight or not scheduler.has_work, "stuck"
        self.flight, totals = None, [0] * len(self.devices)
        if plan:
            totals = self.check(plan)
            self.flight = plan, self.run(plan)
        full = lost | {k for k, n in enumerate(totals) if n == self.config.max_num_batched_tokens}
        assert len(scheduler.seats) == len(seated)
        for chosen, fits in scheduler.seats:
            assert all(chosen <= other or other[-1] in full for other in fits), "not the rank with the least work"
        if waiting and not (first := min(waiting, key=key)).in_flight:
            assert set(scheduler.fits(first)) <= full, "waits, though it fits"
        if flight:
            for output in scheduler.commit(*flight):
                assert output.tokens or output.finish_reason
                assert output.finish_reason == output.request.finish_reason != "error"
                self.got[output.request.id] += output.tokens
        self.check_blocks()
        return plan

    def one(self):
        """`step`, as the first rank sees it."""
        plan = self.step()
        return plan and of_rank(plan, 0)

    def check_blocks(self):
        for rank, blocks in enumerate(self.all_blocks):
            blocks.check([r for r in self.requests if r.rank == rank])
        for r in self.requests:
            running = r.status is Status.RUNNING
            assert running == (r.rank >= 0) == (r.lane >= 0) == bool(r.slot) and (running or not r.pages)

    def check(self, plan):
        """The plan keeps to all rules; returns the tokens that each rank computes in the next step of the device."""
        config, s, n, ranks = self.config, self.scheduler, plan.iterations, len(self.devices)
        (_, T), (_, B) = plan.tokens_T.shape, plan.kv_len_B.shape
        plans = [of_rank(plan, rank) for rank in range(ranks)]
        totals = [int(p.q_start_B[-1]) for p in plans]
        assert len(plan.rows) == len(plan.emits) == ranks
        assert min(b for b in config.seq_buckets if b >= max(map(len, plan.rows))) == B
        assert n <= config.decode_window
        assert (B if n else min(b for b in config.token_buckets if b >= max(totals))) == T
        assert n <= 1 or not s.num_waiting
        rows = [r for p in plans for r in p.rows]
        assert 1 <= len(rows) == len(set(rows))
        for rank, p in enumerate(plans):
            self.check_rank(p, rank, T, B)
        computes = [sum(p.emits) if n else total for p, total in zip(plans, totals)]
        self.totals = [a + b for a, b in zip(self.totals, computes)]
        self.padding += ranks * (B * n if n else T) - sum(computes)
        self.imbalance.append(max(computes) / (sum(computes) / ranks))
        assert (s.rank_tokens, s.scheduled_tokens, s.padding_tokens) == (self.totals, sum(self.totals), self.padding)
        assert s.imbalance == pytest.approx(np.mean(self.imbalance))
        return totals

    def check_rank(self, p, rank, T, B):
        live, q_len_B = len(p.rows), np.diff(p.q_start_B)
        assert live <= self.config.max_num_seqs and q_len_B.sum() <= self.config.max_num_batched_tokens
        assert p.q_start_B[0] == 0 and (q_len_B[:live] > 0).all() and (np.diff(q_len_B[:live] > 1) >= 0).all()
        assert (p.kv_len_B[:live] > 0).all() and (q_len_B[live:] == 0).all() and not p.tokens_T[q_len_B.sum() :].any()
        assert not p.iterations or (q_len_B[:live] == 1).all()
        assert p.emit_B[:live].tolist() == [emits > 0 for emits in p.emits] and len(p.emits) == live
        for r, emits in zip(p.rows, p.emits):
            assert r.status is Status.RUNNING and r.rank == rank
            assert not emits or len(r.pages) <= self.blocks.pages_for(r.computed + 1), "more than it needs"
        for name, array in list(vars(p).items())[3:]:
            assert array.dtype == np.dtype(DTYPES.get(name, "i4")), name
            assert len(array) == {"tokens_T": T, "q_start_B": B + 1}.get(name, B), name
            if name not in ("tokens_T", "q_start_B"):
                assert (array[live:] == PADDING.get(name, 0)).all(), name
        assert p.pages_BP.shape[1] == -(-self.config.max_model_len // self.page_size)
        assert p.stop_ids_B.shape[1] == 16
        pages = p.pages_BP[p.pages_BP > 0]
        assert len(set(pages)) == len(pages) and len(set(p.write_slot_B[:live])) == live, "shared"

    def drain(self):
        """Run until idle; every request that was not aborted gave what it gives alone, and all is free again."""
        while self.scheduler.has_work or self.flight:
            self.step()
        for r in self.requests:
            tokens, reason = alone(r)
            assert r.status is Status.FINISHED and r.finished is not None and self.got[r.id] == r.output
            if r.finish_reason == "abort":
                assert r.output == tokens[: len(r.output)]
            else:
                assert (r.output, r.finish_reason) == (tokens, reason)
                assert r.first_scheduled <= r.first_token <= r.finished
        scheduler, lanes = self.scheduler, self.scheduler._lanes
        assert sum(scheduler.finished.values()) == len(self.requests)
        assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
        for rank, blocks in enumerate(self.all_blocks):
            assert (blocks.free_pages, blocks.free_slots) == (blocks.num_pages - 1, blocks.num_slots - 1)
            first = rank * self.config.max_num_seqs
            assert sorted(lanes._free[rank]) == list(range(first, first + self.config.max_num_seqs))


SIZES = {
    "ranks": st.sampled_from([1, 2, 8]),
    "pages": st.integers(4, 12) | st.just(200),
    "page_size": st.integers(1, 4),
    "slots": st.integers(2, 6),
    "max_num_seqs": st.sampled_from([5, 3, 2, 1]),
    "max_num_batched_tokens": st.integers(5, 20),
    "decode_window": st.integers(1, 8),
    "patience_s": st.sampled_from([0, 2.5]),
}
ADD = st.fixed_dictionaries(
    {
        "prompt": st.integers(1, 9),
        "new": st.integers(1, 20),
        "priority": st.integers(-1, 2),
        "stop_ids": st.sampled_from([(), (), (3,), (1, 5)]),
        "min_tokens": st.integers(0, 5),
    }
)
ABORT, STEP = st.integers(0, 9), st.just("step")
MOVES = st.lists(ADD | ADD | ADD | STEP | STEP | STEP | STEP | ABORT, min_size=20, max_size=80)


@settings(max_examples=200, deadline=None, database=None)
@given(st.fixed_dictionaries(SIZES), MOVES)
def test_any_schedule_gives_what_each_request_gives_alone(sizes, moves):
    loop = Loop(**sizes)
    for move in moves:
        if move == "step":
            loop.step()
        elif isinstance(move, int):
            if move < len(loop.requests):
                loop.scheduler.abort(loop.requests[-1 - move])
        else:
            room = min(sizes["pages"] * sizes["page_size"], loop.config.max_model_len)
            prompt = min(move["prompt"], room - 1)
            loop.add(**move | {"prompt": prompt, "new": min(move["new"], room - prompt)})
    loop.drain()


@pytest.mark.parametrize("ranks, seqs", [(1, 1), (1, 2), (1, 3), (1, 5), (2, 1), (2, 3), (8, 1)])
def test_number_of_sequences(ranks, seqs):
    loop = Loop(ranks=ranks, max_num_seqs=seqs)
    for i in range(9):
        loop.add(prompt=1 + i, new=9)
    most = 0
    while loop.scheduler.has_work:
        loop.step()
        most = max(most, loop.scheduler.num_running)
    assert most == ranks * seqs
    loop.drain()


def test_a_long_prompt_goes_in_chunks():
    loop = Loop(max_num_batched_tokens=8)
    r = loop.add(prompt=19, new=3)
    plans = [loop.one() for _ in range(4)]
    assert [(p.iterations, p.kv_len_B[0], p.emits) for p in plans] == [
        (0, 8, [0]),
        (0, 16, [0]),
        (0, 19, [1]),
        (2, 20, [2]),
    ]
    assert [bool(p.fresh_B[0]) for p in plans] == [True, False, False, False]
    assert plans[2].tokens_T[:3].tolist() == r.prompt[16:]
    loop.drain()


def test_decode_rows_come_before_chunks_and_the_budget_holds():
    loop = Loop(max_num_batched_tokens=8)
    short = [loop.add(prompt=3, new=20) for _ in range(2)]
    loop.step()
    long = loop.add(prompt=13, new=4)
    plan = loop.one()
    assert plan.rows == [*short, long] and np.diff(plan.q_start_B).tolist() == [1, 1, 6, 0]
    assert plan.tokens_T[:2].tolist() == [FROM_SLOT] * 2 and plan.tokens_T[2:8].tolist() == long.prompt[:6]
    assert np.diff(loop.one().q_start_B).tolist() == [1, 1, 6, 0]
    one = loop.add(prompt=9, new=4)
    plan = loop.one()
    assert plan.rows == [*short, long, one] and np.diff(plan.q_start_B).tolist() == [1, 1, 1, 5]
    loop.drain()


def test_one_token_chunks_come_before_longer_ones():
    loop = Loop()
    long, short = loop.add(prompt=5), loop.add(prompt=1)
    assert loop.one().rows == [short, long]
    loop.drain()


def test_counts_of_tokens():
    loop = Loop()
    loop.add(prompt=5, new=4)
    s, seen = loop.scheduler, []
    while s.has_work:
        loop.step()
        seen.append((s.scheduled_tokens, s.padding_tokens, s.generated_tokens))
    assert seen == [(5, 3, 0), (8, 3, 1), (8, 3, 4)]


@pytest.mark.parametrize(
    "window, new, expected", [(4, [5], [4]), (4, [12], [4, 4, 3]), (8, [2, 7], [6]), (1, [4], [1, 1, 1]), (8, [1], [])]
)
def test_window_sizes(window, new, expected):
    loop = Loop(decode_window=window)
    for n in new:
        loop.add(new=n)
    plans = [loop.one() for _ in range(len(expected) + 2)]
    assert [p.iterations for p in plans if p] == [0, *expected]
    if len(new) == 2:
        assert plans[1].emits == [1, 6]
    loop.drain()


def test_a_window_is_short_while_a_request_waits():
    loop = Loop(max_num_seqs=1)
    loop.add(new=9), loop.add()
    assert [loop.step().iterations for _ in range(4)] == [0, 1, 1, 1]
    loop.drain()


def test_a_window_is_halved_before_anyone_is_preempted():
    loop = Loop(pages=7, page_size=2, decode_window=8)
    loop.add(prompt=3, new=9), loop.add(prompt=3, new=3)
    loop.step()
    assert loop.blocks.free_pages == 3  # 8 iterations would take 4 + 1 more, 4 take 2 + 1
    assert (loop.step().iterations, loop.blocks.free_pages, loop.scheduler.preemptions) == (4, 0, 0)
    loop.drain()


@pytest.mark.parametrize("ranks", [1, 2])
def test_arrays_are_the_same_objects_while_rows_stay(ranks):
    loop = Loop(ranks=ranks, decode_window=1, page_size=4)
    loop.add(new=20)
    loop.step()
    plans = [loop.step() for _ in range(4)]
    assert plans[0].seed_B is plans[3].seed_B and plans[0].tokens_T is plans[3].tokens_T
    assert [np.count_nonzero(p.pages_BP) for p in plans] == [1, 2, 2, 2], "a plan is not written again"
    loop.drain()


def test_preempted_requests_resume_with_the_same_tokens():
    loop = Loop(pages=10, page_size=2, max_num_batched_tokens=6)  # a chunk is part prompt, part output
    first, last = loop.add(prompt=4, new=15), loop.add(prompt=4, new=12)
    while not last.preemptions:
        plan = loop.one()
    assert (last.status, last.pages, last.slot, last.computed) == (Status.WAITING, [], 0, 0)
    assert first.status is Status.RUNNING and last not in plan.rows
    while last.status is Status.WAITING:
        plan = loop.one()
    b, known = plan.rows.index(last), last.prompt + last.output
    assert plan.fresh_B[b] and len(last.output) > 2 and plan.emits[b] == 0
    assert plan.tokens_T[plan.q_start_B[b] : plan.q_start_B[b + 1]].tolist() == known[: np.diff(plan.q_start_B)[b]]
    loop.drain()
    assert first.preemptions == 0


def test_the_last_in_order_is_preempted_not_the_last_to_come():
    loop = Loop(pages=9, page_size=2, patience_s=100)
    low = loop.add(prompt=4, new=12, priority=1)
    loop.step()
    high = loop.add(prompt=4, new=12, priority=0)
    while not loop.scheduler.preemptions:
        loop.step()
    assert (low.preemptions, high.preemptions) == (1, 0)
    loop.drain()


def test_a_request_in_its_prompt_is_preempted_for_one_before_it():
    loop = Loop(pages=12, page_size=2, decode_window=1, max_num_batched_tokens=5)
    first, last = loop.add(prompt=3, new=9), loop.add(prompt=19, new=1, priority=1)
    loop.step()
    loop.add(prompt=1, new=1)  # not in the step that preempts, though its budget and pages would do
    while not loop.scheduler.preemptions:
        loop.step()
    assert (first.preemptions, last.preemptions, last.output) == (0, 1, [])
    loop.drain()


def test_a_new_seat_of_the_same_rows_is_seen():
    loop = Loop(pages=7, page_size=2, decode_window=1)
    loop.add(prompt=7, new=2)
    last = loop.add(prompt=3, new=9)
    plans = []  # more steps in flight than the engine has
    while plan := loop.scheduler.schedule():
        plans.append((plan, loop.run(plan)))
    assert last.preemptions and plans[-1][0].rows == [[last]]
    for plan, tokens in plans:
        loop.scheduler.commit(plan, tokens)
    plan = loop.scheduler.schedule()
    assert plan.rows == [[last]] and plan.read_slot_B[0, 0] == last.slot != plans[-1][0].read_slot_B[0, 0]


def test_a_preempted_request_waits_for_its_tokens_in_flight():
    loop = Loop()
    r = loop.add(new=9)
    loop.step(), loop.step()
    loop.scheduler._preempt(0)
    assert (r.status, r.in_flight) == (Status.WAITING, 4)
    assert loop.step() is None and r.in_flight == 0 and len(r.output) == 5
    assert loop.one().kv_len_B[0] == r.length
    loop.drain()


def test_no_one_passes_the_first_that_does_not_fit():
    loop = Loop(pages=8, page_size=2)
    loop.add(prompt=7, new=8)
    loop.step()
    big, small = loop.add(prompt=9, new=2), loop.add(prompt=1, new=2)
    while big.first_scheduled is None:
        assert small.first_scheduled is None
        loop.step()
    loop.drain()


def test_admission_needs_a_slot_and_pages_for_one_more_token():
    loop = Loop(slots=3)
    waiting = [loop.add() for _ in range(3)][-1]
    loop.step()
    assert (loop.scheduler.num_running, waiting.status, waiting.pages) == (2, Status.WAITING, [])
    loop.drain()
    loop = Loop(pages=4, page_size=2)
    loop.add(prompt=3, new=2), loop.add(prompt=4, new=2)
    assert len(loop.one().rows) == 1 and loop.blocks.free_pages == 2
    loop.drain()


def test_priority_goes_first_and_patience_ends_it():
    loop = Loop(max_num_seqs=1, patience_s=10)
    low = loop.add(priority=1, arrival=5.0, new=2)
    high = [loop.add(priority=0, arrival=a, new=2) for a in (14.0, 16.0, 12.0)]
    loop.drain()
    order = sorted(loop.requests, key=lambda r: r.first_scheduled)
    assert order == [high[2], high[0], low, high[1]]


def test_an_endless_stream_of_better_priority_starves_no_one():
    loop = Loop(max_num_seqs=1, patience_s=10)
    low = loop.add(priority=1, new=2)
    while low.first_scheduled is None:
        loop.add(priority=0, new=2)
        loop.step(), loop.step()
        assert len(loop.requests) < 20
    loop.drain()


def test_the_queue_is_bounded():
    loop = Loop(max_queue=2, max_num_seqs=1)
    loop.add(), loop.add()
    with pytest.raises(QueueFull, match="2 requests wait"):
        loop.add()
    loop.step()
    loop.add()
    loop.drain()


def test_each_goes_to_the_rank_with_the_least_work():
    loop = Loop(ranks=2, max_num_batched_tokens=64, token_buckets=(64,))
    # Work of the ranks before each: 0 0, 38 0, 38 15, 38 30, 38 153, 66 153.
    requests = [loop.add(prompt=p, new=n) for p, n in [(30, 2), (3, 3), (3, 3), (3, 30), (20, 2), (3, 10)]]
    loop.step()
    assert [r.rank for r in requests] == [0, 1, 1, 1, 0, 0]
    loop.drain()


def test_what_is_done_is_no_work():
    loop = Loop(ranks=2)
    long, short = loop.add(prompt=20, new=3), loop.add(prompt=2, new=7)
    loop.step()
    late = loop.add(prompt=1, new=1)  # 16 of 32 are left on the first rank, 28 of 30 on the other
    loop.step()
    assert (long.rank, short.rank, late.rank) == (0, 1, 0)
    loop.drain()


def test_only_so_many_decode_tokens_are_expected():
    loop = Loop(ranks=2, pages=2000, max_model_len=2000)
    endless, long, one, two = [loop.add(new=n) for n in (1500, HORIZON, 1, 2)]
    loop.step()
    assert [r.rank for r in (endless, long, one, two)] == [0, 1, 0, 1], "endless counts for no more than long"
    late = loop.add(new=1)
    loop.step()
    assert late.rank == 0, "nor does it once it decodes"
    loop.scheduler.abort(endless), loop.scheduler.abort(long)
    loop.drain()


def test_pages_then_slots_break_ties():
    loop = Loop(ranks=3, page_size=4, max_num_batched_tokens=32)
    # As much work, in 4, 3 and 2 pages.
    requests = [loop.add(prompt=p, new=n) for p, n in ((12, 1), (8, 2), (4, 3), (1, 1))]
    loop.step()
    assert [r.rank for r in requests] == [0, 1, 2, 2]
    loop.drain()
    loop = Loop(ranks=2, page_size=4)
    # As much work in as many pages, of two requests and of one.
    requests = [loop.add(prompt=p, new=1) for p in (1, 6, 1, 1)]
    loop.step()
    assert [r.rank for r in requests] == [0, 1, 0, 1]
    loop.drain()


def test_less_work_is_no_use_without_pages():
    loop = Loop(ranks=2, pages=8, page_size=2, decode_window=1)
    many, few = loop.add(prompt=10, new=1), loop.add(prompt=1, new=12)
    loop.step()
    assert (many.rank, few.rank) == (0, 1)
    big, small = loop.add(prompt=9, new=2), loop.add(prompt=1, new=2)
    assert loop.step().rows == [[small], [few, big]]
    loop.drain()


def test_each_rank_has_the_whole_budget():
    loop = Loop(ranks=2, max_num_batched_tokens=8)
    requests = [loop.add(prompt=n, new=3) for n in (12, 5, 2, 4)]
    plan = loop.step()
    assert plan.rows == [[requests[0]], [requests[3], requests[1], requests[2]]]
    assert plan.q_start_B.tolist() == [[0, 8, 8, 8, 8], [0, 1, 6, 8, 8]]
    assert loop.step().q_start_B[:, -1].tolist() == [4, 2 + 3]
    loop.drain()


def test_a_rank_without_rows_is_padding():
    loop = Loop(ranks=3)
    only = loop.add()
    ragged, window = loop.step(), loop.step()
    assert (ragged.iterations, window.iterations) == (0, 4)
    for plan in (ragged, window):
        assert plan.rows == [[only], [], []] and plan.emits[1:] == [[], []]
        assert plan.kv_len_B.shape == (3, 1) and plan.pages_BP.shape == (3, 1, 24)
        for name in ("tokens_T", "q_start_B", "kv_len_B", "pages_BP", "write_slot_B", "fresh_B", "emit_B"):
            assert not getattr(plan, name)[1:].any(), name
    loop.drain()


def test_ranks_share_buckets_and_windows():
    loop = Loop(ranks=2)
    long, *short = [loop.add(prompt=p, new=n) for p, n in ((12, 9), (1, 2), (1, 2), (1, 2))]
    plan = loop.step()
    assert plan.rows == [[long], short] and plan.tokens_T.shape == (2, 16) and plan.kv_len_B.shape == (2, 4)
    plan = loop.step()
    assert (plan.iterations, plan.emits) == (4, [[4], [1, 1, 1]])
    loop.drain()


def test_all_ranks_halve_their_window_before_one_preempts():
    loop = Loop(ranks=2, pages=7, page_size=2, decode_window=8)
    requests = [loop.add(prompt=3, new=n) for n in (11, 9, 3)]
    loop.step()
    # As for one rank: 8 iterations would take 4 + 1 of the second's 3 free pages, 4 take 2 + 1.
    assert [r.rank for r in requests] == [0, 1, 1] and [b.free_pages for b in loop.all_blocks] == [5, 3]
    assert (loop.step().iterations, loop.scheduler.preemptions) == (4, 0)
    assert [b.free_pages for b in loop.all_blocks] == [3, 0]
    loop.drain()


def test_a_preempted_request_may_move():
    loop = Loop(ranks=2, pages=10, page_size=2)
    first, other, last = [loop.add(prompt=4, new=n) for n in (15, 16, 12)]
    loop.step()
    assert (first.rank, other.rank, last.rank) == (0, 1, 0)
    loop.scheduler.abort(other)
    while not last.preemptions:
        plan = loop.step()
    assert last.rank == -1 and plan.rows == [[first], []], "the other rank has room, but tokens are in flight"
    while last.rank < 0:
        plan = loop.step()
    assert last.rank == 1 and last.output and plan.rows == [[first], [last]] and plan.fresh_B[:, 0].tolist() == [0, 1]
    loop.drain()
    assert (first.preemptions, last.preemptions) == (0, 1)


def test_a_preempted_request_without_tokens_in_flight_moves_at_once():
    loop = Loop(ranks=2, pages=12, page_size=2, decode_window=1, max_num_batched_tokens=5)
    first, other, last = [loop.add(prompt=p, new=n) for p, n in ((3, 9), (3, 20), (19, 1))]
    loop.step()
    assert (first.rank, other.rank, last.rank) == (0, 1, 0)
    loop.scheduler.abort(other)
    while not last.preemptions:
        assert last.rank == 0
        plan = loop.step()
    assert last.rank == 1 and plan.rows == [[first], [last]] and plan.tokens_T[1].tolist()[:5] == last.prompt[:5]
    loop.drain()


def test_preemption_stays_within_the_rank():
    loop = Loop(ranks=2, pages=9, page_size=2)
    requests = [loop.add(prompt=4, new=n) for n in (10, 13, 9, 2)]
    loop.step()
    assert [r.rank for r in requests] == [0, 1, 0, 1], "the last in order runs on the rank that lacks nothing"
    while not loop.scheduler.preemptions:
        loop.step()
    assert [r.preemptions for r in requests] == [0, 0, 1, 0]
    loop.drain()


@pytest.mark.parametrize("steps", range(14))
def test_abort_at_any_step(steps):
    for i in range(4):
        loop = Loop(ranks=2, pages=9, page_size=2, max_num_seqs=2, max_num_batched_tokens=4)
        for p, n in ((7, 6), (2, 14), (3, 12), (5, 9)):
            loop.add(prompt=p, new=n)
        for _ in range(steps):
            loop.step()
        loop.scheduler.abort(loop.requests[i])
        loop.check_blocks()
        loop.drain()


def test_numbers_of_the_ranks():
    loop = Loop(ranks=2)
    s = loop.scheduler
    assert (s.rank_tokens, s.running_by_rank, s.imbalance) == ([0, 0], [0, 0], 1)
    loop.add(prompt=6, new=6), loop.add(prompt=2, new=2)
    loop.step()
    assert (s.rank_tokens, s.running_by_rank, s.imbalance, s.padding_tokens) == ([6, 2], [1, 1], 6 / 4, 8)
    loop.step()  # a window of 4, of which the second rank uses 1
    assert (s.rank_tokens, s.scheduled_tokens, s.padding_tokens) == ([10, 3], 13, 8 + 3)
    assert s.imbalance == (6 / 4 + 4 / 2.5) / 2
    loop.drain()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "preempted", "finished", "never added"])
def test_abort(state, ranks):
    loop = Loop(ranks=ranks, max_num_seqs=2, max_num_batched_tokens=8)
    _, r = loop.add(prompt=2, new=20), loop.add(prompt=14, new=9)
    free = loop.blocks.num_pages - 1, loop.blocks.num_slots - 1
    while state not in ("waiting", "never added") and not r.first_scheduled:
        loop.step()
    while state in ("decoding", "preempted") and not r.output:
        loop.step()
    if state == "preempted":
        loop.scheduler._preempt(r.rank)
        assert r.status is Status.WAITING
    if state == "finished":
        loop.drain()
    if state == "never added":
        r = dataclasses.replace(r, id="x")
    output = list(r.output)
    for _ in range(2):
        loop.scheduler.abort(r)
        assert (r.status, r.pages, r.slot, r.rank, r.lane) == (Status.FINISHED, [], 0, -1, -1)
        loop.check_blocks()
    loop.step()
    assert r.output == output and r.finish_reason == ("length" if state == "finished" else "abort")
    if state == "never added":
        return
    loop.drain()
    assert (loop.blocks.free_pages, loop.blocks.free_slots) == free


def test_abort_gives_its_reason():
    loop = Loop()
    r = loop.add()
    loop.scheduler.abort(r, "stop")
    assert (r.finish_reason, loop.scheduler.finished["stop"]) == ("stop", 1)


def commit_one(tokens, **fields):
    """A request that decodes in a window of 4, which gives `tokens`."""
    loop = Loop()
    r = loop.add(**{"new": 9} | fields)
    first = loop.scheduler.schedule()
    plan = loop.scheduler.schedule()
    loop.scheduler.commit(first, np.array([[[0]]], np.int32))
    return r, loop.scheduler.commit(plan, np.array([[tokens]], np.int32)) if plan else None


@pytest.mark.parametrize(
    "tokens, fields, output, reason",
    [
        ([5, 6, 3, -1], {"stop_ids": (9, 3)}, [0, 5, 6, 3], "stop"),
        ([3, 5, 3, -1], {"stop_ids": (3,), "min_tokens": 2}, [0, 3, 5, 3], "stop"),
        ([3, 3, 3, 3], {"stop_ids": (3,), "min_tokens": 5}, [0, 3, 3, 3, 3], None),
        ([5, 6, -1, -1], {"new": 3}, [0, 5, 6], "length"),
        ([5, 3, -1, -1], {"new": 3, "stop_ids": (3,)}, [0, 5, 3], "stop"),
        ([5, -1, -1, -1], {}, [0, 5], "error"),
        ([5, -1, -1, -1], {"stop_ids": tuple(range(20, 36))}, [0, 5], "error"),
    ],
    ids=["stop", "min_tokens allows", "min_tokens forbids", "max_len", "stop at max_len", "other rules", "16 stops"],
)
def test_where_a_request_ends(tokens, fields, output, reason):
    r, (result,) = commit_one(tokens, **fields)
    assert (r.output, r.finish_reason) == (output, reason)
    assert (result.request, result.tokens, result.finish_reason) == (r, output[1:], reason)
    assert (r.slot == 0) == (reason is not None)


def test_tokens_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"tokens is \(1, 1, 3\), it must be \(1, 1, 4\) or longer"):
        commit_one([5, 6, 7])
    loop = Loop(ranks=2)
    loop.add()
    plan = loop.scheduler.schedule()
    for shape in ((1, 1, 1), (2, 2, 1), (2, 1)):
        with pytest.raises(ValueError, match=r"tokens is .*, it must be \(2, 1, 1\) or longer"):
            loop.scheduler.commit(plan, np.zeros(shape, np.int32))


def test_sampling_arrays():
    loop = Loop()
    params = SamplingParams(temperature=1e-6, top_k=-1, top_p=0.5, min_p=0.25, min_tokens=2)
    loop.add(params=params, seed=2**32 - 1, stop_ids=(4, 5))
    loop.add(params=SamplingParams(temperature=0.5, top_k=2**40))
    plan = loop.one()
    assert plan.temperature_B.tolist() == [0, 0.5] and plan.top_k_B.tolist() == [0, 2**31 - 1]
    assert plan.top_p_B.tolist() == [0.5, 1] and plan.min_p_B.tolist() == [0.25, 0]
    assert plan.seed_B.tolist() == [2**32 - 1, 1] and plan.stop_ids_B[0].tolist() == [4, 5] + [-1] * 14
    assert plan.min_len_B.tolist() == [5, 3] and plan.max_len_B.tolist() == [8, 8]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"prompt": 0}, "prompt is empty, it must be at least one token"),
        ({"new": 0}, "prompt is 3 tokens, it must be shorter than max_len"),
        ({"max_len": 49}, "max_len is 49, it must be at most max_model_len"),
        ({"max_len": 41}, "max_len is 41, it must be at most 40, the tokens that the KV pages hold"),
        ({"stop_ids": (1,) * 17}, "stop_ids is .* at most 16"),
        ({"stop_ids": (-1,)}, "stop_ids is .* ids of the vocabulary"),
        ({"seed": -1}, "seed is -1"),
        ({"priority": 10**400}, "priority is 10"),
    ],
)
def test_a_request_that_can_never_run_is_refused(fields, message):
    loop = Loop(pages=20, page_size=2)
    with pytest.raises(ValueError, match=message):
        loop.add(**fields)
    assert not loop.scheduler.has_work


def test_a_request_that_fits_only_several_ranks_together_is_refused():
    loop = Loop(ranks=8, pages=4, page_size=2)
    with pytest.raises(ValueError, match="max_len is 9, it must be at most 8, the tokens that the KV pages hold"):
        loop.add(max_len=9)


def test_ids_outside_the_vocabulary_are_refused():
    for ids in ([1, FROM_SLOT], [2**31]):
        with pytest.raises(ValueError, match="prompt is ids"):
            Loop().scheduler.add(Request(id="a", prompt=ids, params=SamplingParams(), max_len=9))


@pytest.mark.parametrize("sizes", [[], [(9, 2, 3), (8, 2, 3)], [(9, 2, 3), (9, 4, 3)], [(9, 2, 3), (9, 2, 4)]])
def test_ranks_have_the_same_sizes(sizes):
    with pytest.raises(ValueError, match=r"blocks is of sizes .* all of the same sizes"):
        Scheduler(Loop().config, [Blocks(*each) for each in sizes])


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 3),
        ("max_model_len", 1),
        ("max_queue", 0),
        ("decode_window", 0),
        ("patience_s", -1.0),
        ("token_buckets", (8,)),
        ("token_buckets", (16, 4)),
        ("seq_buckets", ()),
        ("seq_buckets", (1, 3)),
    ],
)
def test_config_is_checked(field, value):
    with pytest.raises(ValueError, match=f"{field} is .*it must be"):
        Loop(**{field: value})
