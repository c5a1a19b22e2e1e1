# SPDX-License-Identifier: Apache-2.0
"""TextStream: one sequence's token ids to text as they come, up to a stop string. Not here: the vocabulary."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from qwen_spmd.serve.request import SamplingParams
from qwen_spmd.serve.tokenizer import Tokenizer


class TextStream:
    """Joined, what `push` and `finish` return is `Tokenizer.decode` of all ids, however they are split over calls.

    A character leaves once it is whole. With stop strings, text leaves once it cannot be part of one any more, and
    `stopped` tells that one was found. Of several, the one that is complete first counts, and of those that end
    together the longest: this, unlike the leftmost beginning, needs no look at tokens that are yet to come.
    The first `min_tokens` tokens are in no stop string.

    num_tokens   ids taken in; none after the one that completed a stop string
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, skip_special_tokens: bool = True) -> None:
        self.num_tokens = 0
        self.stopped = False
        self._token_bytes = tokenizer.text_bytes if skip_special_tokens else tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._held = ""  # decoded, and may be the beginning of a stop string

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids set free."""
        if not self._stops:
            self.num_tokens += len(ids)
            return self._utf8.decode(b"".join(map(self._token_bytes, ids)))
        out = []
        for id in ids:
            if self.stopped:
                break
            self.num_tokens += 1
            piece = self._utf8.decode(self._token_bytes(id))
            out.append(piece if self.num_tokens <= self._min_tokens else self._search(piece))
        return "".join(out)

    def finish(self) -> str:
        """The text still held back, when no more ids come. A character that was never completed is U+FFFD."""
        if self.stopped:
            return ""
        rest = self._utf8.decode(b"", final=True)
        if self._stops:
            rest = self._search(rest)
        rest, self._held = rest + self._held, ""
        return rest

    def _search(self, piece: str) -> str:
        held = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self.stopped, self._held = True, ""
            return held[: end if self._include_stop else start]
        keep = len(held) - max(_open_tail(held, stop) for stop in self._stops)
        self._held = held[keep:]
        return held[:keep]


def _open_tail(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0
