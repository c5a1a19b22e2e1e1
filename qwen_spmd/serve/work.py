# SPDX-License-Identifier: Apache-2.0
"""Work: how much of it a rank has before it. A waiting request goes to the rank with the least.

    work = prefill tokens pending + DECODE_COST * decode tokens expected

in units of a prefill token, for all requests that run on the rank. Every request that runs costs a row in each step to
come, so among requests that are all in full flow this evens out rows, and a long prompt weighs as several rows.
"""

from __future__ import annotations

from collections.abc import Iterable

from qwen_spmd.serve.request import Request

DECODE_COST = 4
"""Prefill tokens that take a rank as long as one decode token does: these come one a step, those share a step."""

HORIZON = 256
"""Decode tokens of a request that count at most. `max_len` bounds them, but says little about how many will come."""


def rank_work(prefilling: Iterable[Request], decoding: Iterable[Request]) -> int:
    """The work of a rank where these run."""
    expected = sum([min(r.max_len - r.computed, HORIZON) for r in decoding])
    return sum(map(prefill_work, prefilling)) + DECODE_COST * expected


def prefill_work(request: Request) -> int:
    """The part of one that is not decoding yet, or that waits."""
    return request.length - request.computed + DECODE_COST * min(request.max_len - request.length, HORIZON)
