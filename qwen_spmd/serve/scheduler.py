# SPDX-License-Identifier: Apache-2.0
"""Scheduler: which tokens of which requests the next step computes, on which rank. Policy over ints in, numpy out.

Not here: the device, text, HTTP, which page is free (`blocks.py`), how work is measured (`work.py`), and a step's
arrays (`lanes.py`).

One step is always in flight: step n+1 is scheduled before step n is committed. So `schedule` counts a step's tokens as
done, as if nothing ended, and `commit` puts that right once the sampled ids arrive. Meanwhile the ids stay on the
device, and a decode row takes its token from its slot. The device too sees where a request ends (stop id or length);
from then on its rows give -1, so a step that was planned too far is harmless.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import time
from collections.abc import Sequence
from itertools import chain

import numpy as np

from qwen_spmd.serve.blocks import Blocks
from qwen_spmd.serve.lanes import Lanes, StepPlan
from qwen_spmd.serve.request import FinishReason, Request, Status
from qwen_spmd.serve.scheduler_config import SchedulerConfig
from qwen_spmd.serve.work import prefill_work, rank_work


class QueueFull(RuntimeError):
    """Too many requests wait; the caller should try again later."""


@dataclasses.dataclass(slots=True)
class Output:
    """What a commit added to a request's output, and why it ended if it did."""

    request: Request
    tokens: list[int]
    finish_reason: FinishReason | None = None


