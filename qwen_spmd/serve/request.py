# SPDX-License-Identifier: Apache-2.0
"""Request and SamplingParams: what one caller asked for and how far it has come. Plain Python, no jax."""

from __future__ import annotations

import dataclasses
import enum
import numbers
import time
from typing import Any, Literal

from qwen_spmd.limits import MAX_STOP_IDS

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to generate, with vLLM's names and meanings. Checked when made: ValueError names the field.

    temperature     0 is greedy; below 1e-5 counts as 0
    top_k           0 or -1 is off
    top_p, min_p    1 and 0 are off
    seed            None or -1: a random one; with a seed, a request's tokens depend on nothing else
    max_tokens      None: as many as the context has room for
    min_tokens      stop ids cannot come before this many tokens
    stop            strings that end the text; not part of it unless `include_stop_str_in_output`
    stop_token_ids  ids that end it, beside the model's own
    ignore_eos      the model's own stop ids do not end it
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, allowed: str) -> None:
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)!r}, it must be {allowed}")

        def is_int(value: object) -> bool:
            return isinstance(value, numbers.Integral) and not isinstance(value, bool)

        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            check(name, isinstance(value, numbers.Real) and not isinstance(value, bool), "a number")
        for name in ("top_k", "min_tokens"):
            check(name, is_int(getattr(self, name)), "an integer")
        for name in ("seed", "max_tokens"):
            check(name, getattr(self, name) is None or is_int(getattr(self, name)), "an integer or None")
        # One string is one stop string, not its letters; lists are as good as tuples.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        check("stop", all(isinstance(s, str) for s in self.stop), "a string or several")
        check("stop_token_ids", all(map(is_int, self.stop_token_ids)), "integers")
        check("temperature", 0.0 <= self.temperature <= 100.0, "from 0 to 100")
        check("top_k", self.top_k >= -1, "-1 or 0 (off) or positive")
        check("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        check("min_p", 0.0 <= self.min_p <= 1.0, "from 0 to 1")
        check("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "a 64-bit integer")
        check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        check("min_tokens", self.min_tokens >= 0, "at least 0")
        check(
            "min_tokens",
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"at most max_tokens ({self.max_tokens})",
        )
        check("stop", all(self.stop), "non-empty strings")
        check("stop_token_ids", len(self.stop_token_ids) <= MAX_STOP_IDS, f"at most {MAX_STOP_IDS} ids")
        check("stop_token_ids", all(i >= 0 for i in self.stop_token_ids), "ids of the vocabulary")

    def replace(self, **changes: Any) -> SamplingParams:
        return dataclasses.replace(self, **changes)


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One sequence. The first block of fields is the caller's and never changes; the rest is the scheduler's.

    stop_ids     ids that end it on the device and the host: the model's (unless ignore_eos) and its own
    seed         uint32, never None
    max_len      prompt + generated tokens at which it ends with "length"
    output       tokens committed so far
    computed     tokens whose state (KV, recurrent) is in its pages and slot, steps in flight counted in
    in_flight    tokens that steps in flight will add to `output`
    rank         where it runs; -1 while it does not
    pages, slot  what it holds there; slot 0 is none
    lane         its place in the table that steps are gathered from, -1 for none
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    max_len: int
    priority: int = 0
    arrival: float = dataclasses.field(default_factory=time.monotonic)

    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    output: list[int] = dataclasses.field(default_factory=list)
    computed: int = 0
    in_flight: int = 0
    rank: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    slot: int = 0
    lane: int = -1
    preemptions: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None

    @property
    def length(self) -> int:
        """Prompt and committed output."""
        return len(self.prompt) + len(self.output)

    def known(self, start: int, end: int) -> list[int]:
        """The tokens from `start` to `end` of prompt and committed output."""
        prompt = len(self.prompt)
        return self.prompt[start:end] + self.output[max(start - prompt, 0) : max(end - prompt, 0)]

    def cut(self, ids: list[int]) -> tuple[list[int], FinishReason | None]:
        """Newly sampled `ids` up to the first that ends the request, itself included, and why that does.

        -1 is where the device ended it.
        """
        fixed = self.params.min_tokens - len(self.output)  # so many more cannot end it
        for i, token in enumerate(ids):
            if token < 0:
                return ids[:i], "error"  # by our rules it goes on: where it stands is unknown
            if token in self.stop_ids and i >= fixed:
                return ids[: i + 1], "stop"
        return ids, None
