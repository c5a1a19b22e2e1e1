# SPDX-License-Identifier: Apache-2.0
"""StepPlan, the arrays of one step, and Lanes, the table of all running requests that most of them are gathered from.

Not here: which requests a step has and how many tokens of each (`scheduler.py`).
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable
from itertools import chain

import numpy as np

from qwen_spmd.limits import FROM_SLOT, INT32_MAX, MAX_STOP_IDS
from qwen_spmd.serve.request import Request

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


@dataclasses.dataclass(slots=True, kw_only=True)
class StepPlan:
    """One step of all ranks. The arrays are never written again.

    They are those of `state.Batch` and `state.Sampling` with an axis of ranks before all others: tokens_T is
    [ranks, T], pages_BP is [ranks, B, P]. T and B are the buckets of the rank that needs most. Pages and slots are
    numbered within their rank. A rank without rows is all padding, with nothing but zeros in q_start_B and kv_len_B.

    iterations  0: a ragged step. n: a decode window of up to n iterations, where every row is one decode token
    rows        the requests of each rank, in the order of the arrays
    emits       the tokens that each row adds to its request's output if nothing ends, by rank like `rows`
    """

    iterations: int
    rows: list[list[Request]]
    emits: list[list[int]]

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


class Lanes:
    """A lane for each request that can run: `count` on each of `ranks`, with up to `pages` pages a request.

    `Request.lane` counts through all ranks, so that one gather serves them all; the lane after the last is padding's.
    """

    def __init__(self, *, ranks: int, count: int, pages: int, buckets: tuple[int, ...]) -> None:
        self._buckets, self._padding = buckets, ranks * count
        self._free = [list(range(k * count, (k + 1) * count))[::-1] for k in range(ranks)]
        self._table = {"pages_BP": np.zeros((self._padding + 1, pages), np.int32)}
        for name, (dtype, padding, _) in LANE.items():
            self._table[name] = np.array([padding] * (self._padding + 1), dtype)
        # The last gather, and whether a lane got pages since.
        self._rows: list[list[Request]] = []
        self._index_B = np.zeros((ranks, 0), np.int64)
        self._live_B = np.zeros((ranks, 0), np.bool_)
        self._arrays: dict[str, np.ndarray] = {}
        self._grown = False

    def free(self, rank: int) -> int:
        return len(self._free[rank])

    def take(self, request: Request) -> None:
        """A lane of `request.rank`, which has a free one, for the request with its pages and slot."""
        request.lane = self._free[request.rank].pop()
        self._table["pages_BP"][request.lane] = 0
        self.grow(request, 0)
        for name, (_, _, value) in LANE.items():
            self._table[name][request.lane] = value(request)
        self._rows = []  # the last gather may have another lane of the same request

    def grow(self, request: Request, held: int) -> None:
        """Note the request's pages after the first `held`."""
        self._table["pages_BP"][request.lane, held : len(request.pages)] = request.pages[held:]
        self._grown = True

    def give(self, request: Request) -> None:
        """Take the request's lane back."""
        self._free[request.rank].append(request.lane)
        request.lane = -1

    def ragged(
        self, rows: list[list[Request]], chunks: list[list[list[int]]], emits: list[list[int]], sizes: tuple[int, ...]
    ) -> StepPlan:
        """The ragged step of these rows, whose last ones on each rank take the chunks of tokens, the others one token.

        `Request.computed` is what it is after the step. `sizes` are those that a rank's tokens are padded to.
        """
        arrays = self._gather(rows)
        totals = [len(of_rank) + sum(map(len, ids)) - len(ids) for of_rank, ids in zip(rows, chunks)]
        tokens_T = np.zeros((len(rows), _bucket(sizes, max(totals))), np.int32)
        fresh_B, emit_B = arrays["fresh_B"].copy(), arrays["emit_B"].copy()
        q_len_B = emit_B.astype(np.int32)
        for rank, (of_rank, known) in enumerate(zip(rows, chunks)):
            at = first = len(of_rank) - len(known)
            tokens_T[rank, :first] = FROM_SLOT
            for b, ids in enumerate(known, first):
                tokens_T[rank, at : at + len(ids)] = ids
                at += len(ids)
                q_len_B[rank, b] = len(ids)
                fresh_B[rank, b] = of_rank[b].computed == len(ids)
                emit_B[rank, b] = emits[rank][b] > 0
        q_start_B = np.zeros_like(arrays["q_start_B"])
        np.cumsum(q_len_B, 1, out=q_start_B[:, 1:])
        arrays = arrays | {"tokens_T": tokens_T, "q_start_B": q_start_B, "fresh_B": fresh_B, "emit_B": emit_B}
        return StepPlan(iterations=0, rows=rows, emits=emits, kv_len_B=self._kv_len(), **arrays)

    def window(self, rows: list[list[Request]], n: int) -> StepPlan:
        """The decode window of these rows. `Request.computed` is what it is before the step."""
        arrays = self._gather(rows)
        kv_len_B = self._kv_len() + arrays["emit_B"]
        emits_B = np.minimum(arrays["max_len_B"] - kv_len_B, n).tolist()
        emits = [of_rank[: len(live)] for of_rank, live in zip(emits_B, rows)]
        return StepPlan(iterations=n, rows=rows, emits=emits, kv_len_B=kv_len_B, **arrays)

    def _gather(self, rows: list[list[Request]]) -> dict[str, np.ndarray]:
        """The arrays of a step with these rows, but for `kv_len_B`, as if each decoded one token.

        While the rows stay the same these are the same objects, so a caller may keep what it made of them.
        """
        if rows != self._rows:
            counts = np.array([[len(of_rank)] for of_rank in rows], np.int32)
            B = _bucket(self._buckets, int(counts.max()))
            live_B = np.arange(B) < counts
            self._rows, self._live_B, self._index_B = rows, live_B, np.full(live_B.shape, self._padding)
            self._index_B[live_B] = [r.lane for r in chain.from_iterable(rows)]
            self._arrays = {name: lanes[self._index_B] for name, lanes in self._table.items()}
            self._arrays |= {
                "tokens_T": np.where(live_B, np.int32(FROM_SLOT), np.int32(0)),
                "q_start_B": np.minimum(np.arange(B + 1, dtype=np.int32), counts),
                "write_slot_B": self._arrays["read_slot_B"],
                "fresh_B": np.zeros(live_B.shape, np.bool_),
                "emit_B": live_B,
            }
        elif self._grown:
            self._arrays["pages_BP"] = self._table["pages_BP"][self._index_B]
        self._grown = False
        return self._arrays

    def _kv_len(self) -> np.ndarray:
        """`computed` of the gathered rows, 0 for padding."""
        kv_len_B = np.zeros(self._live_B.shape, np.int32)
        kv_len_B[self._live_B] = [r.computed for r in chain.from_iterable(self._rows)]
        return kv_len_B


def _bucket(sizes: tuple[int, ...], count: int) -> int:
    return sizes[bisect.bisect_left(sizes, count)]
