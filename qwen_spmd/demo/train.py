# SPDX-License-Identifier: Apache-2.0
"""Training of the demo model: the step, the loop against the clock, exact-match accuracy.

Weights and optimizer are float32, the forward pass runs in bfloat16. A step adds up the gradients of micro-batches of
several lengths. Not here: data (`data`), the loss (`loss`), the optimizer (`optimizer`), files (`export`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from qwen_spmd import checkpoint
from qwen_spmd import params as P
from qwen_spmd.config import from_hf
from qwen_spmd.demo.chat import encode
from qwen_spmd.demo.conversation import Conversation
from qwen_spmd.demo.data import LENGTHS, Batch, Bucket, pad, plan, stream
from qwen_spmd.demo.evaluate import graded, held_out
from qwen_spmd.demo.export import card, export, hf_config, rounded
from qwen_spmd.demo.loss import answers_right, loss_sums
from qwen_spmd.demo.optimizer import optimizer
from qwen_spmd.demo.tasks import TASKS


@dataclasses.dataclass(frozen=True)
class Options:
    """What a run can vary; the command line has a flag for each.

    minutes          of the whole run: compiling and `finish` seconds for the evaluation at the end are taken off
    samples          conversations in a step
    batch_tokens     tokens of a micro-batch, about
    lengths          of the micro-batches' rows, multiples of 64; longer conversations are left out
    lr               peak learning rate: linear warm-up over `warmup` steps, then constant, then over the last `decay`
                     share of the time linearly to zero
    mtp, balance, length_power, remat    see loss.Weights
    ema              decay of the averaged weights, which are what is exported
    config           fields of config.json to change
    init             a folder with weights to start from
    items            held-out items of each task for the accuracy at the end
    """

    out: Path = Path("demo-out")
    minutes: float = 9.0
    finish: float = 40.0
    samples: int = 512
    batch_tokens: int = 65536
    lengths: tuple[int, ...] = LENGTHS
    optimizer: str = "muon"
    lr: float = 4e-3
    warmup: int = 200
    decay: float = 0.7
    weight_decay: float = 0.03
    mtp: float = 0.15
    balance: float = 0.01
    length_power: float = 0.5
    ema: float = 0.999
    seed: int = 0
    workers: int = max(1, (os.cpu_count() or 2) - 2)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    init: Path | None = None
    items: int = 200
    log_seconds: float = 30.0
    save_minutes: float = 2.0
    remat: bool = False


@struct.dataclass
class State:
    """What a step updates. `total` collects the gradients and counts of the micro-batches before the update."""

    params: P.Params
    averaged: P.Params
    moments: Any
    step: jax.Array
    total: Total


@struct.dataclass
class Total:
    """Sums over micro-batches; `loss_sums` says of what."""

    gradients: P.Params
    counts: jax.Array
    extra: jax.Array


class Trainer:
    """The jitted functions of one configuration, compiled ahead for all buckets at once."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.hf_config = hf_config(options.config)
        self.cfg = from_hf(self.hf_config)
        self.declared = P.declare(self.cfg, jnp.float32)
        self.tx: Any = optimizer(self.declared, kind=options.optimizer, weight_decay=options.weight_decay)
        self.buckets = plan(options.samples, options.batch_tokens, options.lengths)
        self.pad_id: int = self.hf_config["eos_token_id"]  # data.PAD

    def initial(self) -> State:
        """Random weights. Embeddings start larger and residual outputs smaller than where nothing is trained."""
        cfg = self.cfg
        if self.options.init is not None:
            params = checkpoint.load(self.options.init, cfg, dtype=jnp.float32, progress=False)
        else:
            params = P.init(cfg, jnp.float32, jax.random.key(self.options.seed))
            params = dataclasses.replace(params, embed=params.embed * 15)
            small = (2 * cfg.num_layers) ** -0.5
            outputs = ("w_o", "w_down")
            params = jax.tree_util.tree_map_with_path(
                lambda path, x: x * small if path[-1].name in outputs else x, params
            )
        params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        copy = lambda tree: jax.tree.map(jnp.copy, tree)  # noqa: E731
        return State(params, copy(params), self.tx.init(params), jnp.int32(0), self._zero(params))

    def _zero(self, params: P.Params) -> Total:
        return Total(jax.tree.map(jnp.zeros_like, params), jnp.zeros((len(TASKS) + 1, 4)), jnp.zeros(4))

    def add(self, params: P.Params, total: Total, batch: Batch) -> Total:
        """One micro-batch."""
        loss = functools.partial(loss_sums, cfg=self.cfg, weights=self.options, pad_id=self.pad_id)
        gradients, (counts, extra) = jax.grad(loss, has_aux=True)(params, batch)
        return Total(jax.tree.map(jnp.add, total.gradients, gradients), total.counts + counts, total.extra + extra)

    def update(self, state: State, lr: jax.Array) -> tuple[State, jax.Array]:
        """The optimizer step; returns the counts, with the extra losses as one more row."""
        total = state.total
        gradients = jax.tree.map(lambda g: g / jnp.maximum(total.extra[-1], 1), total.gradients)
        updates, moments = self.tx.update(gradients, state.moments, state.params)
        params = jax.tree.map(lambda p, u: p - lr * u, state.params, updates)
        decay = jnp.minimum(self.options.ema, (1 + state.step) / (10 + state.step))
        averaged = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, state.averaged, params)
        seen = jnp.concatenate([total.counts[:-1], total.extra[None]])
        return State(params, averaged, moments, state.step + 1, self._zero(params)), seen

    def compile(self, state: State) -> None:
        """Compile everything, in parallel; what only the evaluation needs is not waited for."""
        shape = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
        half = jax.eval_shape(lambda p: rounded(p, self.cfg), state.params)
        right = functools.partial(answers_right, cfg=self.cfg)
        pool = ThreadPoolExecutor(os.cpu_count())

        def start(function: Any, *args: Any) -> Future:
            return pool.submit(lambda: function.lower(*args).compile())

        def batch(bucket: Bucket) -> Batch:
            return shape(pad([], [], bucket.rows, bucket.length))

        add = jax.jit(self.add, donate_argnums=1)
        adds = {b.length: start(add, shape(state.params), shape(state.total), batch(b)) for b in self.buckets}
        update = start(jax.jit(self.update, donate_argnums=0), shape(state), jax.ShapeDtypeStruct((), jnp.float32))
        self.rights = {b.length: start(jax.jit(right), half, batch(b)) for b in self.buckets}
        self.adds = {length: future.result() for length, future in adds.items()}
        self.updated = update.result()

    def step(self, state: State, batches: Sequence[Batch], lr: float) -> tuple[State, jax.Array]:
        total = state.total
        for batch in batches:
            total = self.adds[batch.tokens_BT.shape[1]](state.params, total, batch)
        return self.updated(dataclasses.replace(state, total=total), jnp.float32(lr))

    def learning_rate(self, step: int, done: float) -> float:
        """`done` is the share of the time that is over."""
        o = self.options
        return o.lr * min(1.0, (step + 1) / o.warmup) * min(1.0, max(0.0, 1 - done) / o.decay)

    def accuracy(self, params: P.Params) -> dict[str, list[tuple[Conversation, bool]]]:
        """Held-out items of each graded task and whether greedy decoding answers them, for the rounded weights."""
        params = jax.jit(lambda p: rounded(p, self.cfg))(params)
        items = [(name, c) for name in graded() for c in held_out(name, self.options.items)]
        encoded = [encode(c) for _, c in items]
        encoded = [dataclasses.replace(e, spoken_T=e.spoken_T & _from(e)) for e in encoded]
        places: dict[Bucket, list[int]] = {bucket: [] for bucket in self.buckets}
        for i, e in enumerate(encoded):
            fitting = [bucket for bucket in self.buckets if len(e.tokens_T) <= bucket.length]
            if fitting:  # what is longer than training was counts as wrong
                places[fitting[0]].append(i)
        right = np.zeros(len(items), bool)
        for bucket, indices in places.items():
            for start in range(0, len(indices), bucket.rows):
                some = indices[start : start + bucket.rows]
                batch = pad([encoded[i] for i in some], [0] * len(some), bucket.rows, bucket.length)
                right[some] = np.asarray(self.rights[bucket.length].result()(params, batch))[: len(some)]
        found: dict[str, list[tuple[Conversation, bool]]] = {}
        for (name, conversation), ok in zip(items, right, strict=True):
            found.setdefault(name, []).append((conversation, bool(ok)))
        return found


