# SPDX-License-Identifier: Apache-2.0
"""Scheduler: which tokens of which requests the next step computes. Policy over ints in, numpy out.

Not here: the device, text, HTTP, and which page is free (`blocks.py`).

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
from collections.abc import Callable

import numpy as np

from qwen_spmd.serve.blocks import Blocks
from qwen_spmd.serve.request import MAX_STOP_IDS, FinishReason, Request, Status

FROM_SLOT = -1
"""In `StepPlan.tokens_T`: the token last sampled in the row's slot. As in `state.py`, which this cannot import."""

INT32_MAX = 2**31 - 1
NO_STOPS = (-1,) * MAX_STOP_IDS

LANE: dict[str, tuple[type, int | tuple[int, ...], Callable[[Request], int | float | tuple[int, ...]]]] = {
    "read_slot_B": (np.int32, 0, lambda r: r.slot),
    "temperature_B": (np.float32, 0, lambda r: r.params.temperature if r.params.temperature >= 1e-5 else 0),
    "top_k_B": (np.int32, 0, lambda r: min(max(r.params.top_k, 0), INT32_MAX)),
    "top_p_B": (np.float32, 1, lambda r: r.params.top_p),
    "min_p_B": (np.float32, 0, lambda r: r.params.min_p),
    "seed_B": (np.uint32, 0, lambda r: r.seed),
    "stop_ids_B": (np.int32, NO_STOPS, lambda r: r.stop_ids + NO_STOPS[len(r.stop_ids) :]),
    "min_len_B": (np.int32, 0, lambda r: min(len(r.prompt) + r.params.min_tokens, r.max_len)),
    "max_len_B": (np.int32, 0, lambda r: r.max_len),
}
"""The arrays of a step that stay the same while a request runs: dtype, padding's value, a request's value."""


class QueueFull(RuntimeError):
    """Too many requests wait; the caller should try again later."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits and sizes. Checked when made: ValueError names the field.

    max_num_seqs            requests running at once
    max_num_batched_tokens  tokens in one step
    max_model_len           longest prompt + output
    max_queue               requests waiting; one more is refused
    decode_window           most iterations of a decode window
    token_buckets           sizes that a step's tokens are padded to, ascending
    seq_buckets             sizes that a step's sequences are padded to, ascending
    patience_s              seconds of waiting that outweigh one level of priority: requests are served in order of
                            arrival + priority * patience_s, so one of priority 1 goes before those of priority 0 that
                            came patience_s later. The key never changes and time moves on, so only so many requests
                            ever come before a given one: nobody starves. 0 is first come, first served
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    token_buckets: tuple[int, ...]
    seq_buckets: tuple[int, ...]
    max_queue: int = 1024
    decode_window: int = 16
    patience_s: float = 30.0

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, allowed: str) -> None:
            _check(name, getattr(self, name), ok, allowed)

        for name in ("max_num_seqs", "max_num_batched_tokens", "max_queue", "decode_window"):
            check(name, getattr(self, name) >= 1, "at least 1")
        check("max_model_len", self.max_model_len >= 2, "at least 2")
        # A step must have room for one token of every running request.
        seqs = self.max_num_seqs
        check("max_num_batched_tokens", self.max_num_batched_tokens >= seqs, f"at least max_num_seqs ({seqs})")
        check("patience_s", 0 <= self.patience_s < float("inf"), "finite and at least 0")
        for name, cover in (("token_buckets", "max_num_batched_tokens"), ("seq_buckets", "max_num_seqs")):
            buckets, most = getattr(self, name), getattr(self, cover)
            check(name, len(buckets) > 0 and buckets[0] >= 1, "positive sizes")
            check(name, list(buckets) == sorted(set(buckets)), "ascending")
            check(name, buckets[-1] >= most, f"at least {cover} ({most}) at the end")


@dataclasses.dataclass(slots=True, kw_only=True)
class StepPlan:
    """One step. The arrays are those of `state.Batch` and `state.Sampling`, padded to buckets and never written again.

    iterations  0: a ragged step. n: a decode window of up to n iterations, where every row is one decode token
    rows        the requests, in the order of the arrays
    emits       the tokens that each row adds to its request's output if nothing ends
    """

    iterations: int
    rows: list[Request]
    emits: list[int]

    tokens_T: np.ndarray
    q_start_B: np.ndarray
    kv_len_B: np.ndarray
    pages_BP: np.ndarray
    read_slot_B: np.ndarray
    write_slot_B: np.ndarray
    fresh_B: np.ndarray
    emit_B: np.ndarray
    temperature_B: np.ndarray
    top_k_B: np.ndarray
    top_p_B: np.ndarray
    min_p_B: np.ndarray
    seed_B: np.ndarray
    stop_ids_B: np.ndarray
    min_len_B: np.ndarray
    max_len_B: np.ndarray


@dataclasses.dataclass(slots=True)
class Output:
    """What a commit added to a request's output, and why it ended if it did."""

    request: Request
    tokens: list[int]
    finish_reason: FinishReason | None = None


