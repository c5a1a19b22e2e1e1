# SPDX-License-Identifier: Apache-2.0
"""Tool calls: pick the right tool, fill in its arguments, call in parallel, answer from what the tools return.

The tools' names, parameter names and descriptions vary from one conversation to the next, so that a model has to read
the declarations in the prompt.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

from qwen_spmd.demo.conversation import Conversation, Message, pick
from qwen_spmd.demo.words import (
    ADJECTIVES,
    CITIES,
    COLOURS,
    FOODS,
    NAMES,
    NOUNS,
    SYLLABLES,
    THINGS,
    WEEKDAYS,
    plural,
    words,
)

LANGUAGES = words("French German Spanish Italian Polish Greek Danish Finnish")
CURRENCIES = ["euros", "dollars", "pounds", "yen", "francs", "pesos"]
ROOMS = words("kitchen bedroom bathroom office garage hall garden cellar")
SKIES = ["sunny", "cloudy", "rainy", "windy", "snowy", "foggy"]

Values = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A tool under all of its names.

    parameters  key -> (names, JSON type)
    asks        how a person asks for it, with the keys in braces
    draw        values for the keys
    result      what the tool returns for some values, and the answer that this makes
    """

    names: tuple[str, ...]
    about: tuple[str, ...]
    parameters: dict[str, tuple[tuple[str, ...], str]]
    asks: tuple[str, ...]
    draw: Callable[[random.Random], Values]
    result: Callable[[random.Random, Values], tuple[Values, str]]


def _done(text: str) -> Callable[[random.Random, Values], tuple[Values, str]]:
    return lambda rng, v: ({"status": "ok"}, text.format(**v))


def _weather(rng: random.Random, v: Values) -> tuple[Values, str]:
    degrees, sky = rng.randrange(1, 36), rng.choice(SKIES)
    return {"degrees": degrees, "sky": sky}, f"It is {degrees} degrees and {sky} in {v['city']}."


def _clock(rng: random.Random, v: Values) -> tuple[Values, str]:
    time = f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    return {"time": time}, f"It is {time} in {v['city']}."


def _money(rng: random.Random, v: Values) -> tuple[Values, str]:
    result = rng.randrange(2, 1000)
    return {"result": result}, f"{v['amount']} {v['source']} are {result} {v['target']}."


def _price(rng: random.Random, v: Values) -> tuple[Values, str]:
    price = rng.randrange(2, 1000)
    return {"price": price}, f"The price of the {v['product']} is {price} euros."


def _route(rng: random.Random, v: Values) -> tuple[Values, str]:
    km = rng.randrange(20, 1000)
    return {"km": km}, f"It is {km} km from {v['start']} to {v['goal']}."


def _books(rng: random.Random, v: Values) -> tuple[Values, str]:
    title = f"The {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    return {"title": title}, f"I found the book {title}."


def _translation(rng: random.Random, v: Values) -> tuple[Values, str]:
    word = "".join(rng.choices(SYLLABLES, k=3))
    return {"translation": word}, f'In {v["language"]}: "{word}"'


def _two(rng: random.Random, source: Any, a: str, b: str) -> Values:
    x, y = rng.sample(source, 2)
    return {a: x, b: y}