def _from(encoded: Any) -> np.ndarray:
    return np.arange(len(encoded.tokens_T)) >= encoded.answer_start


def train(options: Options, log: Callable[[str], None] = print) -> dict[str, float]:
    """Train until `options.minutes` are over, write the folder `options.out`, return the accuracy of each task."""
    began = time.monotonic()
    trainer = Trainer(options)
    data = stream(options.seed, options.samples, trainer.buckets, options.workers)
    state = trainer.initial()
    log(f"{jax.devices()[0].device_kind}, {P.num_params(state.params) / 1e6:.2f} M parameters, {options}")
    log(f"buckets {[(b.length, b.rows, b.parts) for b in trainer.buckets]} (length, rows, micro-batches in 8 steps)")
    trainer.compile(state)
    budget = options.minutes * 60 - options.finish - (time.monotonic() - began)
    log(f"compiled, {time.monotonic() - began:.0f} s since the start; {budget:.0f} s of training follow")

    start = logged = saved = time.monotonic()
    window: list[jax.Array] = []
    tokens = steps = 0
    waited = 0.0
    while (done := (time.monotonic() - start) / max(budget, 1)) < 1:
        asked = time.monotonic()
        batches = next(data)
        waited += time.monotonic() - asked
        state, counts = trainer.step(state, batches, trainer.learning_rate(steps, done))
        window.append(counts)
        tokens += sum(b.tokens_BT.size for b in batches)
        steps += 1
        if len(window) > 2:  # stay at most two steps ahead of the device, or the clock is wrong
            jax.block_until_ready(window[-3])
        now = time.monotonic()
        if now - logged >= (options.log_seconds if steps > 50 else 5):
            sums = np.sum([np.asarray(c) for c in window], 0)
            rate = tokens / (now - logged) / 1e6
            lr = trainer.learning_rate(steps, done)
            head = f"step {steps} {now - start:.0f} s {rate:.2f} Mtok/s lr {lr:.1e} wait {waited:.1f} s"
            log(_line(head, sums))
            window, tokens, logged, waited = [], 0, now, 0.0
        if now - saved >= options.save_minutes * 60:
            export(state.averaged, trainer.hf_config, options.out, "# A checkpoint of a run that goes on\n")
            saved = time.monotonic()
    data.close()

    found = trainer.accuracy(state.averaged)
    export(state.averaged, trainer.hf_config, options.out, card(state.averaged, trainer.hf_config, found))
    accuracy = {name: sum(ok for _, ok in items) / len(items) for name, items in found.items()}
    log(f"{steps} steps; accuracy on {options.items} held-out items of each task:")
    for name, share in accuracy.items():
        log(f"  {name:24} {share:6.1%}")
    below = [name for name, share in accuracy.items() if share < 0.95]
    log(f"below 95 %: {', '.join(below) or 'none'}; written to {options.out}, {time.monotonic() - began:.0f} s in all")
    return accuracy


def _line(head: str, sums: np.ndarray) -> str:
    """Loss of each token and share of the rows without any mistake, in all and for each task that is not solved."""
    *tasks, extra = sums
    total = np.sum(tasks, 0)
    loss, mtp, drafts = total[0] / total[1], extra[0] / total[1], extra[1] / total[1]
    parts = [f"{head} loss {loss:.4f} mtp {mtp:.3f} drafts {drafts:.0%} balance {extra[2] / extra[3]:.2f}"]
    solved = 0
    for name, (loss, tokens, right, rows) in zip(TASKS, tasks, strict=True):
        if rows and right >= 0.995 * rows:
            solved += 1
        elif rows:
            parts.append(f"{name} {loss / tokens:.3f} {100 * right / rows:.0f}%")
    return " | ".join([*parts, f"{solved} more tasks solved"])
