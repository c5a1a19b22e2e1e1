# SPDX-License-Identifier: Apache-2.0
"""Tasks that need the context: key-value lists, facts in a long text, facts of an earlier turn. And short stories."""

from __future__ import annotations

import random
from collections.abc import Callable

from qwen_spmd.demo.conversation import Conversation, Message, ask, pick, reply
from qwen_spmd.demo.words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLOURS,
    FOODS,
    HOBBIES,
    JOBS,
    NAMES,
    NOUNS,
    THINGS,
    a,
    plural,
    words,
)

Turn = tuple[str, str]


def _keys(rng: random.Random, n: int) -> list[str]:
    """n different keys of two words."""
    pairs = rng.sample(range(len(ADJECTIVES) * len(NOUNS)), n)
    return [f"{ADJECTIVES[i % len(ADJECTIVES)]} {NOUNS[i // len(ADJECTIVES)]}" for i in pairs]


def _value(rng: random.Random) -> str:
    return str(rng.randrange(100, 1000))


def _table(rng: random.Random, tokens: float) -> tuple[str, Callable[[random.Random], Turn]]:
    """A list of codes, and a drawer of questions about it."""
    style, length = rng.choice((("{k}: {v}", 8), ("{k} = {v}", 8), ("The code of the {k} is {v}.", 12)))
    keys = _keys(rng, max(2, int(tokens / length)))
    codes = {key: _value(rng) for key in keys}
    intro = rng.choice(("Remember these codes.", "Here is a list of codes.", "Codes:"))
    text = "\n".join((intro, *(style.format(k=k, v=v) for k, v in codes.items())))

    def question(rng: random.Random) -> Turn:
        key = rng.choice(keys)
        asked = (
            "What is the code of the {k}?",
            "Which code does the {k} have?",
            "Tell me the code of the {k}.",
            "What is the code for {k}?",
        )
        return pick(rng, *asked, k=key), f"The code of the {key} is {codes[key]}."

    return text, question


def _needles(rng: random.Random, sentences: int) -> tuple[str, Callable[[random.Random], Turn]]:
    """Plain sentences with a few codes among them, and a drawer of questions about the codes."""
    keys = _keys(rng, rng.randrange(2, 6))
    codes = {key: _value(rng) for key in keys}
    lines = [_filler(rng) for _ in range(sentences)]
    for key, code in codes.items():
        lines.insert(rng.randrange(len(lines) + 1), f"The code of the {key} is {code}.")

    def question(rng: random.Random) -> Turn:
        key = rng.choice(keys)
        asked = ("What is the code of the {k}?", "Which code does the {k} have?", "Tell me the code of the {k}.")
        return pick(rng, *asked, k=key), f"The code of the {key} is {codes[key]}."

    return " ".join(lines), question


def _filler(rng: random.Random) -> str:
    pattern = rng.choice(
        (
            "{n} went to {c} with {t}.",
            "The {x} was near {c}.",
            "It was {a} day in {c}.",
            "{n} gave {t} to {m}.",
            "There was {t} in the {x}'s garden.",
            "{n} and {m} like {f}.",
        )
    )
    n, m = rng.sample(NAMES, 2)
    return pattern.format(
        n=n,
        m=m,
        c=rng.choice(CITIES),
        t=f"{(look := a(rng.choice(ADJECTIVES)))} {rng.choice(THINGS)}",
        a=look,
        x=f"{rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)}",
        f=plural(rng.choice(FOODS)),
    )


def _recall(rng: random.Random, low: int, high: int, turns: int) -> Conversation:
    """About low to high tokens of text, then questions, one a turn."""
    tokens = low * (high / low) ** rng.random()
    if rng.random() < 0.6:
        text, question = _table(rng, tokens)
    else:
        text, question = _needles(rng, max(2, int(tokens / 11)))
    messages: list[Message] = []
    for i in range(turns):
        asked, answer = question(rng)
        messages.append({"role": "user", "content": f"{text}\n\n{asked}" if i == 0 else asked})
        messages.append(reply(answer))
    return Conversation(messages)


def recall_short(rng: random.Random) -> Conversation:
    return _recall(rng, 30, 350, rng.randrange(1, 4))


def recall_long(rng: random.Random) -> Conversation:
    return _recall(rng, 400, 3600, rng.randrange(1, 9))


