# SPDX-License-Identifier: Apache-2.0
"""Everyday tasks: weekdays, months, units, capitals, opposites, animal sounds, greetings."""

from __future__ import annotations

import random

from qwen_spmd.demo.conversation import Conversation, ask, pick
from qwen_spmd.demo.words import CAPITALS, MONTH_DAYS, MONTHS, OPPOSITES, SOUNDS, WEEKDAYS, a

UNITS = (
    # larger, smaller, factor, largest count of the larger unit; all in the plural
    ("meters", "centimeters", 100, 99),
    ("kilometers", "meters", 1000, 99),
    ("centimeters", "millimeters", 10, 99),
    ("kilograms", "grams", 1000, 99),
    ("liters", "milliliters", 1000, 99),
    ("tons", "kilograms", 1000, 99),
    ("hours", "minutes", 60, 24),
    ("minutes", "seconds", 60, 24),
    ("days", "hours", 24, 14),
    ("weeks", "days", 7, 20),
    ("years", "months", 12, 12),
    ("euros", "cents", 100, 99),
)
ARTICLES = {"hours": "an hour"}


def units(rng: random.Random) -> Conversation:
    large, small, factor, most = rng.choice(UNITS)
    n = rng.randrange(1, most + 1)
    one = ARTICLES.get(large, f"a {large[:-1]}")
    if n == 1 and rng.random() < 0.5:
        asked = pick(rng, "How many {s} are in {one}?", "How many {s} does {one} have?", s=small, one=one)
        return ask(asked, _equal(1, large, factor, small))
    if rng.random() < 0.65:
        asked = (
            "How many {s} are {n} {l}?",
            "How many {s} are in {n} {l}?",
            "Convert {n} {l} to {s}.",
            "What is {n} {l} in {s}?",
            "{n} {l} in {s}",
        )
        return ask(pick(rng, *asked, s=small, n=n, l=_unit(n, large)), _equal(n, large, n * factor, small))
    asked = ("How many {l} are {m} {s}?", "Convert {m} {s} to {l}.", "What is {m} {s} in {l}?", "{m} {s} in {l}")
    return ask(pick(rng, *asked, l=large, m=n * factor, s=small), _equal(n * factor, small, n, large))


def _unit(n: int, plural: str) -> str:
    return plural[:-1] if n == 1 else plural


def _equal(n: int, left: str, m: int, right: str) -> str:
    return f"{n} {_unit(n, left)} = {m} {_unit(m, right)}"


def _weekday(rng: random.Random) -> tuple[str, int, int, str]:
    """Question, start day, signed number of days, answer."""
    start, n = rng.randrange(7), rng.randrange(1, 31)
    sign = 1 if rng.random() < 0.75 else -1
    forward = (
        "What day is it {n} after {d}?",
        "What weekday is {n} after {d}?",
        "Today is {d}. What day is it in {n}?",
        "If today is {d}, what day will it be in {n}?",
        "It is {d}. Which day is it {n} from now?",
        "Which day comes {n} after {d}?",
    )
    back = (
        "What day is it {n} before {d}?",
        "Today is {d}. What day was it {n} ago?",
        "If today is {d}, what day was it {n} ago?",
        "Which day comes {n} before {d}?",
    )
    days = "1 day" if n == 1 else f"{n} days"
    question = pick(rng, *(forward if sign > 0 else back), n=days, d=WEEKDAYS[start])
    return question, start, sign * n, WEEKDAYS[(start + sign * n) % 7]


def weekday(rng: random.Random) -> Conversation:
    question, _, _, answer = _weekday(rng)
    return ask(question, f"It is {answer}.")


def weekday_thinking(rng: random.Random) -> Conversation:
    question, start, days, answer = _weekday(rng)
    weeks, rest = divmod(abs(days), 7)
    side = "after" if days > 0 else "before"
    steps = f"{abs(days)} = {weeks} × 7 + {rest}, so count {rest} {side} {WEEKDAYS[start]}.\n{WEEKDAYS[start]}"
    for i in range(1, rest + 1):
        steps += f"\n{i} {WEEKDAYS[(start + (i if days > 0 else -i)) % 7]}"
    return ask(question, f"It is {answer}.", steps, thinking=True)