class Scheduler:
    """Continuous batching. A step takes a token of each decoding request, then chunks of prompts, then new requests.

    A step is the same program on every rank, each with rows of its own. Requests wait in one queue, in the order that
    `SchedulerConfig.patience_s` gives, and belong to no rank until they run. The first goes to the rank with the least
    work among those where it fits; if it fits nowhere, no other passes it. If one that runs lacks a page, the last that
    run on its rank give theirs up and are computed again, on any rank. That changes no token: a token depends on seed
    and position only.

    rank_tokens  tokens scheduled so far, by rank
    """

    def __init__(self, config: SchedulerConfig, blocks: Sequence[Blocks]) -> None:
        sizes = [(b.num_pages, b.page_size, b.num_slots) for b in blocks]
        if len(set(sizes)) != 1:
            raise ValueError(f"blocks is of sizes {sizes}, it must be one for each rank, all of the same sizes")
        self.config, self.blocks = config, list(blocks)
        self.preemptions = 0
        self.padding_tokens = 0
        self.generated_tokens = 0
        self.finished: collections.Counter[FinishReason] = collections.Counter()
        self.rank_tokens = [0] * len(blocks)
        self._imbalance, self._steps = 0.0, 0
        # All in order of `_key`. A request is prefilling until the last of its known tokens is planned.
        self._waiting: list[Request] = []
        self._prefilling: list[list[Request]] = [[] for _ in blocks]
        self._decoding: list[list[Request]] = [[] for _ in blocks]
        self._lanes = Lanes(
            ranks=len(blocks),
            count=config.max_num_seqs,
            pages=blocks[0].pages_for(config.max_model_len),
            buckets=config.seq_buckets,
        )

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return sum(self.running_by_rank)

    @property
    def running_by_rank(self) -> list[int]:
        """Running requests by rank."""
        return [len(p) + len(d) for p, d in zip(self._prefilling, self._decoding)]

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or any(self._prefilling) or any(self._decoding))

    @property
    def scheduled_tokens(self) -> int:
        return sum(self.rank_tokens)

    @property
    def imbalance(self) -> float:
        """Mean over steps of the most tokens that a rank had over the mean of all: 1 is even, also before any step."""
        return self._imbalance / self._steps if self._steps else 1.0

    def add(self, request: Request) -> None:
        """Queue a request. ValueError if it can never run on one rank, QueueFull if it cannot wait."""
        blocks = self.blocks[0]
        self.config.check(request, (blocks.num_pages - 1) * blocks.page_size)
        if len(self._waiting) >= self.config.max_queue:
            raise QueueFull(f"{len(self._waiting)} requests wait, as many as max_queue allows; try again later")
        bisect.insort(self._waiting, request, key=self._key)

    def abort(self, request: Request, reason: FinishReason = "abort") -> None:
        """End a request now and free what it holds, wherever it is. Nothing if it has ended already.

        Its tokens in flight are dropped when they come.
        """
        if request.status is not Status.FINISHED:
            self._finish(request, reason)

    def schedule(self) -> StepPlan | None:
        """Plan the next step. None if there is nothing to do before the step in flight is committed."""
        decode, iterations, lost = self._decode()
        chunks = self._prefill([self.config.max_num_batched_tokens - len(rows) for rows in decode], lost)
        if any(chunks):
            return self._ragged(decode, chunks)
        return self._window(decode, iterations) if any(decode) else None

    def commit(self, plan: StepPlan, tokens: np.ndarray) -> list[Output]:
        """Take a step's sampled ids, [ranks, B, iterations or more]; -1 where a row had ended. The oldest step first.

        Pages and slots of a request that ends are free at once, though the next step, in flight, may still have a row
        for it: the device runs steps in order, and whoever gets them next writes in a step after that one.
        """
        now, outputs, shape = time.monotonic(), [], (*plan.kv_len_B.shape, max(chain.from_iterable(plan.emits)))
        if tokens.ndim != 3 or tokens.shape[:2] != shape[:2] or tokens.shape[2] < shape[2]:
            raise ValueError(f"tokens is {tokens.shape}, it must be {shape} or longer")
        # Most rows just go on: find the others for all rows at once.
        live = np.flatnonzero(plan.kv_len_B)
        tokens_BN, stop_ids_B = (x.reshape(-1, x.shape[2]).take(live, 0) for x in (tokens, plan.stop_ids_B))
        stops_B = (tokens_BN[:, :, None] == stop_ids_B[:, None, :]).any((1, 2)) | (tokens_BN < 0).any(1)
        rows, emits_B = chain.from_iterable(plan.rows), chain.from_iterable(plan.emits)
        for r, emits, ids, stops in zip(rows, emits_B, tokens_BN.tolist(), stops_B.tolist()):
            if r.finish_reason or not emits:
                continue
            r.in_flight -= emits
            del ids[emits:]
            ids, reason = r.cut(ids) if stops else (ids, None)
            r.output += ids
            if r.first_token is None:
                r.first_token = now
            if reason is None and len(r.prompt) + len(r.output) >= r.max_len:
                reason = "length"
            if reason is not None:
                self._finish(r, reason)
            self.generated_tokens += len(ids)
            outputs.append(Output(r, ids, reason))
        return outputs

    def _key(self, request: Request) -> tuple[float, str]:
        return request.arrival + request.priority * self.config.patience_s, request.id

    # The parts of `schedule`. Lists are by rank.

    def _decode(self) -> tuple[list[list[Request]], int, set[int]]:
        """The requests that decode in this step and for how many iterations, with the pages that this takes.

        The set is the ranks where requests gave up theirs for it.
        """
        # Without the ones that the steps in flight take to max_len.
        rows = [[r for r in decoding if r.computed + 1 < r.max_len] for decoding in self._decoding]
        n, size = int(any(rows)), self.blocks[0].page_size
        lost: set[int] = set()
        if n and not self._waiting and not any(self._prefilling):
            n = min(self.config.decode_window, max([r.max_len - r.computed for r in chain.from_iterable(rows)]) - 1)
        while True:
            # A row computes up to n more tokens, and never the last one of max_len.
            grow = [
                (r, min(r.computed + n, r.max_len - 1))
                for r in chain.from_iterable(rows)
                if r.computed + n > len(r.pages) * size
            ]
            left = [blocks.free_pages for blocks in self.blocks]
            for r, t in grow:
                left[r.rank] -= self.blocks[r.rank].pages_for(t) - len(r.pages)
            if min(left) >= 0:
                break
            if n > 1:
                n //= 2
                continue
            rank = left.index(min(left))
            self._preempt(rank)
            lost.add(rank)
            rows[rank] = [r for r in rows[rank] if r.status is Status.RUNNING]
        for r, t in grow:
            held = len(r.pages)
            self.blocks[r.rank].grow(r, t)
            self._lanes.grow(r, held)
        return rows, n, lost

    def _prefill(self, budgets: list[int], lost: set[int]) -> list[list[tuple[Request, int]]]:
        """Chunks of known tokens within the budgets, of requests that run and then of those that wait."""
        chunks: list[list[tuple[Request, int]]] = [[] for _ in budgets]

        def chunk(r: Request) -> None:
            n = min(r.length - r.computed, budgets[r.rank])
            chunks[r.rank].append((r, n))
            budgets[r.rank] -= n

        for r in chain.from_iterable(self._prefilling):
            if budgets[r.rank]:
                chunk(r)
        # Who just lost its pages to others would only take them back.
        ranks = [rank for rank in range(len(budgets)) if rank not in lost]
        work: list[int] = []
        while self._waiting and (rank := self._place(self._waiting[0], ranks, budgets, work)) is not None:
            r = self._waiting.pop(0)
            self._seat(r, rank)
            chunk(r)
            if work:
                work[rank] += prefill_work(r)
        # Sequences of one token come first in a batch, whatever they are.
        return [sorted(of_rank, key=lambda chunk: chunk[1] > 1) for of_rank in chunks]

    def _place(self, request: Request, ranks: list[int], budgets: list[int], work: list[int]) -> int | None:
        """The one of `ranks` for a waiting request: that with the least work, of those with all it needs to start.

        That is pages for its known tokens and one more, a slot, a lane and a token of the budget. Between ranks with
        the same work, pages and slots in use decide. `work` is empty until it is first needed.
        """
        # Tokens in flight are part of the text it has to start from.
        if request.in_flight:
            return None
        blocks, pages = self.blocks, self.blocks[0].pages_for(request.length + 1)
        fits = [
            k
            for k in ranks
            if budgets[k] and self._lanes.free(k) and blocks[k].free_slots and blocks[k].free_pages >= pages
        ]
        if len(fits) < 2:
            return fits[0] if fits else None
        if not work:
            work.extend(map(rank_work, self._prefilling, self._decoding))
        return min(fits, key=lambda k: (work[k], -blocks[k].free_pages, -blocks[k].free_slots))

    def _ragged(self, decode: list[list[Request]], chunks: list[list[tuple[Request, int]]]) -> StepPlan:
        """One token of each of `decode`, then the chunks."""
        rows = [of_rank + [r for r, _ in after] for of_rank, after in zip(decode, chunks)]
        emits = [[1] * len(of_rank) for of_rank in rows]
        known: list[list[list[int]]] = [[] for _ in rows]
        for r in chain.from_iterable(decode):
            r.computed += 1
            r.in_flight += 1
        for rank, after in enumerate(chunks):
            for b, (r, n) in enumerate(after, len(decode[rank])):
                known[rank].append(r.known(r.computed, r.computed + n))
                r.computed += n
                if r.computed == r.length:
                    r.in_flight = 1
                    self._prefilling[rank].remove(r)
                    bisect.insort(self._decoding[rank], r, key=self._key)
                else:
                    emits[rank][b] = 0
        plan = self._lanes.ragged(rows, known, emits, self.config.token_buckets)
        self._count(plan.q_start_B[:, -1].tolist(), plan.tokens_T.size)
        return plan

    def _window(self, rows: list[list[Request]], n: int) -> StepPlan:
        """Up to `n` tokens of each row."""
        plan = self._lanes.window(rows, n)
        for r, count in zip(chain.from_iterable(rows), chain.from_iterable(plan.emits)):
            r.computed += count
            r.in_flight += count
        self._count([sum(of_rank) for of_rank in plan.emits], plan.kv_len_B.size * n)
        return plan

    def _count(self, totals: list[int], room: int) -> None:
        """Note a step of `totals` tokens by rank, in arrays that have room for so many in all."""
        total = sum(totals)
        self.rank_tokens = [sum(each) for each in zip(self.rank_tokens, totals)]
        self.padding_tokens += room - total
        self._imbalance += max(totals) * len(totals) / total
        self._steps += 1

    # The moves of a request.

    def _seat(self, request: Request, rank: int) -> None:
        """Make a waiting request a running one of `rank`, where it fits."""
        r, blocks = request, self.blocks[rank]
        blocks.grow(r, r.length + 1)
        blocks.take_slot(r)
        r.status, r.rank = Status.RUNNING, rank
        if r.first_scheduled is None:
            r.first_scheduled = time.monotonic()
        self._lanes.take(r)
        bisect.insort(self._prefilling[rank], r, key=self._key)

    def _preempt(self, rank: int) -> None:
        """Make the running request that is last in order on the rank a waiting one that has nothing computed."""
        r = max((of_kind[rank][-1] for of_kind in (self._prefilling, self._decoding) if of_kind[rank]), key=self._key)
        self._leave(r)
        r.status, r.computed = Status.WAITING, 0
        r.preemptions += 1
        self.preemptions += 1
        bisect.insort(self._waiting, r, key=self._key)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self._leave(request)
        request.status, request.finish_reason, request.finished = Status.FINISHED, reason, time.monotonic()
        self.finished[reason] += 1

    def _leave(self, request: Request) -> None:
        """Out of the list that it is in, with nothing held."""
        rank = request.rank
        for requests in (self._waiting,) if rank < 0 else (self._prefilling[rank], self._decoding[rank]):
            if request in requests:
                requests.remove(request)
        if rank >= 0:
            self._lanes.give(request)
            self.blocks[rank].release(request)
            request.rank = -1
