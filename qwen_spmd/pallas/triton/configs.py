# SPDX-License-Identifier: Apache-2.0
"""Tile sizes and pipelining of Triton kernels: a table per op, `configs.json` beside its `gpu.py`.

kernel -> compute capability -> shape class -> {name: value}. The op names its shape classes, and has a rule for those
that nobody has measured. `scripts/tune_gpu.py` fills the tables; nothing is tuned while a model runs.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from qwen_spmd.pallas import triton

Config = dict[str, int]


def choose(op: str, kernel: str, shape_class: str, rule: Config) -> Config:
    """The config of `kernel` of the op in `pallas/<op>` for this shape class on this capability; `rule` if unlisted.

    A listed config may name some values only; the others are the rule's.
    """
    listed = table(op).get(kernel, {}).get(str(triton.capability()), {}).get(shape_class, {})
    config = rule | _forced.get().get(f"{op}.{kernel}", listed)
    _asked.get().append((op, kernel, shape_class, config))
    return config


@contextlib.contextmanager
def force(op: str, kernel: str, config: Config) -> Iterator[None]:
    """Within, `choose` gives this for the kernel; to tune and to test."""
    token = _forced.set(_forced.get() | {f"{op}.{kernel}": config})
    try:
        yield
    finally:
        _forced.reset(token)


@contextlib.contextmanager
def asked() -> Iterator[list[tuple[str, str, str, Config]]]:
    """The (op, kernel, shape class, config) of each choice within."""
    choices: list[tuple[str, str, str, Config]] = []
    token = _asked.set(choices)
    try:
        yield choices
    finally:
        _asked.reset(token)


def file(op: str) -> Path:
    return Path(__file__).parents[1] / op / "configs.json"


@functools.cache
def table(op: str) -> dict[str, dict[str, dict[str, Config]]]:
    return json.loads(file(op).read_text()) if file(op).exists() else {}


class _Nowhere(list):
    def append(self, _: object) -> None:
        pass


_forced: ContextVar[dict[str, Config]] = ContextVar("forced", default={})  # noqa: B039  (never mutated)
_asked: ContextVar[list[tuple[str, str, str, Config]]] = ContextVar("asked", default=_Nowhere())  # noqa: B039
