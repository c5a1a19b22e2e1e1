# SPDX-License-Identifier: Apache-2.0
"""Conversation and Task: what a demo task produces, how an answer to it is graded, which items are held out.

Lives here: the two types, the graders, the split. Not here: the tasks (`tasks`), tokens (`chat`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

Message = dict[str, Any]
Split = Literal["train", "test"]

HELD_OUT = 20
"""One of so many prompts is never trained on."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Messages in the OpenAI form. The last one is the assistant's and is the reference answer."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    enable_thinking: bool = False

    @property
    def prompt(self) -> list[Message]:
        return self.messages[:-1]

    @property
    def answer(self) -> Message:
        return self.messages[-1]


Grader = Callable[[Conversation, str], bool]


@dataclasses.dataclass(frozen=True)
class Task:
    """A kind of question. `make` draws one; `graded` is False where many answers are right (perplexity only)."""

    name: str
    make: Callable[[random.Random], Conversation]
    grade: Grader
    weight: float
    about: str
    graded: bool = True


def ask(question: str, answer: str, reasoning: str | None = None, thinking: bool = False) -> Conversation:
    """The plain case: one question, one answer."""
    return Conversation(
        [{"role": "user", "content": question}, reply(answer, reasoning)],
        enable_thinking=thinking,
    )


def reply(answer: str, reasoning: str | None = None) -> Message:
    """An assistant message. The reasoning is shown only when the conversation thinks."""
    message: Message = {"role": "assistant", "content": answer}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def split_of(conversation: Conversation) -> Split:
    """The split of a prompt, by a hash of what the user and the tools said. System text and thinking do not count."""
    said = [m["content"] for m in conversation.prompt if m["role"] in ("user", "tool")]
    digest = hashlib.blake2b("\x1f".join(said).encode(), digest_size=4).digest()
    return "train" if int.from_bytes(digest) % HELD_OUT else "test"


def final_answer(conversation: Conversation, text: str) -> str | None:
    """What `text`, generated after the prompt, answers once the thinking is over; None if it never is."""
    if conversation.enable_thinking:
        if "</think>" not in text:
            return None
        text = text.rpartition("</think>")[2]
    return text.removesuffix("<|im_end|>").strip()


def exact(conversation: Conversation, text: str) -> bool:
    """The answer is the reference, to the letter."""
    return final_answer(conversation, text) == conversation.answer["content"]


def same_json(conversation: Conversation, text: str) -> bool:
    """The answer parses to the reference's value."""
    answer = final_answer(conversation, text)
    if answer is None:
        return False
    try:
        return json.loads(answer) == json.loads(conversation.answer["content"])
    except json.JSONDecodeError:
        return False


CALL = re.compile(r"<tool_call>\n<function=([^>\n]+)>\n(.*?)</function>\n</tool_call>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>\n", re.DOTALL)


def same_calls(conversation: Conversation, text: str) -> bool:
    """The same functions are called with the same arguments, in any order, and the text beside them is the same."""
    answer = final_answer(conversation, text)
    if answer is None:
        return False
    calls = [(name, dict(PARAMETER.findall(body))) for name, body in CALL.findall(answer)]
    wanted = []
    for call in conversation.answer.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        wanted.append((call["function"]["name"], {key: _argument_text(value) for key, value in arguments.items()}))
    rest = CALL.sub("", answer).strip()
    return sorted(calls, key=str) == sorted(wanted, key=str) and rest == conversation.answer["content"]


def _argument_text(value: Any) -> str:
    """How the chat template writes an argument."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


def pick(rng: random.Random, *phrasings: str, **values: Any) -> str:
    """One of the phrasings with the values filled in, worded as people type: now and then no capital, no full stop."""
    text = rng.choice(phrasings).format(**values)
    if rng.random() < 0.15:
        text = text[0].lower() + text[1:]
    elif rng.random() < 0.1 and text[0].isupper():
        text = f"Please {text[0].lower()}{text[1:]}" if text.endswith(".") else f"Hi! {text}"
    if rng.random() < 0.2 and text[-1] in ".?!":
        text = text[:-1]
    return text


def comma_list(items: Sequence[Any]) -> str:
    return ", ".join(str(i) for i in items)
