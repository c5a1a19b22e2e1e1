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
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

from qwen_spmd.serve.metrics import Metrics, Stats
from qwen_spmd.serve.protocol import ApiError, Ask
from qwen_spmd.serve.request import MAX_STOP_IDS, FinishReason, Request
from qwen_spmd.serve.scheduler import Output, QueueFull
from qwen_spmd.serve.text_stream import TextStream
from qwen_spmd.serve.tokenizer import Tokenizer

log = logging.getLogger(__name__)

WATCH_S = 0.25
"""How often to look whether the engine still lives, while someone waits for it."""


class Engine(Protocol):
    """What this side needs of an engine. `deliver` is set here and called from the engine's thread once per step."""

    deliver: Callable[[list[Output]], None]
    max_model_len: int
    vocab_size: int

    def submit(self, request: Request) -> None: ...
    def abort(self, request_id: str, reason: FinishReason = "abort") -> None: ...
    def stats(self) -> Stats: ...
    def drain(self, timeout: float) -> None: ...
    def stop(self) -> None: ...


@dataclasses.dataclass(slots=True)
class Delta:
    """What came for one choice: text, how many tokens, and why it ended if it did."""

    index: int
    text: str = ""
    tokens: int = 0
    finish_reason: FinishReason | None = None


@dataclasses.dataclass(slots=True, eq=False)
class _Sequence:
    request: Request
    text: TextStream
    delta: Delta  # not yet fetched
    tokens_at: float = 0.0  # when the last tokens came


class Generation:
    """All choices of one HTTP request. Leaving the `with` block ends those that still run, whatever the reason."""

    def __init__(self, front: Front, sequences: list[_Sequence]) -> None:
        self.prompt_tokens = 0
        self.gone = False
        self._front = front
        self._sequences = sequences
        self._running = {sequence.request.id: sequence for sequence in sequences}
        self._news: dict[int, Delta] = {}
        self._wake = asyncio.Event()
        self._error: ApiError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def next(self) -> list[Delta]:
        """What came since the last call, at least something; [] when there is nothing more. ApiError if it broke."""
        while not self._news:
            if self._error is not None:
                raise self._error
            if not self._running:
                return []
            self._wake.clear()
            await self._wake.wait()
        news, self._news = self._news, {}
        return list(news.values())

    def close(self) -> None:
        """Abort what still runs."""
        for request_id in list(self._running):
            self._front._end(self, request_id, "abort")
            self._front.engine.abort(request_id)
        self._wake.set()

    def leave(self) -> None:
        """The client is gone: nobody reads on."""
        self.gone = True
        self._news.clear()
        self.close()

    def fail(self, error: ApiError) -> None:
        self._error = error
        self.close()


