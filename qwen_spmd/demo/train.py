# SPDX-License-Identifier: Apache-2.0
"""Training of the demo model: the step, the loop against the clock, exact-match accuracy.

Weights and optimizer are float32, the forward pass runs in bfloat16. A step adds up the gradients of its
batches. Not here: data (`data`), the loss (`loss`), the optimizer (`optimizer`), files (`export`).
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
from qwen_spmd.demo.data import Batch, Packer, Shape, pack, stream
from qwen_spmd.demo.evaluate import graded, held_out
from qwen_spmd.demo.export import card, export, hf_config, rounded
from qwen_spmd.demo.loss import loss_sums, tokens_right
from qwen_spmd.demo.optimizer import optimizer
from qwen_spmd.demo.tasks import TASKS


@dataclasses.dataclass(frozen=True)
class Options:
    """What a run can vary; the command line has a flag for each.

    minutes          of the whole run: compiling and `finish` seconds for the evaluation at the end are taken off
    rows, length     of a batch of packed conversations, one each step; lengths are multiples of 64
    long_rows, long_length    of a batch for longer ones, every few steps; what is longer still is left out
    length_power     a token of a conversation with n tokens to predict counts n ** -length_power: a short answer must
                     not be lost among long ones
    lr               peak learning rate: linear warm-up over `warmup` steps, then constant, then over the last `decay`
                     share of the time linearly to zero
    mtp, balance, remat    see loss.Weights
    ema              decay of the averaged weights, which are what is exported
    config           fields of config.json to change
    init             a folder with weights to start from
    items            held-out items of each task for the accuracy at the end
    """

    out: Path = Path("demo-out")
    minutes: float = 9.2
    finish: float = 40.0
    rows: int = 48
    length: int = 1024
    long_rows: int = 8
    long_length: int = 4096
    optimizer: str = "muon"
    lr: float = 4e-3
    warmup: int = 150
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
    """The jitted functions of one configuration, compiled ahead, all at once."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.hf_config = hf_config(options.config)
        self.cfg = from_hf(self.hf_config)
        self.declared = P.declare(self.cfg, jnp.float32)
        self.tx: Any = optimizer(self.declared, kind=options.optimizer, weight_decay=options.weight_decay)
        self.short = Shape(options.rows, options.length)
        self.long = Shape(options.long_rows, options.long_length)

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
        return Total(jax.tree.map(jnp.zeros_like, params), jnp.zeros((len(TASKS) + 1, 3)), jnp.zeros(4))

    def add(self, params: P.Params, total: Total, batch: Batch) -> Total:
        """One micro-batch."""
        loss = functools.partial(loss_sums, cfg=self.cfg, weights=self.options)
        gradients, (counts, extra) = jax.grad(loss, has_aux=True)(params, batch)
        return Total(jax.tree.map(jnp.add, total.gradients, gradients), total.counts + counts, total.extra + extra)

    def update(self, state: State, lr: jax.Array) -> tuple[State, tuple[jax.Array, jax.Array]]:
        """The optimizer step; returns the counts and the extra losses."""
        total = state.total
        gradients = jax.tree.map(lambda g: g / jnp.maximum(total.extra[-1], 1), total.gradients)
        updates, moments = self.tx.update(gradients, state.moments, state.params)
        params = jax.tree.map(lambda p, u: p - lr * u, state.params, updates)
        decay = jnp.minimum(self.options.ema, (1 + state.step) / (10 + state.step))
        averaged = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, state.averaged, params)
        seen = (total.counts[:-1], total.extra)
        return State(params, averaged, moments, state.step + 1, self._zero(params)), seen

    def compile(self, state: State) -> None:
        """Compile everything, in parallel; what only the evaluation needs is not waited for."""
        shape = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
        half = jax.eval_shape(lambda p: rounded(p, self.cfg), state.params)
        right = functools.partial(tokens_right, cfg=self.cfg)
        pool = ThreadPoolExecutor(os.cpu_count())

        def start(function: Any, *args: Any) -> Future:
            return pool.submit(lambda: function.lower(*args).compile())

        empty = {size: shape(Packer(size, 0.0).batch) for size in (self.short, self.long)}
        add = jax.jit(self.add, donate_argnums=1)
        adds = {size: start(add, shape(state.params), shape(state.total), batch) for size, batch in empty.items()}
        update = start(jax.jit(self.update, donate_argnums=0), shape(state), jax.ShapeDtypeStruct((), jnp.float32))
        self.rights = {size: start(jax.jit(right), half, batch) for size, batch in empty.items()}
        self.adds = {size: future.result() for size, future in adds.items()}
        self.updated = update.result()

    def step(self, state: State, batches: Sequence[Batch], lr: float) -> tuple[State, Any]:
        total = state.total
        for batch in batches:
            total = self.adds[Shape(*batch.tokens_BT.shape)](state.params, total, batch)
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
        right = np.zeros(len(items), bool)
        for size, least in ((self.short, 0), (self.long, self.short.length)):
            # What is longer than training was counts as wrong.
            some = [i for i, e in enumerate(encoded) if least < len(e.tokens_T) <= size.length]
            order = iter(some)
            for batch in pack(((encoded[i], 0) for i in some), size):
                ok = np.asarray(self.rights[size].result()(params, batch)) | (batch.weight_BT == 0)
                for row, item_T in zip(ok, batch.item_BT, strict=True):
                    for item in range(item_T.max() + 1):
                        right[next(order)] = row[item_T == item].all()
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
    data = stream(options.seed, trainer.short, trainer.long, options.length_power, options.workers)
    state = trainer.initial()
    log(f"{jax.devices()[0].device_kind}, {P.num_params(state.params) / 1e6:.2f} M parameters, {options}")
    trainer.compile(state)
    budget = options.minutes * 60 - options.finish - (time.monotonic() - began)
    log(f"compiled, {time.monotonic() - began:.0f} s since the start; {budget:.0f} s of training follow")

    start = logged = saved = time.monotonic()
    window: list[Any] = []
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
            sums = [np.sum([np.asarray(x) for x in xs], 0) for xs in zip(*window, strict=True)]
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


def _line(head: str, sums: Sequence[np.ndarray]) -> str:
    """Loss and share of right tokens, in all and for each task that is not solved."""
    tasks, extra = sums
    total = np.sum(tasks, 0)
    loss, mtp, drafts = total[0] / total[1], extra[0] / total[1], extra[1] / total[1]
    parts = [f"{head} loss {loss:.4f} mtp {mtp:.3f} drafts {drafts:.0%} balance {extra[2] / extra[3]:.2f}"]
    solved = 0
    for name, (loss, tokens, right) in zip(TASKS, tasks, strict=True):
        if tokens and right >= 0.999 * tokens:
            solved += 1
        elif tokens:
            parts.append(f"{name} {loss / tokens:.3f} {100 * right / tokens:.1f}%")
    return " | ".join([*parts, f"{solved} more tasks solved"])