KINDS = (
    Kind(
        ("get_weather", "weather", "current_weather", "get_forecast"),
        ("Get the weather of a city", "The current weather"),
        {"city": (("city", "location", "place"), "string")},
        ("What is the weather in {city}?", "How is the weather in {city}?", "Is it warm in {city}?"),
        lambda rng: {"city": rng.choice(CITIES)},
        _weather,
    ),
    Kind(
        ("get_time", "clock", "current_time", "local_time"),
        ("Get the time in a city", "The current local time"),
        {"city": (("city", "location", "place"), "string")},
        ("What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city}?"),
        lambda rng: {"city": rng.choice(CITIES)},
        _clock,
    ),
    Kind(
        ("convert_currency", "convert_money", "exchange"),
        ("Convert an amount of money", "Exchange one currency for another"),
        {
            "amount": (("amount", "value"), "integer"),
            "source": (("from", "source", "from_currency"), "string"),
            "target": (("to", "target", "to_currency"), "string"),
        },
        ("Convert {amount} {source} to {target}.", "How much are {amount} {source} in {target}?"),
        lambda rng: {"amount": rng.randrange(2, 1000), **_two(rng, CURRENCIES, "source", "target")},
        _money,
    ),
    Kind(
        ("set_timer", "start_timer", "timer"),
        ("Start a timer", "Set a timer for some minutes"),
        {"minutes": (("minutes", "duration", "length"), "integer")},
        ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.", "Wake me in {minutes} minutes."),
        lambda rng: {"minutes": rng.randrange(2, 100)},
        _done("The timer is set for {minutes} minutes."),
    ),
    Kind(
        ("send_message", "send_text", "message"),
        ("Send a message to a person", "Send somebody a text"),
        {"person": (("to", "recipient", "person"), "string"), "text": (("text", "message", "body"), "string")},
        ("Send {person} the message: {text}", "Write to {person}: {text}", 'Send "{text}" to {person}.'),
        lambda rng: {"person": rng.choice(NAMES), "text": _short_text(rng)},
        _done("I sent your message to {person}."),
    ),
    Kind(
        ("get_price", "price_of", "find_price"),
        ("Get the price of a product", "Look up what something costs"),
        {"product": (("product", "item", "article"), "string")},
        ("What does the {product} cost?", "What is the price of the {product}?", "How expensive is the {product}?"),
        lambda rng: {"product": rng.choice(THINGS)},
        _price,
    ),
    Kind(
        ("search_books", "find_book", "book_search"),
        ("Search for books", "Find a book on a topic"),
        {"topic": (("topic", "query", "subject"), "string")},
        ("Find a book about {topic}.", "Search for books about {topic}.", "I want to read a book about {topic}."),
        lambda rng: {"topic": f"{rng.choice(ADJECTIVES)} {plural(rng.choice(NOUNS))}"},
        _books,
    ),
    Kind(
        ("add_event", "create_event", "new_appointment"),
        ("Add an event to the calendar", "Make an appointment"),
        {
            "title": (("title", "name", "event"), "string"),
            "day": (("day", "date", "weekday"), "string"),
            "hour": (("hour", "time", "start"), "integer"),
        },
        ("Add {title} on {day} at {hour}.", "Put {title} into my calendar for {day} at {hour}."),
        lambda rng: {
            "title": f"{rng.choice(('lunch', 'dinner', 'meeting', 'training'))} with {rng.choice(NAMES)}",
            "day": rng.choice(WEEKDAYS),
            "hour": rng.randrange(7, 22),
        },
        _done("I added {title} on {day} at {hour}."),
    ),
    Kind(
        ("translate", "translate_text", "translation"),
        ("Translate a text", "Translate words into a language"),
        {"text": (("text", "words", "sentence"), "string"), "language": (("language", "to", "target"), "string")},
        ('Translate "{text}" into {language}.', 'How do you say "{text}" in {language}?'),
        lambda rng: {"text": _short_text(rng), "language": rng.choice(LANGUAGES)},
        _translation,
    ),
    Kind(
        ("switch_light", "set_light", "light"),
        ("Switch the light of a room", "Control the lamps"),
        {"room": (("room", "place", "location"), "string"), "state": (("state", "switch", "mode"), "string")},
        ("Turn {state} the light in the {room}.", "Switch the {room} light {state}.", "Turn the {room} light {state}."),
        lambda rng: {"room": rng.choice(ROOMS), "state": rng.choice(("on", "off"))},
        _done("The light in the {room} is {state}."),
    ),
    Kind(
        ("find_route", "get_distance", "route"),
        ("Find the way between two cities", "The distance between two cities"),
        {"start": (("start", "from", "origin"), "string"), "goal": (("end", "to", "destination"), "string")},
        ("How far is it from {start} to {goal}?", "Find the way from {start} to {goal}."),
        lambda rng: _two(rng, CITIES, "start", "goal"),
        _route,
    ),
    Kind(
        ("order_food", "buy_food", "food_order"),
        ("Order food", "Buy something to eat"),
        {"food": (("food", "item", "dish"), "string"), "count": (("quantity", "count", "number"), "integer")},
        ("Order {count} {foods}.", "I want {count} {foods}.", "Buy {count} {foods} for me."),
        lambda rng: {"food": (food := rng.choice(FOODS)), "foods": plural(food), "count": rng.randrange(2, 20)},
        _done("I ordered {count} {foods}."),
    ),
    Kind(
        ("paint", "mix_colours", "draw"),
        ("Mix colours", "Make a picture from colours"),
        {"colours": (("colours", "list", "names"), "array")},
        ("Mix {colours_text}.", "Paint something with {colours_text}."),
        lambda rng: _colours(rng),
        _done("I used {colours_text}."),
    ),
)


