# SPDX-License-Identifier: Apache-2.0
"""The answers of the OpenAI API as JSON objects: whole ones and the chunks of a stream. Not here: how they are sent."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from qwen_spmd.serve.front import Delta


@dataclasses.dataclass(kw_only=True)
class Answer:
    """One answer as it grows. Whole or in chunks, it is made of the same deltas, so both say the same.

    prompt_tokens   of all prompts, each once whatever `n` is
    """

    id: str
    model: str
    chat: bool
    prompt_tokens: int
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    completion_tokens: int = 0
    texts: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    reasons: dict[int, str] = dataclasses.field(default_factory=dict)

    def add(self, delta: Delta) -> None:
        self.completion_tokens += delta.tokens
        self.texts.setdefault(delta.index, []).append(delta.text)
        if delta.finish_reason is not None:
            self.reasons[delta.index] = delta.finish_reason

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, texts in sorted(self.texts.items()):
            text = "".join(texts)
            content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            choices.append({"index": index, **content, "logprobs": None, "finish_reason": self.reasons[index]})
        return self._object("chat.completion" if self.chat else "text_completion", choices) | {"usage": self.usage()}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """What a stream says about a delta that was just added: its text, and on its own why the choice ended."""
        out = []
        first = len(self.texts[delta.index]) == 1
        if delta.text or (first and self.chat):
            role = {"role": "assistant"} if first else {}
            out.append(self._chunk(delta.index, role | {"content": delta.text}, delta.text, None))
        if delta.finish_reason is not None:
            out.append(self._chunk(delta.index, {}, "", delta.finish_reason))
        return out

    def usage_chunk(self) -> dict[str, Any]:
        """The last one of a stream that was asked for usage."""
        return self._object("chat.completion.chunk" if self.chat else "text_completion", []) | {"usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    def _chunk(self, index: int, delta: dict[str, str], text: str, reason: str | None) -> dict[str, Any]:
        content = {"delta": delta} if self.chat else {"text": text}
        choice = {"index": index, **content, "logprobs": None, "finish_reason": reason}
        return self._object("chat.completion.chunk" if self.chat else "text_completion", [choice])

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