class Scheduler:
    """Continuous batching. A step takes a token of each decoding request, then chunks of prompts, then new requests.

    Requests are served in the order that `SchedulerConfig.patience_s` gives. If the first that waits does not fit, no
    other passes it. If one that runs lacks a page, the last that run give theirs up and are computed again later. That
    changes no token: a token depends on seed and position only.
    """

    def __init__(self, config: SchedulerConfig, blocks: Blocks) -> None:
        self.config, self.blocks = config, blocks
        self.preemptions = 0
        self.scheduled_tokens = 0
        self.padding_tokens = 0
        self.generated_tokens = 0
        self.finished: collections.Counter[FinishReason] = collections.Counter()
        # All in order of `_key`. A request is prefilling until the last of its known tokens is planned.
        self._waiting: list[Request] = []
        self._prefilling: list[Request] = []
        self._decoding: list[Request] = []
        # A row ("lane") for each running request, so that a step's arrays are one gather. The last one is padding's.
        self._free_lanes = list(range(config.max_num_seqs))[::-1]
        lanes, pages = config.max_num_seqs + 1, blocks.pages_for(config.max_model_len)
        self._lanes = {"pages_BP": np.zeros((lanes, pages), np.int32)}
        self._lanes |= {name: np.array([padding] * lanes, dtype) for name, (dtype, padding, _) in LANE.items()}
        # The last gather, and whether a lane got pages since.
        self._rows: list[Request] = []
        self._index_B = np.zeros(0, np.int64)
        self._arrays: dict[str, np.ndarray] = {}
        self._grown = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._prefilling or self._decoding)

    def add(self, request: Request) -> None:
        """Queue a request. ValueError if it can never run, QueueFull if it cannot wait."""
        r, most = request, self.config.max_model_len
        low, high = min(r.prompt, default=0), max(r.prompt, default=0)
        room = (self.blocks.num_pages - 1) * self.blocks.page_size
        _check("prompt", "empty", len(r.prompt) > 0, "at least one token")
        _check("prompt", f"ids {low} to {high}", low >= 0 and high <= INT32_MAX, "ids of the vocabulary")
        _check("prompt", f"{len(r.prompt)} tokens", len(r.prompt) < r.max_len, f"shorter than max_len ({r.max_len})")
        _check("max_len", r.max_len, r.max_len <= most, f"at most max_model_len ({most})")
        _check("max_len", r.max_len, r.max_len <= room, f"at most {room}, the tokens that the KV pages hold")
        _check("stop_ids", r.stop_ids, len(r.stop_ids) <= MAX_STOP_IDS, f"at most {MAX_STOP_IDS} ids")
        _check("stop_ids", r.stop_ids, all(0 <= i <= INT32_MAX for i in r.stop_ids), "ids of the vocabulary")
        _check("priority", r.priority, abs(r.priority) <= INT32_MAX, "a 32-bit integer")
        _check("seed", r.seed, 0 <= r.seed < 2**32, "an unsigned 32-bit integer")
        if len(self._waiting) >= self.config.max_queue:
            raise QueueFull(f"{len(self._waiting)} requests wait, as many as max_queue allows; try again later")
        bisect.insort(self._waiting, r, key=self._key)

    def abort(self, request: Request, reason: FinishReason = "abort") -> None:
        """End a request now and free what it holds, wherever it is. Nothing if it has ended already.

        Its tokens in flight are dropped when they come.
        """
        if request.status is not Status.FINISHED:
            self._finish(request, reason)

    def schedule(self) -> StepPlan | None:
        """Plan the next step. None if there is nothing to do before the step in flight is committed."""
        preemptions = self.preemptions
        decode, iterations = self._decode()
        # Who just lost its pages to others would only take them back.
        admit = self.preemptions == preemptions
        chunks = self._prefill(self.config.max_num_batched_tokens - len(decode), admit)
        if chunks:
            return self._ragged(decode, chunks)
        return self._window(decode, iterations) if decode else None

    def commit(self, plan: StepPlan, tokens: np.ndarray) -> list[Output]:
        """Take a step's sampled ids, [B] or [B, iterations or more]; -1 where a row had ended. The oldest step first.

        Pages and slots of a request that ends are free at once, though the next step, in flight, may still have a row
        for it: the device runs steps in order, and whoever gets them next writes in a step after that one.
        """
        outputs, live, now = [], len(plan.rows), time.monotonic()
        tokens_BN = tokens.reshape(len(tokens), -1)[:live]
        if len(tokens_BN) < live or tokens_BN.shape[1] < max(plan.emits):
            raise ValueError(f"tokens is {tokens.shape}, it must be at least {(live, max(plan.emits))}")
        # Most rows just go on: find the others for all rows at once.
        stops_B = (tokens_BN[:, :, None] == plan.stop_ids_B[:live, None, :]).any((1, 2)) | (tokens_BN < 0).any(1)
        for r, emits, ids, stops in zip(plan.rows, plan.emits, tokens_BN.tolist(), stops_B.tolist()):
            if r.finish_reason or not emits:
                continue
            r.in_flight -= emits
            ids, reason = self._cut(r, ids[:emits]) if stops else (ids[:emits], None)
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

    @staticmethod
    def _cut(request: Request, ids: list[int]) -> tuple[list[int], FinishReason | None]:
        """`ids` up to the first that ends the request, itself included."""
        fixed = request.params.min_tokens - len(request.output)  # so many more cannot end it
        for i, token in enumerate(ids):
            if token < 0:
                return ids[:i], "error"  # the device ended it, by our rules it goes on: where it stands is unknown
            if token in request.stop_ids and i >= fixed:
                return ids[: i + 1], "stop"
        return ids, None

    def _key(self, request: Request) -> tuple[float, str]:
        return request.arrival + request.priority * self.config.patience_s, request.id

    # The parts of `schedule`.

    def _decode(self) -> tuple[list[Request], int]:
        """The requests that decode in this step and for how many iterations, with the pages that this takes."""
        # Without the ones that the steps in flight take to max_len.
        rows = [r for r in self._decoding if r.computed + 1 < r.max_len]
        n = min(1, len(rows))
        if rows and not self._waiting and not self._prefilling:
            n = min(self.config.decode_window, max(r.max_len - 1 - r.computed for r in rows))
        while True:
            size = self.blocks.page_size
            # A row computes up to n more tokens, and never the last one of max_len.
            grow = [(r, min(r.computed + n, r.max_len - 1)) for r in rows if r.computed + n > len(r.pages) * size]
            if sum(self.blocks.pages_for(t) - len(r.pages) for r, t in grow) <= self.blocks.free_pages:
                break
            if n > 1:
                n //= 2
                continue
            self._preempt()
            rows = [r for r in rows if r.status is Status.RUNNING]
        for r, t in grow:
            held = len(r.pages)
            self.blocks.grow(r, t)
            self._lanes["pages_BP"][r.lane, held : len(r.pages)] = r.pages[held:]
            self._grown = True
        return rows, n

    def _prefill(self, budget: int, admit: bool) -> list[tuple[Request, int]]:
        """Chunks of known tokens, together at most `budget`, of requests that run and then of those that wait."""
        chunks: list[tuple[Request, int]] = []
        for r in self._prefilling:
            if not budget:
                break
            chunks.append((r, min(r.length - r.computed, budget)))
            budget -= chunks[-1][1]
        while admit and budget and self._waiting and self._seat(self._waiting[0]):
            r = self._waiting.pop(0)
            bisect.insort(self._prefilling, r, key=self._key)
            chunks.append((r, min(r.length, budget)))
            budget -= chunks[-1][1]
        # Sequences of one token come first in a batch, whatever they are.
        return sorted(chunks, key=lambda chunk: chunk[1] > 1)

    def _ragged(self, decode: list[Request], chunks: list[tuple[Request, int]]) -> StepPlan:
        """One token of each of `decode`, then the chunks."""
        rows, first = decode + [r for r, _ in chunks], len(decode)
        arrays = self._gather(rows)
        for r in decode:
            r.computed += 1
            r.in_flight += 1
        counts = [1] * first + [n for _, n in chunks]
        total = sum(counts)
        tokens_T = np.zeros(_bucket(self.config.token_buckets, total), np.int32)
        tokens_T[:first] = FROM_SLOT
        q_start_B = np.full_like(arrays["q_start_B"], total)
        q_start_B[: len(rows)] = np.cumsum(counts) - counts
        fresh_B, emit_B = arrays["fresh_B"].copy(), arrays["emit_B"].copy()
        emits = [1] * len(rows)
        for b, (r, n) in enumerate(chunks, first):
            start, end, prompt = r.computed, r.computed + n, len(r.prompt)
            known = r.prompt[start:end] + r.output[max(start - prompt, 0) : max(end - prompt, 0)]
            tokens_T[q_start_B[b] : q_start_B[b + 1]] = known
            fresh_B[b] = start == 0
            r.computed = end
            if end == r.length:
                r.in_flight = 1
                self._prefilling.remove(r)
                bisect.insort(self._decoding, r, key=self._key)
            else:
                emits[b] = 0
        emit_B[: len(rows)] = emits
        self.scheduled_tokens += total
        self.padding_tokens += len(tokens_T) - total
        return StepPlan(
            iterations=0,
            rows=rows,
            emits=emits,
            kv_len_B=self._kv_len(0),
            **arrays | {"tokens_T": tokens_T, "q_start_B": q_start_B, "fresh_B": fresh_B, "emit_B": emit_B},
        )

    def _window(self, rows: list[Request], n: int) -> StepPlan:
        """Up to `n` tokens of each row."""
        arrays = self._gather(rows)
        kv_len_B = self._kv_len(1)
        emits = np.minimum(arrays["max_len_B"] - kv_len_B, n)[: len(rows)].tolist()
        for r, count in zip(rows, emits):
            r.computed += count
            r.in_flight += count
        total = sum(emits)
        self.scheduled_tokens += total
        self.padding_tokens += len(kv_len_B) * n - total
        return StepPlan(iterations=n, rows=rows, emits=emits, kv_len_B=kv_len_B, **arrays)

    def _gather(self, rows: list[Request]) -> dict[str, np.ndarray]:
        """The arrays of a step with these rows, but for `kv_len_B`, as if each decoded one token.

        While the rows stay the same these are the same objects, so a caller may keep what it made of them.
        """
        if rows != self._rows:
            B = _bucket(self.config.seq_buckets, len(rows))
            self._rows, self._index_B = rows, np.full(B, self.config.max_num_seqs)
            self._index_B[: len(rows)] = [r.lane for r in rows]
            self._arrays = {name: lanes[self._index_B] for name, lanes in self._lanes.items()}
            self._arrays |= {
                "tokens_T": np.where(np.arange(B) < len(rows), np.int32(FROM_SLOT), np.int32(0)),
                "q_start_B": np.minimum(np.arange(B + 1, dtype=np.int32), len(rows)),
                "write_slot_B": self._arrays["read_slot_B"],
                "fresh_B": np.zeros(B, np.bool_),
                "emit_B": np.arange(B) < len(rows),
            }
        elif self._grown:
            self._arrays["pages_BP"] = self._lanes["pages_BP"][self._index_B]
        self._grown = False
        return self._arrays

    def _kv_len(self, ahead: int) -> np.ndarray:
        """`computed` of the gathered rows plus `ahead`, 0 for padding."""
        kv_len_B = np.zeros(len(self._index_B), np.int32)
        kv_len_B[: len(self._rows)] = [r.computed for r in self._rows]
        kv_len_B[: len(self._rows)] += ahead
        return kv_len_B

    # The moves of a request.

    def _seat(self, request: Request) -> bool:
        """Make a waiting request a running one if all it needs for its known tokens and one more is free."""
        r, lanes = request, self._lanes
        # Tokens in flight are part of the text it has to start from.
        if r.in_flight or not self._free_lanes or not self.blocks.free_slots:
            return False
        if not self.blocks.grow(r, r.length + 1):
            return False
        self.blocks.take_slot(r)
        r.status, r.lane = Status.RUNNING, self._free_lanes.pop()
        if r.first_scheduled is None:
            r.first_scheduled = time.monotonic()
        lanes["pages_BP"][r.lane] = 0
        lanes["pages_BP"][r.lane, : len(r.pages)] = r.pages
        for name, (_, _, value) in LANE.items():
            lanes[name][r.lane] = value(r)
        self._rows = []  # the last gather may have another lane of the same request
        return True

    def _preempt(self) -> None:
        """Make the running request that is last in order a waiting one that has nothing computed."""
        r = max((requests[-1] for requests in (self._prefilling, self._decoding) if requests), key=self._key)
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
        for requests in (self._waiting,) if request.lane < 0 else (self._prefilling, self._decoding):
            if request in requests:
                requests.remove(request)
        if request.lane >= 0:
            self._free_lanes.append(request.lane)
            request.lane = -1
        self.blocks.release(request)


def _bucket(sizes: tuple[int, ...], count: int) -> int:
    return sizes[bisect.bisect_left(sizes, count)]


def _check(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {value}, it must be {allowed}")