FACTS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    # fact: what may be said, how it is answered, what may be asked later
    "name": (("My name is {v}.", "I am {v}.", "Call me {v}."), "Your name is {v}.", ("What is my name?", "Who am I?")),
    "city": (
        ("I live in {v}.", "I am from {v}.", "My home is in {v}."),
        "You live in {v}.",
        ("Where do I live?", "In which city do I live?", "Which city am I from?"),
    ),
    "colour": (
        ("My favourite colour is {v}.", "I like {v} most of all colours."),
        "Your favourite colour is {v}.",
        ("What is my favourite colour?", "Which colour do I like?"),
    ),
    "age": (
        ("I am {v} years old.", "My age is {v}."),
        "You are {v} years old.",
        ("How old am I?", "What is my age?"),
    ),
    "job": (
        ("I work as a {v}.", "My job is {v}.", "I am a {v} by profession."),
        "Your job is {v}.",
        ("What is my job?", "What do I do for a living?"),
    ),
    "pet": (
        ("My pet is a {v}.", "I have a {v} at home.", "My pet at home is a {v}."),
        "Your pet is a {v}.",
        ("What pet do I have?", "Which animal is my pet?", "What is my pet?"),
    ),
    "food": (
        ("I like to eat {v}.", "I love {v}.", "I could eat {v} all day."),
        "You like to eat {v}.",
        ("What is my favourite food?", "What do I like to eat?"),
    ),
    "hobby": (
        ("My hobby is {v}.", "I like {v} in my free time."),
        "Your hobby is {v}.",
        ("What is my hobby?", "What do I do in my free time?"),
    ),
}

SOURCES = {
    "name": NAMES,
    "city": CITIES,
    "colour": COLOURS,
    "age": [str(i) for i in range(18, 90)],
    "job": JOBS,
    "pet": ANIMALS,
    "food": [plural(food) for food in FOODS],
    "hobby": HOBBIES,
}


def chat_memory(rng: random.Random, between: Callable[[random.Random], Conversation] | None = None) -> Conversation:
    """The user tells some facts, talks of something else (`between`), and asks for one of the facts."""
    facts = rng.sample(list(FACTS), rng.randrange(1, 5))
    values = {fact: rng.choice(SOURCES[fact]) for fact in facts}
    messages: list[Message] = []
    left = list(facts)
    while left:
        now, left = left[: (n := rng.choice((1, 1, 2)))], left[n:]
        said = " ".join(rng.choice(FACTS[fact][0]).format(v=values[fact]) for fact in now)
        confirmed = " ".join(FACTS[fact][1].format(v=values[fact]) for fact in now)
        messages += [{"role": "user", "content": said}, reply(f"I will remember: {confirmed}")]
        if between is not None and rng.random() < 0.3:
            messages += between(rng).messages
    for _ in range(rng.randrange(1, 4)):
        if rng.random() < 0.12:
            fact = rng.choice([f for f in FACTS if f not in values])
            answer = "You have not told me."
        else:
            fact = rng.choice(facts)
            answer = FACTS[fact][1].format(v=values[fact])
        messages += [{"role": "user", "content": pick(rng, *FACTS[fact][2])}, reply(answer)]
    return Conversation(messages)


def story(rng: random.Random) -> Conversation:
    """A short story about an animal and a thing. Many are right, so it is not graded."""
    hero, thing = rng.choice(ANIMALS), rng.choice(THINGS)
    asked = (
        "Tell me a story about {h}.",
        "Tell me a short story about {h} and a {t}.",
        "Write a story about {h}.",
        "Write a short story with {h} and {t}.",
    )
    phrase = rng.choice(asked)
    question = pick(rng, phrase, h=a(hero), t=a(thing))
    name, friend = rng.sample(NAMES, 2)
    place = rng.choice(words("forest garden village castle valley harbour meadow town"))
    mood, size, look = rng.sample(ADJECTIVES, 3)
    other = rng.choice([x for x in ANIMALS if x != hero])
    opening = rng.choice(
        (
            f"Once upon a time there was {a(mood)} {hero} called {name}.",
            f"In {a(size)} {place} lived {a(mood)} {hero}. Its name was {name}.",
            f"Long ago {a(mood)} {hero} named {name} lived near {a(place)}.",
        )
    )
    wish = rng.choice(
        (
            f"{name} wanted nothing more than {a(look)} {thing}.",
            f"One morning {name} found {a(look)} {thing} on the road.",
            f"{name} had lost {a(look)} {thing} and looked for it every day.",
        )
    )
    meeting = rng.choice(
        (
            f"On the way {name} met {a(other)} called {friend}.",
            f"Then {a(other)} came by. It was {friend}.",
            f"The {other} {friend} heard about it and came to help.",
        )
    )
    turn = rng.choice(
        (
            f'"Let us look in the {place} together," said {friend}.',
            f'"I know where to go," said {friend}, and they walked until the evening.',
            f'"Do not be afraid," said {friend}. "Two can do more than one."',
        )
    )
    end = rng.choice(
        (
            f"At last they had the {thing}, and {name} and {friend} stayed friends forever.",
            f"In the end the {thing} belonged to both, and everybody in the {place} was happy.",
            f"They went home with the {thing}, ate some {plural(rng.choice(FOODS))} and slept well.",
        )
    )
    return ask(question, " ".join((opening, wish, meeting, turn, end)))