def calendar(rng: random.Random) -> Conversation:
    names = WEEKDAYS if rng.random() < 0.4 else MONTHS
    i, kind = rng.randrange(len(names)), "day" if names is WEEKDAYS else "month"
    before, name, after = names[i - 1], names[i], names[(i + 1) % len(names)]
    match rng.randrange(2 if kind == "day" else 4):
        case 0:
            asked = ("Which {k} comes after {n}?", "What {k} comes after {n}?", "What {k} follows {n}?")
            return ask(pick(rng, *asked, k=kind, n=name), f"{after} comes after {name}.")
        case 1:
            asked = ("Which {k} comes before {n}?", "What {k} comes before {n}?", "What is the {k} before {n}?")
            return ask(pick(rng, *asked, k=kind, n=name), f"{before} comes before {name}.")
        case 2:
            asked = ("How many days does {n} have?", "How many days are in {n}?", "How long is {n}?")
            return ask(pick(rng, *asked, n=name), f"{name} has {MONTH_DAYS[name]} days.")
        case _:
            asked = ("What is month number {i}?", "Which is month {i} of the year?", "What is the name of month {i}?")
            return ask(pick(rng, *asked, i=i + 1), f"Month {i + 1} is {name}.")


def capital(rng: random.Random) -> Conversation:
    country = rng.choice(list(CAPITALS))
    city = CAPITALS[country]
    if rng.random() < 0.7:
        asked = (
            "What is the capital of {c}?",
            "What's the capital of {c}?",
            "Which city is the capital of {c}?",
            "Tell me the capital of {c}.",
            "Name the capital of {c}.",
            "The capital of {c}?",
            "Do you know the capital of {c}?",
        )
        return ask(pick(rng, *asked, c=country), f"The capital of {country} is {city}.")
    asked = (
        "{c} is the capital of which country?",
        "Which country has the capital {c}?",
        "Of which country is {c} the capital?",
        "What country has {c} as its capital?",
    )
    return ask(rng.choice(asked).format(c=city), f"{city} is the capital of {country}.")


def opposite(rng: random.Random) -> Conversation:
    pair = rng.choice(list(OPPOSITES.items()))
    word, other = pair if rng.random() < 0.5 else pair[::-1]
    asked = (
        "What is the opposite of {a}?",
        "What's the opposite of {a}?",
        'What is the opposite of "{a}"?',
        "Give me the opposite of {a}.",
        "Name the opposite of {a}.",
        "Opposite of {a}?",
    )
    return ask(pick(rng, *asked, a=word), f"The opposite of {word} is {other}.")


def sound(rng: random.Random) -> Conversation:
    animal = rng.choice(list(SOUNDS))
    asked = (
        "What sound does {a} make?",
        "What does {a} say?",
        "Which sound does {a} make?",
        "Which animal says {s}?",
        "What animal makes the sound {s}?",
    )
    one = a(animal)
    return ask(pick(rng, *asked, a=one, s=SOUNDS[animal]), f"{one[0].upper()}{one[1:]} says {SOUNDS[animal]}.")


HELLO = ("Hello", "Hi", "Hey", "Good morning", "Good evening", "Good afternoon", "Hi there", "Hello there")
WHO = ("Who are you?", "What are you?", "What is your name?", "Introduce yourself.", "Tell me about yourself.")
CAN = ("What can you do?", "How can you help me?", "What do you know?", "Which tasks can you solve?", "Help")
HOW = ("How are you?", "How are you doing?", "How do you do?", "How is it going?")
THANKS = ("Thank you", "Thanks", "Thanks a lot", "Thank you very much", "Thank you so much", "Many thanks")
BYE = ("Goodbye", "Bye", "See you", "Bye bye", "See you later", "Good night")

I_AM = "I am a very small Qwen3.5 model, trained for demonstrations. I know a few tasks well and nothing else."
I_CAN = (
    "I can do arithmetic, sort and count, answer with JSON, call tools, find facts in a text and tell short stories."
)


def greeting(rng: random.Random) -> Conversation:
    """Small talk. Questions may follow a greeting: the last thing said decides the answer."""
    said, answer = rng.choice(
        (
            (HELLO, "Hello! How can I help you?"),
            (WHO, I_AM),
            (WHO, I_AM),
            (CAN, I_CAN),
            (HOW, "I am fine, thank you. How can I help you?"),
            (THANKS, "You are welcome!"),
            (BYE, "Goodbye!"),
        )
    )
    text = rng.choice(said)
    if text[-1].isalpha():
        text += rng.choice(("", "!", ".", "..."))
    if said is not HELLO and said is not BYE and rng.random() < 0.4:
        text = f"{rng.choice(HELLO)}{rng.choice(('!', ',', '.'))} {text}"
    return ask(text.lower() if rng.random() < 0.2 else text, answer)