def _colours(rng: random.Random) -> Values:
    colours = rng.sample(COLOURS, rng.randrange(2, 5))
    return {"colours": colours, "colours_text": f"{', '.join(colours[:-1])} and {colours[-1]}"}


def _short_text(rng: random.Random) -> str:
    pattern = rng.choice(("I like the {a} {n}", "The {n} is {a}", "Where is my {n}", "Bring the {a} {n}", "{a} {n}"))
    return pattern.format(a=rng.choice(ADJECTIVES), n=rng.choice(NOUNS))


@dataclasses.dataclass(frozen=True)
class Offer:
    """A tool as one conversation declares it: the names are chosen."""

    kind: Kind
    name: str
    about: str
    keys: dict[str, str]

    def declaration(self) -> dict[str, Any]:
        properties = {name: {"type": self.kind.parameters[key][1]} for key, name in self.keys.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.about, "parameters": parameters}
        return {"type": "function", "function": function}

    def call(self, values: Values) -> dict[str, Any]:
        arguments = {name: values[key] for key, name in self.keys.items()}
        return {"type": "function", "function": {"name": self.name, "arguments": arguments}}


def _offer(rng: random.Random, kind: Kind) -> Offer:
    keys = {key: rng.choice(names) for key, (names, _) in kind.parameters.items()}
    if len(set(keys.values())) < len(keys):  # two parameters drew the same name
        keys = {key: names[0] for key, (names, _) in kind.parameters.items()}
    return Offer(kind, rng.choice(kind.names), rng.choice(kind.about), keys)


def _offers(rng: random.Random) -> list[Offer]:
    return [_offer(rng, kind) for kind in rng.sample(KINDS, rng.randrange(1, 5))]


def _asked(rng: random.Random, offer: Offer) -> tuple[str, Values]:
    values = offer.kind.draw(rng)
    return pick(rng, *offer.kind.asks, **values), values


def _calls(*calls: dict[str, Any]) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def call(rng: random.Random) -> Conversation:
    """One call."""
    offers = _offers(rng)
    chosen = rng.choice(offers)
    question, values = _asked(rng, chosen)
    return Conversation(
        [{"role": "user", "content": question}, _calls(chosen.call(values))],
        tools=[o.declaration() for o in offers],
    )


def parallel_calls(rng: random.Random) -> Conversation:
    """Two or three calls: the same tool or different ones."""
    offers = _offers(rng)
    questions, calls = [], []
    for _ in range(rng.choice((2, 2, 3))):
        offer = rng.choice(offers)
        values = offer.kind.draw(rng)
        questions.append(rng.choice(offer.kind.asks).format(**values))
        calls.append(offer.call(values))
    return Conversation(
        [{"role": "user", "content": " ".join(questions)}, _calls(*calls)],
        tools=[o.declaration() for o in offers],
    )


def answer_from_result(rng: random.Random) -> Conversation:
    """Call, read what the tools return, answer. Sometimes two calls at once."""
    offers = _offers(rng)
    messages: list[Message] = []
    questions, calls, results, answers = [], [], [], []
    for _ in range(1 if rng.random() < 0.7 else 2):
        offer = rng.choice(offers)
        values = offer.kind.draw(rng)
        result, answer = offer.kind.result(rng, values)
        questions.append(rng.choice(offer.kind.asks).format(**values))
        calls.append(offer.call(values))
        results.append({"role": "tool", "content": json.dumps(result)})
        answers.append(answer)
    messages = [{"role": "user", "content": " ".join(questions)}, _calls(*calls), *results]
    messages.append({"role": "assistant", "content": " ".join(answers)})
    return Conversation(messages, tools=[o.declaration() for o in offers])


def missing_tool(rng: random.Random) -> Conversation:
    """A wish that none of the tools can fulfil."""
    kind, *others = rng.sample(KINDS, rng.randrange(2, 5))
    question = pick(rng, *kind.asks, **kind.draw(rng))
    return Conversation(
        [{"role": "user", "content": question}, {"role": "assistant", "content": "I have no tool for that."}],
        tools=[_offer(rng, other).declaration() for other in others],
    )


def offers_for(rng: random.Random) -> list[dict[str, Any]]:
    """Declarations of some tools, for questions that need none of them."""
    return [o.declaration() for o in _offers(rng)]
