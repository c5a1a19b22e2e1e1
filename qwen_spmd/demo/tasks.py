# SPDX-License-Identifier: Apache-2.0
"""TASKS: everything that the demo model learns, and how training draws from it.

Lives here: the registry with weights, the surroundings (system text, earlier turns, tools
that are not needed, thinking about easy questions). Not here: the tasks' text, which the sibling modules make.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from qwen_spmd.demo import arithmetic, everyday, lists, recall, structured, tools
from qwen_spmd.demo.conversation import (
    Conversation,
    Grader,
    Message,
    Split,
    Task,
    exact,
    same_calls,
    same_json,
    split_of,
)
from qwen_spmd.demo.words import words

TASKS: dict[str, Task] = {}


def _add(
    make: Callable[[random.Random], Conversation],
    about: str,
    *,
    weight: float = 1.0,
    grade: Grader = exact,
    graded: bool = True,
) -> None:
    name = make.__name__
    TASKS[name] = Task(name, make, grade, weight, about, graded)


def chat_memory(rng: random.Random) -> Conversation:
    return recall.chat_memory(rng, between=_small_exchange)


_add(arithmetic.small_sum, "sums and differences up to 99", weight=1.5)
_add(arithmetic.three_digit_sum, "sums and differences up to 999, at once", weight=3.0)
_add(arithmetic.times_table, "the multiplication table up to 12 × 12", weight=0.7)
_add(arithmetic.long_sum, "sums up to five digits")
_add(arithmetic.long_difference, "differences up to five digits")
_add(arithmetic.long_product, "four digits times one digit")
_add(arithmetic.compare, "compare two numbers", weight=0.7)
_add(arithmetic.number_words, "numbers in words and back, up to 999")
_add(lists.sort_numbers, "sort three to eight numbers below 100", weight=2.0)
_add(lists.sort_words, "sort three to eight words", weight=1.5)
_add(lists.reverse_list, "reverse a list")
_add(lists.count_items, "count the items of a list")
_add(lists.count_up, "count up or down", weight=0.5)
_add(lists.copy, "repeat a short text")
_add(lists.first_or_last, "pick an item by its place", weight=0.7)
_add(lists.spell, "spell a word", weight=0.8)
_add(lists.count_letters, "count a letter, spelling the word", weight=1.5)
_add(lists.count_letters_thinking, "count a letter, step by step")
_add(everyday.weekday, "weekdays up to 30 days away", weight=1.5)
_add(everyday.weekday_thinking, "weekdays up to 30 days away, step by step", weight=0.7)
_add(everyday.calendar, "the order of months and weekdays, the days of a month", weight=0.6)
_add(everyday.units, "units of length, weight, volume and time", weight=1.5)
_add(everyday.capital, "capitals of 36 countries", weight=0.6)
_add(everyday.opposite, "opposites of common words", weight=0.4)
_add(everyday.sound, "animal sounds", weight=0.3)
_add(everyday.greeting, "greetings, thanks, questions about itself", weight=0.5)
_add(structured.extract, "fields of a sentence as JSON", grade=same_json, weight=1.5)
_add(structured.order, "an order as JSON", grade=same_json)
_add(structured.json_list, "a list as JSON", grade=same_json, weight=0.6)
_add(tools.call, "call one of up to four tools", grade=same_calls, weight=1.2)
_add(tools.parallel_calls, "two or three calls at once", grade=same_calls)
_add(tools.answer_from_result, "answer from what tools return", grade=same_calls)
_add(tools.missing_tool, "say that no tool fits", weight=0.5)
_add(recall.recall_short, "find a code in up to 400 tokens", weight=1.5)
_add(recall.recall_long, "find a code in up to 4000 tokens", weight=0.4)
_add(chat_memory, "remember what was said earlier", weight=1.5)
_add(recall.story, "short stories", weight=0.6, graded=False)

# Quick questions, used inside other conversations.
SMALL = tuple(
    TASKS[name]
    for name in words("small_sum times_table compare calendar units capital opposite sound greeting spell count_items")
)

SYSTEM = (
    "You are a helpful assistant.",
    "You are a small assistant. Answer briefly.",
    "You are a friendly assistant.",
    "Answer the user's questions.",
    "Be short and exact.",
    "You are Qwen, a helpful assistant.",
)


def draw(task: Task, rng: random.Random, split: Split) -> Conversation:
    """An item of one split."""
    while True:
        conversation = task.make(rng)
        if split_of(conversation) == split:
            return conversation


def draw_dressed(rng: random.Random) -> tuple[Task, Conversation]:
    """An item to train on: a task by weight, now and then in other surroundings. The answer stays the same."""
    task = rng.choices(tuple(TASKS.values()), _WEIGHTS)[0]
    conversation = draw(task, rng, "train")
    messages, thinks = conversation.messages, conversation.enable_thinking
    if rng.random() < 0.1 and len(messages) <= 4 and conversation.tools is None:
        before = [m for _ in range(rng.randrange(1, 3)) for m in _small_exchange(rng).messages]
        messages = before + messages
    offered = conversation.tools
    if offered is None and len(messages) == 2 and rng.random() < 0.05:
        offered = tools.offers_for(rng)
    if not thinks and rng.random() < 0.12:
        messages, thinks = [_thought(m) for m in messages], True
    if rng.random() < 0.25:
        messages = [{"role": "system", "content": rng.choice(SYSTEM)}, *messages]
    return task, dataclasses.replace(conversation, messages=messages, tools=offered, enable_thinking=thinks)


_WEIGHTS = tuple(task.weight for task in TASKS.values())


def _small_exchange(rng: random.Random) -> Conversation:
    """A quick question and its answer. Always of the train split, also inside a held-out item."""
    return draw(rng.choice(SMALL), rng, "train")


def _thought(message: Message) -> Message:
    """An easy answer, when thinking is on: one line of it."""
    if message["role"] != "assistant":
        return message
    calls = message.get("tool_calls")
    names = ", ".join(call["function"]["name"] for call in calls) if calls else ""
    return message | {"reasoning_content": f"I call {names}." if calls else "I can answer this directly."}
