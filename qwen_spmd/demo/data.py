# SPDX-License-Identifier: Apache-2.0
"""Training data as a stream of micro-batches, made by worker processes while training runs.

Conversations go into buckets by length and are padded on the right. A chunk is the data of STEPS steps; it depends
only on the seed and its number. Not here: jax (workers must start fast), the tasks.
"""

from __future__ import annotations

import collections
import dataclasses
import multiprocessing
import random
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from qwen_spmd.demo.chat import Encoded, encode, tokenizer
from qwen_spmd.demo.tasks import TASKS, draw_dressed

STEPS = 8
"""Optimizer steps in a chunk."""

LENGTHS = (64, 128, 192, 256, 384, 512, 1024, 2048, 4096)
PAD = "<|endoftext|>"


class Batch(NamedTuple):
    """Rows of one length. `spoken` marks the tokens to predict, `task` is each row's place in TASKS (-1: empty row).

    numpy arrays here, jax arrays inside jitted functions.
    """

    tokens_BT: Any
    spoken_BT: Any
    task_B: Any


@dataclasses.dataclass(frozen=True)
class Bucket:
    """`parts` micro-batches of `rows` rows in each chunk."""

    length: int
    rows: int
    parts: int


def plan(samples: int, batch_tokens: int, lengths: Sequence[int] = LENGTHS) -> tuple[Bucket, ...]:
    """Buckets that hold a chunk of `samples` conversations a step, in micro-batches of about `batch_tokens` tokens."""
    rng = random.Random("plan")
    drawn = 4000
    sizes = [len(encode(draw_dressed(rng)[1]).tokens_T) for _ in range(drawn)]
    counts = np.histogram(sizes, [0, *(length + 1 for length in lengths)])[0]
    buckets = []
    for length, count in zip(lengths, counts, strict=True):
        expected = count * samples * STEPS / drawn
        rows = expected + 2 * expected**0.5  # two standard deviations of room; what is too much is dropped
        parts = max(1, round(rows * length / batch_tokens))
        buckets.append(Bucket(length, max(1, int(np.ceil(rows / parts))), parts))
    return tuple(buckets)


def pad(conversations: Sequence[Encoded], tasks: Sequence[int], rows: int, length: int) -> Batch:
    """Conversations as the first rows of a batch."""
    batch = Batch(
        np.full((rows, length), tokenizer().token_to_id(PAD), np.int32),
        np.zeros((rows, length), bool),
        np.full(rows, -1, np.int32),
    )
    for row, (encoded, task) in enumerate(zip(conversations, tasks, strict=True)):
        batch.tokens_BT[row, : len(encoded.tokens_T)] = encoded.tokens_T
        batch.spoken_BT[row, : len(encoded.tokens_T)] = encoded.spoken_T
        batch.task_B[row] = task
    return batch


def chunk(seed: int, number: int, samples: int, buckets: tuple[Bucket, ...]) -> list[list[Batch]]:
    """The micro-batches of STEPS steps. Which lengths a step has is the same in every chunk."""
    rng = random.Random(f"{seed} {number}")
    places = {name: i for i, name in enumerate(TASKS)}
    filled: list[list[tuple[Encoded, int]]] = [[] for _ in buckets]
    for _ in range(samples * STEPS):
        task, conversation = draw_dressed(rng)
        encoded = encode(conversation)
        for bucket, rows in zip(buckets, filled, strict=True):
            if len(encoded.tokens_T) <= bucket.length and len(rows) < bucket.rows * bucket.parts:
                rows.append((encoded, places[task.name]))
                break
    steps: list[list[Batch]] = [[] for _ in range(STEPS)]
    dealt = 0
    for bucket, rows in zip(buckets, filled, strict=True):
        for part in range(bucket.parts):
            some = rows[part :: bucket.parts]
            steps[dealt % STEPS].append(pad([e for e, _ in some], [t for _, t in some], bucket.rows, bucket.length))
            dealt += 1
    return [step for step in steps if step]


def stream(seed: int, samples: int, buckets: tuple[Bucket, ...], workers: int) -> Generator[list[Batch]]:
    """Steps, one after the other, without end. The workers are a few chunks ahead."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        number = 0
        ahead: collections.deque = collections.deque()
        try:
            while True:
                while len(ahead) < 3 * workers:
                    ahead.append(pool.submit(chunk, seed, number, samples, buckets))
                    number += 1
                yield from ahead.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
