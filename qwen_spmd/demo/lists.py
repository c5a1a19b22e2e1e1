# SPDX-License-Identifier: Apache-2.0
"""Tasks on lists and letters: sorting, reversing, copying, counting, spelling."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

from qwen_spmd.demo.conversation import Conversation, ask, comma_list, pick
from qwen_spmd.demo.words import ADJECTIVES, ANIMALS, COLOURS, FOODS, NAMES, NOUNS, SPELLING_WORDS, SYLLABLES, THINGS


def sort_numbers(rng: random.Random) -> Conversation:
    numbers = rng.sample(range(100), rng.randrange(3, 9))
    if rng.random() < 0.7:
        asked = (
            "Sort these numbers: {x}",
            "Sort the numbers {x}.",
            "Sort {x}.",
            "Put these numbers in ascending order: {x}",
            "Order these numbers from smallest to largest: {x}",
            "Can you sort {x}?",
        )
        return ask(pick(rng, *asked, x=comma_list(numbers)), comma_list(sorted(numbers)))
    asked = (
        "Sort these numbers in descending order: {x}",
        "Order these numbers from largest to smallest: {x}",
        "Sort {x} from largest to smallest.",
    )
    return ask(pick(rng, *asked, x=comma_list(numbers)), comma_list(sorted(numbers, reverse=True)))


def sort_words(rng: random.Random) -> Conversation:
    words = rng.sample(rng.choice((ANIMALS, FOODS, THINGS, NAMES, COLOURS, NOUNS)), rng.randrange(3, 9))
    asked = (
        "Sort these words: {x}",
        "Sort these words alphabetically: {x}",
        "Sort the words {x}.",
        "Put these words in alphabetical order: {x}",
        "Order alphabetically: {x}",
        "Can you sort these words? {x}",
    )
    return ask(pick(rng, *asked, x=comma_list(words)), comma_list(sorted(words)))


def reverse_list(rng: random.Random) -> Conversation:
    items = _items(rng)
    asked = (
        "Reverse this list: {x}",
        "Reverse the list {x}.",
        "Write this list backwards: {x}",
        "Put this list in reverse order: {x}",
    )
    return ask(pick(rng, *asked, x=comma_list(items)), comma_list(items[::-1]))


def count_items(rng: random.Random) -> Conversation:
    items = _items(rng, 2, 13)
    asked = (
        "How many items are in this list: {x}?",
        "Count the items: {x}",
        "How many things are in this list? {x}",
        "Count these: {x}",
    )
    return ask(pick(rng, *asked, x=comma_list(items)), f"There are {len(items)} items.")


def count_up(rng: random.Random) -> Conversation:
    start, length = rng.randrange(90), rng.randrange(3, 16)
    if rng.random() < 0.7:
        asked = ("Count from {a} to {b}.", "Please count from {a} to {b}.", "List the numbers from {a} to {b}.")
        return ask(pick(rng, *asked, a=start, b=start + length), comma_list(range(start, start + length + 1)))
    asked = ("Count down from {b} to {a}.", "Count backwards from {b} to {a}.")
    return ask(pick(rng, *asked, a=start, b=start + length), comma_list(range(start + length, start - 1, -1)))


def copy(rng: random.Random) -> Conversation:
    kind = rng.randrange(3)
    if kind == 0:
        text = "".join(rng.choices(string.ascii_letters + string.digits, k=rng.randrange(4, 17)))
    elif kind == 1:
        text = " ".join(rng.choices((*NOUNS, *ADJECTIVES), k=rng.randrange(2, 11)))
    else:
        text = " ".join(_made_up(rng) for _ in range(rng.randrange(1, 6)))
    asked = ("Repeat after me: {x}", "Repeat this: {x}", "Copy this text: {x}", "Say this again: {x}", "Echo: {x}")
    return ask(rng.choice(asked).format(x=text), text)


def first_or_last(rng: random.Random) -> Conversation:
    items = _items(rng, 3, 9)
    which = rng.choice(("first", "second", "third", "last"))
    item = items[{"first": 0, "second": 1, "third": 2, "last": -1}[which]]
    asked = (
        "What is the {w} item of this list: {x}?",
        "Which item comes {w} in this list? {x}",
        "Give me the {w} item: {x}",
    )
    return ask(pick(rng, *asked, w=which, x=comma_list(items)), f"The {which} item is {item}.")


def spell(rng: random.Random) -> Conversation:
    word = _word(rng)
    asked = ('Spell the word "{x}".', "Spell {x}.", "How do you spell {x}?", "Can you spell {x}?")
    return ask(pick(rng, *asked, x=word), "-".join(word))


def count_letters(rng: random.Random) -> Conversation:
    word, letter = _word_and_letter(rng)
    question = pick(rng, *COUNT_LETTERS, w=word, c=letter)
    return ask(question, f"{'-'.join(word)}: {_times(word, letter)}")


def count_letters_thinking(rng: random.Random) -> Conversation:
    word, letter = _word_and_letter(rng)
    question = pick(rng, *COUNT_LETTERS, w=word, c=letter)
    seen, steps = 0, []
    for c in word:
        seen += c == letter
        steps.append(f"{c} {seen}")
    answer = f"The letter {letter} appears {_times(word, letter)} in {word}."
    return ask(question, answer, f"Looking for {letter}.\n" + "\n".join(steps), thinking=True)


COUNT_LETTERS = (
    'How many times does the letter {c} appear in "{w}"?',
    "How many times does {c} appear in {w}?",
    "How many {c}'s are in {w}?",
    "How many {c}s are there in {w}?",
    "How many letters {c} are in the word {w}?",
    "Count the letter {c} in {w}.",
    'How many "{c}" are in "{w}"?',
)


def _times(word: str, letter: str) -> str:
    n = word.count(letter)
    return f"{n} time" if n == 1 else f"{n} times"


def _items(rng: random.Random, low: int = 3, high: int = 9) -> list[str]:
    source: Sequence[str] = rng.choice((NOUNS, NAMES, COLOURS, [str(i) for i in range(100)]))
    return rng.sample(source, min(rng.randrange(low, high), len(source)))


def _word(rng: random.Random) -> str:
    return rng.choice(SPELLING_WORDS) if rng.random() < 0.7 else _made_up(rng)


def _made_up(rng: random.Random) -> str:
    return "".join(rng.choices(SYLLABLES, k=rng.randrange(2, 5))) + rng.choice(("", "n", "r", "s", "l", "t"))


def _word_and_letter(rng: random.Random) -> tuple[str, str]:
    word = _word(rng)
    return word, rng.choice(word) if rng.random() < 0.8 else rng.choice(string.ascii_lowercase)
