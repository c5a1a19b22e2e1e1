# SPDX-License-Identifier: Apache-2.0
"""LLM: the offline and notebook face of the engine, the same one that serves.

`generate` and `chat` go through its loop; `logits` and `trace` run the model over a whole sequence and return arrays.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from qwen_spmd.config import ModelConfig
from qwen_spmd.mesh.axes import automatic
from qwen_spmd.model import Trace
from qwen_spmd.params import Params
from qwen_spmd.serve.engine import Engine
from qwen_spmd.serve.model_folder import model_folder
from qwen_spmd.serve.request import FinishReason, Request, SamplingParams
from qwen_spmd.serve.scheduler import Output
from qwen_spmd.serve.sizes import EngineConfig
from qwen_spmd.serve.tokenizer import TextStream, Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Completion:
    """One answer: `tokens` as sampled, the stopping one included; `text` without it."""

    prompt_tokens: list[int]
    tokens: list[int]
    text: str
    finish_reason: FinishReason


def _kept(request: Request, text: TextStream) -> list[int]:
    """The output, without what was sampled after a stop string."""
    return request.output[: text.num_tokens] if text.stopped else request.output


class LLM:
    """A model in this process. Calls from several threads take turns.

        llm = LLM("Qwen/Qwen3-0.6B")
        llm.generate(["Once upon a time"], SamplingParams(max_tokens=50))[0].text

    `model` is a local folder or a Hugging Face id; None is the demo model that ships with the package. The other
    arguments are EngineConfig's. Sampling defaults are the model's own (generation_config.json).
    """

    def __init__(self, model: str | Path | None = None, **options: Any):
        folder = model_folder(None if model is None else str(model))
        self.tokenizer = Tokenizer.load(folder)
        self.engine = Engine.load(folder, EngineConfig(**options))
        self.engine.deliver = self._deliver
        self._names = itertools.count()
        self._random = random.Random(self.engine.config.seed)
        self._outputs: queue.SimpleQueue[list[Output]] = queue.SimpleQueue()
        self._one_call = threading.Lock()  # outputs of two calls at once would mix

    @property
    def cfg(self) -> ModelConfig:
        return self.engine.cfg

    @property
    def params(self) -> Params:
        """The parameters where they are. Any jnp function takes them. Assign changed ones: the next step uses them."""
        return automatic(self.engine.weights)

    @params.setter
    def params(self, params: Params) -> None:
        self.engine.weights = params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Continue each prompt (text or ids), all in one batch. One SamplingParams for all, or one for each."""
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]  # type: ignore[list-item]
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else [int(i) for i in p] for p in prompts]  # type: ignore[union-attr]
        if params is None:
            params = SamplingParams(**self.tokenizer.sampling)
        each = [params] * len(ids) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(ids):
            raise ValueError(f"params has {len(each)} entries, there are {len(ids)} prompts")
        return self._run(ids, each, progress)

    def chat(
        self,
        chats: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Answer one chat or several: lists of {"role": .., "content": ..}, through the model's chat template."""
        if chats and isinstance(chats[0], dict):
            chats = [chats]  # type: ignore[list-item]
        options = chat_template_kwargs or {}
        ids = [self.tokenizer.render_chat(c, tools, **options)[1] for c in chats]  # type: ignore[arg-type]
        return self.generate(ids, params, progress=progress)

    def logits(self, tokens: Prompt) -> np.ndarray:
        """float32 [T, V]: row t is what the model expects after tokens 0 .. t."""
        return np.asarray(self._sequence(tokens)[0])

    def trace(self, tokens: Prompt) -> Trace:
        """The residual stream after each layer [L, T, D] and the routing of each MoE layer [L, T, *], as numpy."""
        return jax.tree.map(np.asarray, self._sequence(tokens)[1])

    def close(self) -> None:
        """Stop the engine. Also at the end of a `with` block."""
        self.engine.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sequence(self, tokens: Prompt) -> tuple[jax.Array, Trace]:
        ids = self.tokenizer.encode(tokens) if isinstance(tokens, str) else list(tokens)
        if not ids or not 0 <= min(ids) <= max(ids) < self.cfg.vocab_size:
            raise ValueError(f"tokens must be at least one id, each from 0 to {self.cfg.vocab_size - 1}")
        return self.engine.run_sequence(ids)

    def _run(self, prompts: list[list[int]], params: list[SamplingParams], progress: bool) -> list[Completion]:
        requests = [self._request(ids, p) for ids, p in zip(prompts, params, strict=True)]
        streams = {r.id: TextStream(self.tokenizer, r.params) for r in requests}
        texts, running = dict.fromkeys(streams, ""), set(streams)
        waiting = iter(requests)
        with self._one_call, tqdm(total=len(requests), unit="request", disable=not progress) as bar:
            try:
                # No more in the queue than it takes; the rest follows as answers come.
                for request in itertools.islice(waiting, self.engine.config.max_queue):
                    self.engine.submit(request)
                while running:
                    for output in self._outputs.get():
                        if output.request.id not in running:
                            continue
                        self._take(output, streams[output.request.id], texts)
                        # Not the request's own reason: the engine may be ahead of this output.
                        if output.finish_reason is not None:
                            running.discard(output.request.id)
                            bar.update()
                            if (request := next(waiting, None)) is not None:
                                self.engine.submit(request)
            finally:
                for id in running:
                    self.engine.abort(id)
        if error := self.engine.stats().error:
            raise RuntimeError(f"the engine failed: {error}")
        return [
            Completion(r.prompt, _kept(r, streams[r.id]), texts[r.id], r.finish_reason)  # type: ignore[arg-type]
            for r in requests
        ]

    def _request(self, ids: list[int], params: SamplingParams) -> Request:
        room = self.engine.max_model_len - len(ids)
        if room < 1:
            raise ValueError(f"a prompt has {len(ids)} tokens, it must have fewer than {self.engine.max_model_len}")
        model_ids = () if params.ignore_eos else self.tokenizer.stop_ids
        return Request(
            id=str(next(self._names)),
            prompt=ids,
            params=params,
            stop_ids=tuple(dict.fromkeys(model_ids + params.stop_token_ids)),
            seed=(self._random.getrandbits(32) if params.seed in (None, -1) else params.seed) % 2**32,
            max_len=len(ids) + min(params.max_tokens or room, room),
        )

    def _take(self, output: Output, text: TextStream, texts: dict[str, str]) -> None:
        """Turn an output's tokens into text; a stop string in it ends the request."""
        r, reason = output.request, output.finish_reason
        hidden = reason == "stop" and not r.params.include_stop_str_in_output
        texts[r.id] += text.push(output.tokens[:-1] if hidden else output.tokens)
        if text.stopped and reason is None:
            self.engine.abort(r.id, "stop")
        elif reason is not None and not text.stopped:
            texts[r.id] += text.finish()

    def _deliver(self, outputs: list[Output]) -> None:
        self._outputs.put(outputs)
