# SPDX-License-Identifier: Apache-2.0
"""Training data as a stream of batches, made by worker processes while training runs.

Conversations are packed, one after the other, into rows of one length; the few that are longer go into rows of their
own length now and then. A chunk is the data of STEPS steps; it depends only on the seed and its number. Not here: jax
(workers must start fast), the tasks.
"""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
import random
from collections.abc import Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from qwen_spmd.demo.chat import Encoded, encode, tokenizer
from qwen_spmd.demo.tasks import TASKS, draw_dressed

STEPS = 4
"""Optimizer steps in a chunk. The first of them has a batch of long rows too."""

PAD = "<|endoftext|>"


class Batch(NamedTuple):
    """Packed conversations. numpy arrays here, jax arrays inside jitted functions.

    offset_BT  each token's place in its conversation
    item_BT    which of the row's conversations it belongs to, -1 for padding
    weight_BT  how much predicting the token counts, 0 for what the model does not say
    task_BT    the conversation's place in TASKS, -1 for padding
    """

    tokens_BT: Any
    offset_BT: Any
    item_BT: Any
    weight_BT: Any
    task_BT: Any


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a batch: `rows` rows of `length` tokens."""

    rows: int
    length: int


class Packer:
    """Fills a batch of one shape. A conversation that does not fit in the open row starts the next."""

    def __init__(self, shape: Shape, length_power: float) -> None:
        size = (shape.rows, shape.length)
        pad = tokenizer().token_to_id(PAD)
        offsets = np.tile(np.arange(shape.length, dtype=np.int32), (shape.rows, 1))
        integers = (np.full(size, fill, np.int32) for fill in (pad, -1, -1))
        tokens, items, tasks = integers
        self.batch = Batch(tokens, offsets, items, np.zeros(size, np.float32), tasks)
        self._length_power = length_power
        self._row = self._column = self._item = 0

    def add(self, encoded: Encoded, task: int) -> bool:
        """False if the batch is full."""
        rows, length = self.batch.tokens_BT.shape
        n = len(encoded.tokens_T)
        if self._column + n > length:
            self._row, self._column, self._item = self._row + 1, 0, 0
        if self._row >= rows or n > length:
            return False
        place = self._row, slice(self._column, self._column + n)
        spoken = encoded.spoken_T.astype(np.float32)
        self.batch.tokens_BT[place] = encoded.tokens_T
        self.batch.offset_BT[place] = np.arange(n)
        self.batch.item_BT[place] = self._item
        self.batch.weight_BT[place] = spoken * max(spoken.sum(), 1) ** -self._length_power
        self.batch.task_BT[place] = task
        self.batch.offset_BT[self._row, self._column + n :] = np.arange(length - self._column - n)
        self._column, self._item = self._column + n, self._item + 1
        return True


def pack(encoded: Iterable[tuple[Encoded, int]], shape: Shape, length_power: float = 0.0) -> list[Batch]:
    """All conversations in order, in as many batches as it takes."""
    packers = [Packer(shape, length_power)]
    for conversation, task in encoded:
        if not packers[-1].add(conversation, task):
            packers.append(Packer(shape, length_power))
            if not packers[-1].add(conversation, task):
                raise ValueError(f"a conversation has {len(conversation.tokens_T)} tokens, a row {shape.length}")
    return [packer.batch for packer in packers]


def chunk(seed: int, number: int, short: Shape, long: Shape, length_power: float) -> list[list[Batch]]:
    """The batches of STEPS steps."""
    rng = random.Random(f"{seed} {number}")
    places = {name: i for i, name in enumerate(TASKS)}
    longer = Packer(long, length_power)
    steps: list[list[Batch]] = []
    while len(steps) < STEPS:
        packer = Packer(short, length_power)
        while True:
            task, conversation = draw_dressed(rng)
            encoded = encode(conversation)
            if len(encoded.tokens_T) > short.length:
                longer.add(encoded, places[task.name])  # what is too much is dropped
            elif not packer.add(encoded, places[task.name]):
                break
        steps.append([packer.batch])
    steps[0].append(longer.batch)
    return steps


def stream(seed: int, short: Shape, long: Shape, length_power: float, workers: int) -> Generator[list[Batch]]:
    """Steps, one after the other, without end. The workers are a few chunks ahead."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        number = 0
        ahead: collections.deque = collections.deque()
        try:
            while True:
                while len(ahead) < 2 * workers:
                    ahead.append(pool.submit(chunk, seed, number, short, long, length_power))
                    number += 1
                yield from ahead.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
