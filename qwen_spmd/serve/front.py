# SPDX-License-Identifier: Apache-2.0
"""Front: HTTP requests, which live on the event loop, to and from the engine, which has its own thread.

Token ids become text here, so here stop strings end a request. Not here: HTTP, JSON, the chat template.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from qwen_spmd.serve.fields import ApiError, bad_request
from qwen_spmd.serve.metrics import Metrics
from qwen_spmd.serve.protocol import Ask
from qwen_spmd.serve.request import MAX_STOP_IDS, FinishReason, Request
from qwen_spmd.serve.scheduler import Output, QueueFull
from qwen_spmd.serve.tokenizer import TextStream, Tokenizer

if TYPE_CHECKING:  # it imports jax
    from qwen_spmd.serve.engine import Engine

log = logging.getLogger(__name__)

WATCH_S = 0.25
"""How often to look whether the engine still lives, while someone waits for it."""


@dataclasses.dataclass(slots=True)
class Delta:
    """What came for one choice: text, how many tokens, and why it ended if it did."""

    index: int
    text: str = ""
    tokens: int = 0
    finish_reason: FinishReason | None = None


@dataclasses.dataclass(slots=True, eq=False)
class _Sequence:
    """One choice. `tokens` of it came so far, the last ones at `tokens_at`."""

    index: int
    request: Request
    text: TextStream
    tokens: int = 0
    tokens_at: float = 0.0


class Generation:
    """All choices of one HTTP request. Leaving the `with` block ends those that still run, whatever the reason."""

    def __init__(self, front: Front, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.gone = False
        self._front = front
        self._running: dict[str, _Sequence] = {}
        self._news: dict[int, Delta] = {}
        self._wake = asyncio.Event()
        self._error: ApiError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    async def next(self) -> list[Delta]:
        """What came since the last call; [] when there is nothing more. ApiError if something broke."""
        while not self._news:
            if self._error is not None:
                raise self._error
            if not self._running:
                return []
            self._wake.clear()
            await self._wake.wait()
        news, self._news = self._news, {}
        return list(news.values())

    def leave(self) -> None:
        """The client is gone: nobody reads on."""
        self.gone = True
        self._news.clear()
        self._close()

    def fail(self, error: ApiError) -> None:
        self._error = error
        self._close()

    def _delta(self, index: int) -> Delta:
        self._wake.set()
        return self._news.setdefault(index, Delta(index))

    def _close(self) -> None:
        for request_id in list(self._running):
            self._front._end(self, request_id, "abort")
            self._front.engine.abort(request_id)
        self._wake.set()


class Front:
    """
    draining   nothing new is taken
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        metrics: Metrics,
        *,
        seed: int | None = None,
        log_requests: bool = True,
    ) -> None:
        self.engine, self.tokenizer, self.metrics = engine, tokenizer, metrics
        self.draining = False
        self._log_requests = log_requests
        self._open: dict[str, Generation] = {}
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None
        engine.deliver = self._deliver

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def submit(self, ask: Ask, prompts: Sequence[list[int]], echo: Sequence[str], answer_id: str) -> Generation:
        """Give `ask.n` sequences per prompt to the engine. ApiError: none is left running. `echo`: prompts as text."""
        if self.draining:
            raise stopping()
        self._loop = asyncio.get_running_loop()
        generation = Generation(self, sum(map(len, prompts)))
        try:
            for sequence in self._sequences(ask, prompts, answer_id):
                self._start(generation, sequence)
                if ask.echo:
                    generation._delta(sequence.index).text = echo[sequence.index // ask.n]
        except BaseException:
            generation._close()
            raise
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        return generation

    def fail_all(self, error: ApiError) -> None:
        for generation in list(self._open.values()):
            generation.fail(error)

    def _sequences(self, ask: Ask, prompts: Sequence[list[int]], answer_id: str) -> list[_Sequence]:
        out = []
        for prompt in prompts:
            options = self._options(ask, prompt)
            # -1 asks for a random seed, as it does in vLLM.
            seed = self._random.getrandbits(32) if ask.params.seed in (None, -1) else ask.params.seed
            for i in range(ask.n):
                request = Request(
                    id=f"{answer_id}-{next(self._numbers)}",
                    prompt=prompt,
                    seed=(seed + i) % 2**32,
                    priority=ask.priority,
                    **options,
                )
                text = TextStream(self.tokenizer, request.params, skip_special_tokens=ask.skip_special_tokens)
                out.append(_Sequence(len(out), request, text))
        return out

    def _options(self, ask: Ask, prompt: list[int]) -> dict[str, Any]:
        """Of the Requests for a prompt: params and what follows from them and the model."""
        field = "messages" if ask.prompts is None else "prompt"
        limit = self.engine.max_model_len
        room = limit - len(prompt)
        if not prompt:
            raise ApiError(400, f"{field} is empty, it must have at least one token", param=field)
        if room < 1:
            raise ApiError(
                400,
                f"{field} has {len(prompt)} tokens, it must have at most {limit - 1}: max_model_len is {limit}, "
                "and at least one token is to be generated",
                param=field,
                code="context_length_exceeded",
            )
        # Clients ask for far more tokens than they expect, as a safety cap: what counts is the room that there is.
        max_tokens = min(ask.params.max_tokens or room, room)
        model_ids = () if ask.params.ignore_eos else self.tokenizer.stop_ids
        stop_ids = tuple(dict.fromkeys(model_ids + ask.params.stop_token_ids))
        if len(stop_ids) > MAX_STOP_IDS:
            most = MAX_STOP_IDS - len(model_ids)
            message = f"stop_token_ids has {len(ask.params.stop_token_ids)} ids, it must have at most {most}"
            raise ApiError(400, message, param="stop_token_ids")
        try:
            params = ask.params.replace(max_tokens=max_tokens)
        except ValueError as error:
            raise bad_request(error) from None
        return {"params": params, "max_len": len(prompt) + max_tokens, "stop_ids": stop_ids}

    def _start(self, generation: Generation, sequence: _Sequence) -> None:
        request = sequence.request
        # First, because its tokens may come before submit returns.
        generation._running[request.id] = sequence
        self._open[request.id] = generation
        try:
            self.engine.submit(request)
        except Exception as error:
            del generation._running[request.id], self._open[request.id]
            if isinstance(error, ValueError):
                raise bad_request(error) from None
            if isinstance(error, QueueFull):
                raise ApiError(429, str(error), code="queue_full", retry_after=1) from None
            if isinstance(error, RuntimeError):
                raise stopping() if self.draining else ApiError(500, f"the engine has stopped: {error}") from None
            raise

    # From the engine.

    def _deliver(self, outputs: list[Output]) -> None:
        """In the engine's thread: one hop to the event loop per step, however many requests it served."""
        if self._loop is None:  # nobody asked for anything yet: an engine that stops has nothing to give out
            return
        with contextlib.suppress(RuntimeError):  # the loop has closed: the server is gone and nobody listens
            self._loop.call_soon_threadsafe(self._dispatch, outputs)

    def _dispatch(self, outputs: list[Output]) -> None:
        now = time.monotonic()
        for output in outputs:
            generation = self._open.get(output.request.id)
            if generation is not None:  # else it ended on this side already
                self._take(generation, output, now)

    def _take(self, generation: Generation, output: Output, now: float) -> None:
        request, reason = output.request, output.finish_reason
        sequence = generation._running[request.id]
        if reason in ("error", "abort"):
            self._end(generation, request.id, reason)
            why = self.engine.stats().error or "it gives no reason"
            generation.fail(stopping() if reason == "abort" else ApiError(500, f"the engine failed: {why}"))
            return

        text, before = sequence.text, sequence.text.num_tokens
        # The id that stops a sequence is one of its tokens and no part of its text.
        hidden = reason == "stop" and not request.params.include_stop_str_in_output
        new = text.push(output.tokens[:-1] if hidden else output.tokens)
        tokens = text.num_tokens - before
        if text.stopped and reason is None:
            self.engine.abort(request.id, "stop")
        elif not text.stopped and reason is not None:
            new += text.finish()
            tokens += hidden
        if text.stopped:
            reason = "stop"

        delta = generation._delta(sequence.index)
        delta.text += new
        delta.tokens += tokens
        delta.finish_reason = reason
        self.metrics.tokens(request, tokens, sequence.tokens_at, now)
        sequence.tokens += tokens
        sequence.tokens_at = now
        if reason is not None:
            self._end(generation, request.id, reason)

    def _end(self, generation: Generation, request_id: str, reason: FinishReason) -> None:
        """Forget a sequence. Each comes by here once."""
        sequence = generation._running.pop(request_id)
        del self._open[request_id]
        request, now = sequence.request, time.monotonic()
        self.metrics.ended(request, reason, sequence.tokens, now)
        if self._log_requests:
            counts = f"{len(request.prompt)} prompt + {sequence.tokens} tokens"
            log.info("%s: %s, %s after %.3f s", request_id, counts, reason, now - request.arrival)

    async def _watch(self) -> None:
        """An engine that dies without a word must not leave anyone waiting."""
        while self._open:
            await asyncio.sleep(WATCH_S)
            stats = self.engine.stats()
            if not stats.alive and self._open:
                error = stopping() if self.draining else ApiError(500, f"the engine has stopped: {stats.error}")
                log.error("%d sequences end unfinished: %s", len(self._open), error)
                self.fail_all(error)


def stopping() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)
