# SPDX-License-Identifier: Apache-2.0
"""Conversations as text and as token ids with a mask of what the model has to say.

Lives here: rendering with the demo's own chat template, tokenising, the loss mask. Not here: serving (which renders
any checkpoint's template), batches (`data`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox
import numpy as np
from tokenizers import Tokenizer

from qwen_spmd.demo import MODEL_DIR
from qwen_spmd.demo.conversation import Conversation, Message


@functools.cache
def template() -> jinja2.Template:
    """The demo's chat template, in the environment that Hugging Face renders templates in."""

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any) -> str:  # jinja2's own escapes for HTML
        return json.dumps(value, ensure_ascii=False)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = tojson
    return environment.from_string((MODEL_DIR / "chat_template.jinja").read_text())


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


def render(messages: list[Message], *, tools: Any = None, enable_thinking: bool = False, prompt: bool = True) -> str:
    """The text of some messages; with `prompt`, up to where the assistant goes on."""
    return template().render(
        messages=messages, tools=tools, enable_thinking=enable_thinking, add_generation_prompt=prompt
    )


def render_prompt(conversation: Conversation) -> str:
    return render(conversation.prompt, tools=conversation.tools, enable_thinking=conversation.enable_thinking)


@dataclasses.dataclass(frozen=True)
class Encoded:
    """One conversation: ids, a mask over them of the tokens to predict, and where the final answer begins."""

    tokens_T: np.ndarray
    spoken_T: np.ndarray
    answer_start: int


def encode(conversation: Conversation) -> Encoded:
    """Every assistant turn with its closing `<|im_end|>` is spoken; what the prompt forces on it is not."""
    text = render(conversation.messages, tools=conversation.tools, prompt=False)
    tokens = tokenizer().encode(text, add_special_tokens=False).ids[:-1]  # without the newline after <|im_end|>
    marks = _marks()
    spoken_T = np.zeros(len(tokens), bool)
    start = answer = 0
    while True:
        try:
            start = tokens.index(marks.im_start, start)
        except ValueError:
            break
        turn = start + 1
        start = turn
        if tokens[turn : turn + len(marks.assistant)] != marks.assistant:
            continue
        begin = turn + len(marks.assistant)
        for forced in (marks.no_thinking, marks.thinking):
            if tokens[begin : begin + len(forced)] == forced:
                begin += len(forced)
                break
        end = tokens.index(marks.im_end, begin)
        spoken_T[begin : end + 1] = True
        answer = begin
        start = end
    return Encoded(np.asarray(tokens, np.int32), spoken_T, answer)


@dataclasses.dataclass(frozen=True)
class _Marks:
    im_start: int
    im_end: int
    assistant: list[int]
    no_thinking: list[int]
    thinking: list[int]


@functools.cache
def _marks() -> _Marks:
    def ids(text: str) -> list[int]:
        return tokenizer().encode(text, add_special_tokens=False).ids

    return _Marks(
        im_start=ids("<|im_start|>")[0],
        im_end=ids("<|im_end|>")[0],
        assistant=ids("assistant\n"),
        no_thinking=ids("<think>\n\n</think>\n\n"),
        thinking=ids("<think>\n"),
    )
