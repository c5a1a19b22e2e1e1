# SPDX-License-Identifier: Apache-2.0
"""Accuracy on held-out items of the demo's tasks, for any engine that turns prompts into text.

What is lost by a quantised format, a layout or speculation shows here. Not here: engines.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from qwen_spmd.demo.conversation import Conversation
from qwen_spmd.demo.tasks import TASKS, draw

MAX_TOKENS = 320
"""More than any graded answer needs, thinking included."""

Generate = Callable[[list[Conversation]], list[str]]


def held_out(task: str, items: int, seed: int = 0) -> list[Conversation]:
    """Items that were never trained on, the same for the same arguments."""
    rng = random.Random(f"{task} {seed}")
    return [draw(TASKS[task], rng, "test") for _ in range(items)]


def graded() -> list[str]:
    """The names of the tasks that have an accuracy."""
    return [name for name, task in TASKS.items() if task.graded]


def evaluate(
    generate: Generate, tasks: Sequence[str] | None = None, items: int = 50, seed: int = 0
) -> dict[str, float]:
    """Task -> share of right answers. `generate` continues each conversation's prompt (its last message is the
    reference answer); special tokens in its text do not matter."""
    names = list(tasks or graded())
    if unknown := [name for name in names if name not in TASKS]:
        raise ValueError(f"tasks: {', '.join(unknown)} unknown; known are {', '.join(TASKS)}")
    drawn = {name: held_out(name, items, seed) for name in names}
    texts = iter(generate([c for conversations in drawn.values() for c in conversations]))
    return {
        name: sum(TASKS[name].grade(c, next(texts)) for c in conversations) / items
        for name, conversations in drawn.items()
    }
