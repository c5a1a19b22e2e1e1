# SPDX-License-Identifier: Apache-2.0
"""What both formats share: a checkpoint that is open for reading, and arrays cut into pieces that fit the host.

A stacked leaf may be a hundred times larger than any tensor of the files, so nothing here or beside it holds a whole
one: a leaf is read, placed, written and checked a piece at a time.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

PIECE_BYTES = 2**25
"""Most bytes of a piece, unless one unit of it has more."""

Window = tuple[slice, ...]
"""The part of an array between `start` and `stop` of each axis; both are always numbers."""


class Tensor(NamedTuple):
    """A published tensor: its full name, its dtype as safetensors spells it, and the file it is in."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint that is open for reading.

    shapes    of the leaves that it holds, by path, with one place for each expert
    read      read(path, window) -> that window of the leaf, in the dtype that was asked for when it was opened
    tensors   what it publishes or was converted from, by the names that `Part` uses
    left_out  what its files hold and the leaves do not, in words
    identity  -> a digest that another checkpoint does not have
    """

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str, Window], np.ndarray]
    tensors: Mapping[str, Tensor]
    left_out: Sequence[str]
    identity: Callable[[], str]


def cut(shape: Sequence[int], itemsize: int, unit: Sequence[int] | None = None) -> Iterator[Window]:
    """Windows that cover an array in order, of at most PIECE_BYTES or one unit; they start at multiples of `unit`."""
    room, rest, ranges = max(PIECE_BYTES // itemsize, 1), math.prod(shape), []
    for n, u in zip(shape, unit or (1,) * len(shape), strict=True):
        rest //= n
        step = min(max(room // rest // u, 1) * u, n)
        room = max(room // step, 1)
        ranges.append([slice(i, min(i + step, n)) for i in range(0, n, step)])
    return itertools.product(*ranges)


def some(names: Sequence[str], most: int = 10) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def bar(what: str, total: int, progress: bool) -> tqdm[Any]:
    """A progress bar over bytes, on a terminal only."""
    return tqdm(desc=what, total=total, unit="B", unit_scale=True, disable=None if progress else True)
