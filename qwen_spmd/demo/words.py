# SPDX-License-Identifier: Apache-2.0
"""Word lists and small tables of facts that the demo's tasks draw from, and a few rules of English."""


def words(text: str) -> list[str]:
    """Lists as plain text, which is easier to read and to extend."""
    return text.split()


NAMES = words(
    "Anna Ben Clara David Emma Felix Grace Hugo Iris Jack Karen Leo Maria Nora Oscar Paula Quinn Rosa Sam Tina "
    "Victor Wendy Yara Zoe Adam Bella Carl Dora Eric Fiona George Helen Ivan Julia Kevin Laura Martin Nina Olga "
    "Peter"
)

CAPITALS = {
    "Argentina": "Buenos Aires",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Belgium": "Brussels",
    "Brazil": "Brasilia",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Cuba": "Havana",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "England": "London",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "India": "New Delhi",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Mexico": "Mexico City",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Russia": "Moscow",
    "South Korea": "Seoul",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Switzerland": "Bern",
    "Thailand": "Bangkok",
    "Turkey": "Ankara",
    "the Netherlands": "Amsterdam",
    "the United States": "Washington",
}

CITIES = words(
    "Paris London Rome Berlin Madrid Vienna Oslo Dublin Athens Tokyo Lima Cairo Seoul Moscow Warsaw Lisbon Prague "
    "Boston Chicago Toronto Sydney Delhi Geneva Milan Munich Zurich Hamburg Porto Venice Naples"
)

COLOURS = words("red blue green yellow black white orange purple brown pink grey silver")

ANIMALS = words(
    "cat dog horse rabbit mouse tiger lion bear wolf fox deer eagle falcon owl duck goat sheep frog whale dolphin "
    "turtle snake camel monkey panda otter"
)

FOODS = words(
    "apple banana orange lemon cherry grape melon peach pear plum egg soup pizza salad cake cookie tomato potato "
    "onion carrot pancake sandwich muffin pie nut olive"
)

THINGS = words(
    "book pen pencil lamp table chair door window clock phone key box bag bottle cup plate spoon knife hammer "
    "ladder rope bell drum guitar piano violin camera mirror candle basket blanket pillow hat coat shoe glove ring "
    "coin map boat train bridge garden tower castle forest river mountain island desert planet"
)

ADJECTIVES = words(
    "amber ancient bold brave bright broken calm clever cold copper crimson curious dark deep distant eager early "
    "empty fast fierce gentle giant golden happy heavy hidden hollow humble icy iron ivory jolly kind large little "
    "lonely lucky noble old pale proud quick quiet rapid rough royal rusty sharp shy silent small soft stormy "
    "strong sunny swift tall tiny velvet warm wild wise wooden young"
)

JOBS = words("teacher doctor nurse farmer baker pilot painter lawyer singer writer driver engineer chef dentist")

HOBBIES = words("chess tennis football painting singing dancing cooking reading fishing hiking swimming cycling")

WEEKDAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

MONTHS = words("January February March April May June July August September October November December")

MONTH_DAYS = dict(zip(MONTHS, (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31), strict=True))

OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "light": "dark",
    "young": "old",
    "happy": "sad",
    "early": "late",
    "open": "closed",
    "full": "empty",
    "hard": "soft",
    "high": "low",
    "long": "short",
    "loud": "quiet",
    "rich": "poor",
    "strong": "weak",
    "wet": "dry",
    "clean": "dirty",
    "near": "far",
    "thick": "thin",
    "wide": "narrow",
    "up": "down",
    "left": "right",
    "day": "night",
    "win": "lose",
    "buy": "sell",
    "push": "pull",
    "begin": "end",
    "love": "hate",
}

SOUNDS = {
    "dog": "woof",
    "cat": "meow",
    "cow": "moo",
    "duck": "quack",
    "sheep": "baa",
    "lion": "roar",
    "horse": "neigh",
    "pig": "oink",
    "frog": "croak",
    "owl": "hoot",
}

ONES = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)

TENS = words("twenty thirty forty fifty sixty seventy eighty ninety")

SYLLABLES = words(
    "ba be bi bo bu da de di do du fa fe fi fo ga ge go ha he hi ho ka ke ki ko la le li lo lu ma me mi mo mu na ne "
    "ni no nu pa pe pi po ra re ri ro ru sa se si so su ta te ti to tu va ve vi vo wa we wi ya yo za ze zo"
)

NOUNS = tuple(sorted({*ANIMALS, *FOODS, *THINGS}))
"""Every concrete noun; sorted, because code that draws from it must not depend on the order of a set."""

SPELLING_WORDS = tuple(
    sorted(
        {
            *NOUNS,
            *ADJECTIVES,
            *JOBS,
            *HOBBIES,
            *COLOURS,
            *words(
                "strawberry raspberry blueberry mississippi committee bookkeeper balloon coffee pepper letter summer "
                "butterfly elephant kangaroo parallel successful address possession tennessee chocolate"
            ),
        }
    )
)


def plural(noun: str) -> str:
    """More than one of a noun of the lists above."""
    if noun.endswith("fe"):
        return f"{noun[:-2]}ves"
    if noun.endswith("f"):
        return f"{noun[:-1]}ves"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    if noun.endswith(("x", "s", "ch", "tato", "mato")):
        return f"{noun}es"
    return {"mouse": "mice", "sheep": "sheep", "deer": "deer", "goose": "geese"}.get(noun, f"{noun}s")


def a(noun: str) -> str:
    """The noun with its article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def in_words(n: int) -> str:
    """0 <= n < 1000 in English words."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10 - 2] + (f"-{ONES[n % 10]}" if n % 10 else "")
    return f"{ONES[n // 100]} hundred" + (f" and {in_words(n % 100)}" if n % 100 else "")
