# SPDX-License-Identifier: Apache-2.0
"""SchedulerConfig: the limits that requests keep to and the sizes of steps. Not here: who chooses them (`sizes.py`)."""

from __future__ import annotations

import dataclasses

from qwen_spmd.limits import INT32_MAX, MAX_STOP_IDS
from qwen_spmd.serve.request import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits and sizes. Checked when made: ValueError names the field.

    max_num_seqs            requests running at once on each rank
    max_num_batched_tokens  tokens of each rank in one step
    max_model_len           longest prompt + output
    max_queue               requests waiting, for all ranks; one more is refused
    decode_window           most iterations of a decode window
    token_buckets           sizes that a rank's tokens in a step are padded to, ascending
    seq_buckets             sizes that a rank's sequences in a step are padded to, ascending
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
        def field(name: str, ok: bool, allowed: str) -> None:
            _check(name, getattr(self, name), ok, allowed)

        for name in ("max_num_seqs", "max_num_batched_tokens", "max_queue", "decode_window"):
            field(name, getattr(self, name) >= 1, "at least 1")
        field("max_model_len", self.max_model_len >= 2, "at least 2")
        # A step must have room for one token of every running request.
        seqs = self.max_num_seqs
        field("max_num_batched_tokens", self.max_num_batched_tokens >= seqs, f"at least max_num_seqs ({seqs})")
        field("patience_s", 0 <= self.patience_s < float("inf"), "finite and at least 0")
        for name, cover in (("token_buckets", "max_num_batched_tokens"), ("seq_buckets", "max_num_seqs")):
            buckets, most = getattr(self, name), getattr(self, cover)
            field(name, len(buckets) > 0 and buckets[0] >= 1, "positive sizes")
            field(name, list(buckets) == sorted(set(buckets)), "ascending")
            field(name, buckets[-1] >= most, f"at least {cover} ({most}) at the end")

    def check(self, request: Request, room: int) -> None:
        """ValueError if the request can never run on a rank whose KV pages hold `room` tokens."""
        r, most = request, self.max_model_len
        low, high = min(r.prompt, default=0), max(r.prompt, default=0)
        _check("prompt", "empty", len(r.prompt) > 0, "at least one token")
        _check("prompt", f"ids {low} to {high}", low >= 0 and high <= INT32_MAX, "ids of the vocabulary")
        _check("prompt", f"{len(r.prompt)} tokens", len(r.prompt) < r.max_len, f"shorter than max_len ({r.max_len})")
        _check("max_len", r.max_len, r.max_len <= most, f"at most max_model_len ({most})")
        _check("max_len", r.max_len, r.max_len <= room, f"at most {room}, the tokens that the KV pages hold")
        _check("stop_ids", r.stop_ids, len(r.stop_ids) <= MAX_STOP_IDS, f"at most {MAX_STOP_IDS} ids")
        _check("stop_ids", r.stop_ids, all(0 <= i <= INT32_MAX for i in r.stop_ids), "ids of the vocabulary")
        _check("priority", r.priority, abs(r.priority) <= INT32_MAX, "a 32-bit integer")
        _check("seed", r.seed, 0 <= r.seed < 2**32, "an unsigned 32-bit integer")


def _check(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {value}, it must be {allowed}")
