# SPDX-License-Identifier: Apache-2.0
"""Arithmetic tasks: small results at once, larger ones with the written method as thinking steps.

Each thinking step drops the last digit of the numbers in the line above, so that a step needs only that line.
"""

from __future__ import annotations

import random

from qwen_spmd.demo.conversation import Conversation, ask, pick
from qwen_spmd.demo.words import in_words

SUM = (
    "What is {a} + {b}?",
    "{a} + {b}",
    "{a}+{b}",
    "{a} + {b} =",
    "{a}+{b}=?",
    "What's {a} plus {b}?",
    "How much is {a} + {b}?",
    "How much is {a} plus {b}?",
    "Add {a} and {b}.",
    "Compute {a} + {b}.",
    "Calculate {a} + {b}.",
    "What is the sum of {a} and {b}?",
    "Can you add {a} and {b}?",
)
DIFFERENCE = (
    "What is {a} - {b}?",
    "{a} - {b}",
    "{a}-{b}",
    "{a} - {b} =",
    "{a}-{b}=?",
    "What's {a} minus {b}?",
    "How much is {a} - {b}?",
    "How much is {a} minus {b}?",
    "Subtract {b} from {a}.",
    "Compute {a} - {b}.",
    "Calculate {a} - {b}.",
    "What is the difference of {a} and {b}?",
    "Take {b} away from {a}.",
)
PRODUCT = (
    "What is {a} × {b}?",
    "What is {a} * {b}?",
    "{a} × {b}",
    "{a} x {b}",
    "{a} * {b}",
    "{a}*{b}",
    "{a} * {b} =",
    "What's {a} times {b}?",
    "How much is {a} times {b}?",
    "Multiply {a} by {b}.",
    "Compute {a} × {b}.",
    "Calculate {a} * {b}.",
    "What is the product of {a} and {b}?",
)


def small_sum(rng: random.Random) -> Conversation:
    a, b = rng.randrange(100), rng.randrange(100)
    return _sum(rng, a, b) if rng.random() < 0.5 else _difference(rng, a, b)


def three_digit_sum(rng: random.Random) -> Conversation:
    a, b = rng.randrange(100, 1000), rng.randrange(10, 1000)
    return _sum(rng, a, b) if rng.random() < 0.5 else _difference(rng, max(a, b), min(a, b))


def times_table(rng: random.Random) -> Conversation:
    a, b = rng.randrange(13), rng.randrange(13)
    return ask(pick(rng, *PRODUCT, a=a, b=b), f"{a} × {b} = {a * b}")


def long_sum(rng: random.Random) -> Conversation:
    a, b = _number(rng), _number(rng)
    question = pick(rng, *SUM, a=a, b=b)
    return ask(question, f"{a} + {b} = {a + b}", add_steps(a, b), thinking=True)


def long_difference(rng: random.Random) -> Conversation:
    a, b = _number(rng), _number(rng)
    if a < b and rng.random() < 0.8:
        a, b = b, a
    question = pick(rng, *DIFFERENCE, a=a, b=b)
    steps = subtract_steps(a, b) if a >= b else f"{a} is less than {b}, the result is negative.\n{subtract_steps(b, a)}"
    return ask(question, f"{a} - {b} = {a - b}", steps, thinking=True)


def long_product(rng: random.Random) -> Conversation:
    a, b = _number(rng, 4), rng.randrange(2, 10)
    question = pick(rng, *PRODUCT, a=a, b=b)
    return ask(question, f"{a} × {b} = {a * b}", multiply_steps(a, b), thinking=True)


def compare(rng: random.Random) -> Conversation:
    digits = rng.randrange(1, 5)
    a, b = rng.sample(range(10 ** (digits - 1), 10**digits + 9), 2)
    if rng.random() < 0.5:
        larger = ("Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?", "What is more, {a} or {b}?")
        return ask(pick(rng, *larger, a=a, b=b), f"{max(a, b)} is larger than {min(a, b)}.")
    smaller = ("Which is smaller, {a} or {b}?", "Which number is less: {a} or {b}?", "What is less, {a} or {b}?")
    return ask(pick(rng, *smaller, a=a, b=b), f"{min(a, b)} is smaller than {max(a, b)}.")


def number_words(rng: random.Random) -> Conversation:
    n = rng.randrange(1000) if rng.random() < 0.7 else rng.randrange(100)
    if rng.random() < 0.5:
        asked = (
            "Write {n} in words.",
            "How do you write {n} in words?",
            "Spell out the number {n}.",
            "{n} in words",
        )
        return ask(pick(rng, *asked, n=n), in_words(n))
    asked = ("Write {w} in digits.", "Which number is {w}?", "Write {w} as a number.", "{w} in digits")
    return ask(pick(rng, *asked, w=in_words(n)), str(n))


def add_steps(a: int, b: int) -> str:
    """4821 + 734 digit by digit, from the right; each line ends with the digits of the result so far."""
    lines, done, carry = [], "", 0
    while a or b:
        extra = " + 1" if carry else ""
        total = a % 10 + b % 10 + carry
        done = f"{total % 10}{done}"
        lines.append(f"{a} + {b}{extra}: {a % 10} + {b % 10}{extra} = {total} → {done}")
        carry = total // 10
        a, b = a // 10, b // 10
    if carry:
        lines.append(f"carry 1 → 1{done}")
    return "\n".join(lines)


def subtract_steps(a: int, b: int) -> str:
    """a >= b, digit by digit from the right with borrowing."""
    lines, done, borrow = [], "", 0
    while a or b:
        extra = " - 1" if borrow else ""
        top = a % 10
        lent = int(top - b % 10 - borrow < 0)
        digit = top + 10 * lent - b % 10 - borrow
        done = f"{digit}{done}"
        note = ", borrow 1" if lent else ""
        lines.append(f"{a} - {b}{extra}: {top + 10 * lent} - {b % 10}{extra} = {digit}{note} → {done}")
        borrow = lent
        a, b = a // 10, b // 10
    if done != (short := done.lstrip("0") or "0"):
        lines.append(f"without zeros → {short}")
    return "\n".join(lines)


def multiply_steps(a: int, b: int) -> str:
    """A long number times one digit."""
    lines, done, carry = [], "", 0
    while a:
        extra = f" + {carry}" if carry else ""
        total = a % 10 * b + carry
        done = f"{total % 10}{done}"
        lines.append(
            f"{a} × {b}{extra}: {a % 10} × {b} = {a % 10 * b}{f',{extra} = {total}' if carry else ''} → {done}"
        )
        carry = total // 10
        a //= 10
    if carry:
        lines.append(f"carry {carry} → {carry}{done}")
    return "\n".join(lines)


def _number(rng: random.Random, digits: int = 5) -> int:
    """All lengths alike, none zero."""
    length = rng.randrange(1, digits + 1)
    return rng.randrange(10 ** (length - 1), 10**length)


def _sum(rng: random.Random, a: int, b: int) -> Conversation:
    return ask(pick(rng, *SUM, a=a, b=b), f"{a} + {b} = {a + b}")


def _difference(rng: random.Random, a: int, b: int) -> Conversation:
    return ask(pick(rng, *DIFFERENCE, a=a, b=b), f"{a} - {b} = {a - b}")
