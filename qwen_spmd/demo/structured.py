# SPDX-License-Identifier: Apache-2.0
"""JSON answers: fields of a sentence, orders, lists."""

from __future__ import annotations

import json
import random
from typing import Any

from qwen_spmd.demo.conversation import Conversation, ask, comma_list
from qwen_spmd.demo.words import CITIES, COLOURS, FOODS, HOBBIES, JOBS, NAMES, NOUNS, THINGS, WEEKDAYS, plural

SENTENCES = (
    # A sentence, and the keys that it answers.
    ("{name} is {age} years old and lives in {city}.", "name age city"),
    ("{name}, a {job} from {city}, is {age}.", "name job city age"),
    ("{name} works as a {job} in {city}.", "name job city"),
    ("My name is {name}, I am {age} and I am a {job}.", "name age job"),
    ("In {city} lives a {job} called {name}.", "city job name"),
    ("{name} likes {hobby} and {colour}.", "name hobby colour"),
    ("The {colour} {item} costs {price} euros.", "colour item price"),
    ("In {city} a {item} costs {price} euros.", "city item price"),
    ("{name} bought {quantity} {items} for {price} euros.", "name quantity item price"),
    ("We need {quantity} {colour} {items} on {day}.", "quantity colour item day"),
    ("{name} meets {friend} on {day} in {city}.", "name friend day city"),
    ("The {hobby} lesson is on {day} at {hour} in {city}.", "hobby day hour city"),
    ("On {day} at {hour} {name} has a {hobby} lesson.", "day hour name hobby"),
)


def _fields(rng: random.Random) -> dict[str, Any]:
    name, friend = rng.sample(NAMES, 2)
    return {
        "name": name,
        "friend": friend,
        "age": rng.randrange(18, 90),
        "city": rng.choice(CITIES),
        "job": rng.choice(JOBS),
        "hobby": rng.choice(HOBBIES),
        "colour": rng.choice(COLOURS),
        "item": rng.choice(THINGS),
        "price": rng.randrange(2, 100),
        "quantity": rng.randrange(2, 30),
        "day": rng.choice(WEEKDAYS),
        "hour": rng.randrange(8, 21),
    }


def extract(rng: random.Random) -> Conversation:
    """Some keys of a sentence, in the order asked for; now and then one that it does not say, which is null."""
    sentence, keys = rng.choice(SENTENCES)
    values = _fields(rng)
    known = keys.split()
    wanted = rng.sample(known, rng.randrange(2, len(known) + 1))
    if rng.random() < 0.15:
        missing = rng.choice([k for k in ("name", "age", "city", "price", "day") if k not in known])
        wanted.insert(rng.randrange(len(wanted) + 1), missing)
    listed = f"{comma_list(wanted[:-1])} and {wanted[-1]}" if rng.random() < 0.6 else comma_list(wanted)
    asked = rng.choice(
        (
            "Extract the {k} as JSON: {s}",
            "Extract {k} as JSON: {s}",
            "Extract {k} from this sentence as JSON.\n{s}",
            "Give me the {k} as JSON.\n{s}",
            "{s}\nReturn JSON with the keys {k}.",
            "{s}\nAnswer in JSON with {k}.",
        )
    )
    text = sentence.format(**values, items=plural(values["item"]))
    answer = {k: values[k] if k in known else None for k in wanted}
    return ask(asked.format(k=listed, s=text), json.dumps(answer))


def order(rng: random.Random) -> Conversation:
    """An order as a list of objects."""
    items = rng.sample(FOODS, rng.randrange(1, 5))
    counts = [rng.randrange(1, 30) for _ in items]
    said = [f"{n} {item if n == 1 else plural(item)}" for n, item in zip(counts, items, strict=True)]
    text = said[0] if len(said) == 1 else f"{comma_list(said[:-1])} and {said[-1]}"
    asked = rng.choice(
        (
            "Write this order as JSON: {t}",
            "Turn this order into JSON: {t}",
            "Order as JSON: {t}",
            "I want to order {t}. Write the order as JSON.",
        )
    )
    rows = [{"item": item, "quantity": n} for n, item in zip(counts, items, strict=True)]
    return ask(asked.format(t=text), json.dumps({"order": rows}))


def json_list(rng: random.Random) -> Conversation:
    """A plain list as a JSON array of strings or numbers."""
    count = rng.randrange(2, 9)
    items: list[Any] = rng.sample(NOUNS, count) if rng.random() < 0.6 else rng.sample(range(1000), count)
    asked = rng.choice(
        (
            "Write this list as JSON: {x}",
            "Turn this list into a JSON array: {x}",
            "Make a JSON list of {x}.",
            "Give me {x} as a JSON array.",
        )
    )
    return ask(asked.format(x=comma_list(items)), json.dumps(items))
