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
    forced = _forced.get().get(f"{op}.{kernel}")
    if forced is not None:
        return rule | forced
    return rule | _table(op).get(kernel, {}).get(str(triton.capability()), {}).get(shape_class, {})


@contextlib.contextmanager
def force(op: str, kernel: str, config: Config) -> Iterator[None]:
    """Within, `choose` gives this for the kernel; to tune and to test."""
    token = _forced.set(_forced.get() | {f"{op}.{kernel}": config})
    try:
        yield
    finally:
        _forced.reset(token)


@functools.cache
def _table(op: str) -> dict[str, dict[str, dict[str, Config]]]:
    file = Path(__file__).parents[1] / op / "configs.json"
    return json.loads(file.read_text()) if file.exists() else {}


_forced: ContextVar[dict[str, Config]] = ContextVar("forced", default={})  # noqa: B039  (never mutated)