class Front:
    """
    draining   nothing new is taken
    """

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, metrics: Metrics, *, seed: int | None = None, log_requests: bool = True
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
        """Give `ask.n` sequences per prompt to the engine. ApiError: nothing was started. `echo` goes before the text."""
        if self.draining:
            raise stopping()
        self._loop = asyncio.get_running_loop()
        generation = Generation(self, self._sequences(ask, prompts, echo, answer_id))
        generation.prompt_tokens = sum(map(len, prompts))
        try:
            for sequence in generation._sequences:
                self._open[sequence.request.id] = generation
                self.engine.submit(sequence.request)
        except Exception as error:
            generation.close()
            if isinstance(error, ValueError):
                raise ApiError(400, str(error), param=str(error).partition(" ")[0]) from None
            if isinstance(error, QueueFull):
                raise ApiError(429, str(error), code="queue_full", retry_after=1) from None
            if isinstance(error, RuntimeError):  # the engine has stopped
                raise (stopping() if self.draining else ApiError(500, f"the engine has stopped: {error}")) from None
            raise
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        return generation

    def fail_all(self, error: ApiError) -> None:
        for generation in {id(generation): generation for generation in self._open.values()}.values():
            generation.fail(error)

    def _sequences(
        self, ask: Ask, prompts: Sequence[list[int]], echo: Sequence[str], answer_id: str
    ) -> list[_Sequence]:
        sequences = []
        for prompt, text in zip(prompts, echo):
            options = self._options(ask, prompt)
            # -1 asks for a random seed, in vLLM too.
            seed = ask.params.seed if ask.params.seed not in (None, -1) else self._random.getrandbits(32)
            for i in range(ask.n):
                request = Request(
                    id=f"{answer_id}-{next(self._numbers)}", prompt=prompt, seed=(seed + i) % 2**32, priority=ask.priority, **options
                )
                stream = TextStream(self.tokenizer, request.params, skip_special_tokens=ask.skip_special_tokens)
                sequences.append(_Sequence(request, stream, Delta(len(sequences), text)))
        return sequences

    def _options(self, ask: Ask, prompt: list[int]) -> dict[str, Any]:
        """Of the Requests for a prompt: params and what follows from them and the model."""
        field = "messages" if ask.prompts is None else "prompt"
        limit = self.engine.max_model_len
        if not prompt:
            raise ApiError(400, f"{field} is empty, it must have at least one token", param=field)
        room = limit - len(prompt)
        if room < 1:
            raise ApiError(
                400,
                f"{field} has {len(prompt)} tokens, it must have at most {limit - 1}: max_model_len is {limit}, "
                "and at least one token is to be generated",
                param=field,
                code="context_length_exceeded",
            )
        # Clients ask for far more tokens than they expect, as a safety cap: only the room that there is counts.
        max_tokens = min(ask.params.max_tokens or room, room)
        model_ids = () if ask.params.ignore_eos else self.tokenizer.stop_ids
        stop_ids = tuple(dict.fromkeys(model_ids + ask.params.stop_token_ids))
        if len(stop_ids) > MAX_STOP_IDS:
            most = MAX_STOP_IDS - len(model_ids)
            raise ApiError(
                400,
                f"stop_token_ids has {len(ask.params.stop_token_ids)} ids, it must have at most {most} beside the model's own",
                param="stop_token_ids",
            )
        try:
            params = ask.params.replace(max_tokens=max_tokens)
        except ValueError as error:
            raise ApiError(400, str(error), param=str(error).partition(" ")[0]) from None
        return {"params": params, "max_len": len(prompt) + max_tokens, "stop_ids": stop_ids}

    # From the engine.

    def _deliver(self, outputs: list[Output]) -> None:
        """In the engine's thread: one hop to the event loop per step, however many requests it served."""
        assert self._loop is not None, "the engine gives out tokens that nobody asked for"
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
        # The stop id is a token of the answer and not a part of its text.
        hidden = reason == "stop" and len(output.tokens) > 0 and not request.params.include_stop_str_in_output
        text, delta = sequence.text, sequence.delta
        before = text.num_tokens
        delta.text += text.push(output.tokens[:-1] if hidden else output.tokens)
        tokens = text.num_tokens - before
        if text.stopped:
            if reason is None:
                self.engine.abort(request.id, "stop")
            reason = "stop"
        elif reason is not None:
            tokens += hidden
            delta.text += text.finish()
            reason = "stop" if text.stopped else reason
        delta.tokens += tokens
        delta.finish_reason = reason
        self.metrics.tokens(request, tokens, sequence.tokens_at, now)
        sequence.tokens_at = now
        if reason is not None:
            self._end(generation, request.id, reason)
        generation._news[delta.index] = delta
        sequence.delta = delta if not generation._wake.is_set() else delta
        generation._wake.set()

    def _end(self, generation: Generation, request_id: str, reason: FinishReason) -> None:
        """Forget a sequence. Every one of them comes by here once."""
        sequence = generation._running.pop(request_id)
        self._open.pop(request_id, None)
        request, tokens = sequence.request, sequence.text.num_tokens
        self.metrics.ended(request, reason, tokens)
        if self._log_requests:
            log.info(
                "%s: %d prompt + %d tokens, %s after %.3f s",
                request.id, len(request.prompt), tokens, reason, time.monotonic() - request.arrival,
            )  # fmt: skip

    async def _watch(self) -> None:
        """An engine that dies without a word must not leave anyone waiting."""
        while self._open:
            await asyncio.sleep(WATCH_S)
            stats = self.engine.stats()
            if not stats.alive:
                error = stopping() if self.draining else ApiError(500, f"the engine has stopped: {stats.error}")
                log.error("%d requests end: %s", len(self._open), error)
                self.fail_all(error)


def stopping() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)
