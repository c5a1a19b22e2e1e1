# SPDX-License-Identifier: Apache-2.0
"""Engine: a model with its loop. The loop's thread plans a step, dispatches it, and commits the one before.

One step is always in flight: while the device runs step n the host plans n+1, and sampled ids go from one to the next
on the device. Not here: policy (`scheduler`), programs (`step`), text, HTTP.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from qwen_spmd import params
from qwen_spmd.config import ModelConfig
from qwen_spmd.model import Trace
from qwen_spmd.params import Params
from qwen_spmd.serve.blocks import Blocks
from qwen_spmd.serve.packed import pack
from qwen_spmd.serve.replica import Leader, Step
from qwen_spmd.serve.request import FinishReason, Request
from qwen_spmd.serve.scheduler import Output, Scheduler, StepPlan
from qwen_spmd.serve.sizes import EngineConfig
from qwen_spmd.serve.start import load, prepare
from qwen_spmd.serve.step import CompileCounter, run_sequence
from qwen_spmd.unstacked import stack

log = logging.getLogger(__name__)

SIGN_S = 2.0
"""A collective breaks a little before or after the channel says who is gone: so long it has to say that."""


class EngineStopped(RuntimeError):
    """The engine takes no more requests: it is draining, was stopped, or its loop died."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """A snapshot.

    step_age_s        seconds since the loop last made progress while it has work, 0 when idle
    rank_imbalance    tokens of the busiest rank over those of the mean one, averaged over steps; 1 is even
    expert_imbalance  rows of the busiest device's experts over those of the mean one, in the last while; 1 is even
    """

    running: int
    waiting: int
    running_by_rank: tuple[int, ...]
    tokens_by_rank: tuple[int, ...]
    rank_imbalance: float
    expert_imbalance: float
    kv_usage: float
    slot_usage: float
    step_age_s: float
    steps: int
    preemptions: int
    compiles: int
    compiles_after_ready: int
    scheduled_tokens: int
    padding_tokens: int
    alive: bool
    error: str | None


InFlight = tuple[StepPlan, jax.Array, jax.Array | None]
"""A step that was dispatched: its plan, its tokens, and now and then `ModelState.load` after it."""


class ExpertLoad:
    """How evenly the experts' work falls on this process's devices, looked at every few seconds."""

    EVERY_S = 5.0

    def __init__(self) -> None:
        self.imbalance = 1.0
        self._last: list[np.ndarray] | None = None
        self._looked = time.monotonic()

    def due(self) -> bool:
        return time.monotonic() - self._looked > self.EVERY_S

    def note(self, load: jax.Array) -> None:
        self._looked = time.monotonic()
        now = [np.asarray(shard.data).view(np.uint32) for shard in load.addressable_shards]
        if self._last is not None:
            rows = [int((new - old).sum()) for new, old in zip(now, self._last, strict=True)]  # the counts wrap
            self.imbalance = max(rows) * len(rows) / sum(rows) if sum(rows) else 1.0
        self._last = now


class Engine:
    """A loaded model that serves requests on a thread of its own.

    Set `deliver` before the first `submit`; it is called on the engine's thread, once a step, with that step's outputs.
    With a `replica`, every step is sent to the followers before it runs here, and the engine dies with the replica.
    """

    def __init__(self, cfg: ModelConfig, weights: Params, config: EngineConfig, replica: Leader | None = None):
        self.cfg, self.config, self._replica = cfg, config, replica
        self._compiles = CompileCounter()
        self.sizes, self._steps = prepare(cfg, weights, config, replica)
        self.layout, shapes = self.sizes.layout, self.sizes.shapes
        self.max_model_len, self.vocab_size = self.sizes.scheduler.max_model_len, cfg.vocab_size
        blocks = [Blocks(shapes.pages, shapes.page_size, shapes.slots) for _ in range(self.layout.ranks)]
        self._scheduler = Scheduler(self.sizes.scheduler, blocks)
        self.deliver: Callable[[list[Output]], None] = lambda outputs: None
        self._wake = threading.Condition()
        # Devices must get programs with collectives in one order.
        self._dispatch = threading.Lock()
        self._requests: dict[str, Request] = {}
        self._undelivered: list[Output] = []
        self._draining = self._stopping = False
        self._error: str | None = None
        self._steps_done, self._progress = 0, time.monotonic()
        self._expert_load = ExpertLoad()
        self._compiles_at_ready = self._compiles.count
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, folder: Path, config: EngineConfig, replica: Leader | None = None) -> Engine:
        """Load a checkpoint folder, plan, compile and start."""
        return cls(*load(folder, config), config, replica)

    @property
    def weights(self) -> Params:
        """The parameters. The next step uses what is assigned: the same tree, shapes, dtypes and shardings.

        On a GPU, where each layer's matrices are arrays of their own, the stacks of them are copies.
        """
        return stack(self._steps.weights)

    @weights.setter
    def weights(self, weights: Params) -> None:
        held, given = (
            dict(params.leaves_with_path(tree)) for tree in (jax.eval_shape(stack, self._steps.weights), weights)
        )
        if odd := sorted(held.keys() ^ given.keys()):
            raise ValueError(f"weights: {odd[0]} is {'missing' if odd[0] in held else 'no parameter of this model'}")
        for path, old in held.items():
            new = given[path]
            if not hasattr(new, "shape") or (old.shape, old.dtype) != (new.shape, new.dtype):
                what = f"{new.dtype}{list(new.shape)}" if hasattr(new, "shape") else repr(new)
                raise ValueError(f"{path} is {what}, it must be {old.dtype}{list(old.shape)}")
        self._steps.set_weights(weights)

    def run_sequence(self, tokens: Sequence[int]) -> tuple[jax.Array, Trace]:
        """float32 logits [T, V] and the trace of a sequence from its start, beside what is served. From any thread.

        Compiles once for each power of two of T.
        """
        with self._dispatch:
            return run_sequence(self._steps, tokens)

    def submit(self, request: Request) -> None:
        """Queue a request. ValueError if it can never run, QueueFull, EngineStopped. From any thread."""
        if max(request.prompt, default=0) >= self.vocab_size:
            raise ValueError(f"prompt holds id {max(request.prompt)}, the vocabulary has {self.vocab_size}")
        with self._wake:
            if self._draining or self._stopping or self._error is not None:
                raise EngineStopped(self._error or "the engine was stopped")
            if request.id in self._requests:
                raise ValueError(f"request id {request.id!r} is in use")
            if not self._scheduler.has_work:
                self._progress = time.monotonic()
            self._scheduler.add(request)
            self._requests[request.id] = request
            self._wake.notify()

    def abort(self, request_id: str, reason: FinishReason = "abort") -> None:
        """End a request now, wherever it is; what it holds is free at once. Idempotent, from any thread."""
        with self._wake:
            request = self._requests.pop(request_id, None)
            if request is not None:
                self._scheduler.abort(request, reason)
                self._undelivered.append(Output(request, [], reason))
                self._wake.notify()

    def stats(self) -> Stats:
        with self._wake:
            s, blocks = self._scheduler, self._scheduler.blocks
            return Stats(
                running=s.num_running,
                waiting=s.num_waiting,
                running_by_rank=tuple(s.running_by_rank),
                tokens_by_rank=tuple(s.rank_tokens),
                rank_imbalance=s.imbalance,
                expert_imbalance=self._expert_load.imbalance,
                kv_usage=sum(b.page_usage for b in blocks) / len(blocks),
                slot_usage=sum(b.slot_usage for b in blocks) / len(blocks),
                step_age_s=time.monotonic() - self._progress if s.has_work else 0.0,
                steps=self._steps_done,
                preemptions=s.preemptions,
                compiles=self._compiles.count,
                compiles_after_ready=self._compiles.count - self._compiles_at_ready,
                scheduled_tokens=s.scheduled_tokens,
                padding_tokens=s.padding_tokens,
                alive=self._thread.is_alive() and self._error is None,
                error=self._error,
            )

    def drain(self, timeout: float) -> None:
        """Take no more requests, finish those that are here within `timeout` seconds, then stop."""
        with self._wake:
            self._draining = True
            self._wake.notify()
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self._thread.is_alive() and self._requests:
            time.sleep(0.02)
        self.stop()

    def fail(self, reason: str) -> None:
        """End every request with "error" now, though the loop may wait for devices that never answer. Idempotent."""
        with self._wake:
            self._error = self._error or reason
            self._stopping = True
            outputs = self._undelivered + self._end_all("error")
            self._undelivered = []
            self._wake.notify()
        self.deliver(outputs)

    def stop(self) -> None:
        """End every request with "abort" and the loop. Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._compiles.close()

    def _loop(self) -> None:
        try:
            flight: collections.deque[InFlight] = collections.deque()
            while self._turn(flight):
                pass
            reason: FinishReason = "abort"
        except Exception as e:
            error, reason = f"{type(e).__name__}: {e}", "error"
            lost = self._replica.wait_lost(SIGN_S) if self._replica is not None else None
            if lost is None:
                log.exception("the engine's loop died")
                if self._replica is not None:
                    self._replica.fail(error)
            self._error = lost or error
        with self._wake:
            ended = self._end_all(reason)
            self._stopping = True
        self.deliver(self._undelivered + ended)

    def _end_all(self, reason: FinishReason) -> list[Output]:
        """End all requests. The lock must be held."""
        ended = [Output(r, [], reason) for r in self._requests.values()]
        for output in ended:
            self._scheduler.abort(output.request, reason)
        self._requests.clear()
        return ended

    def _turn(self, flight: collections.deque[InFlight]) -> bool:
        """Plan and dispatch a step, commit the one before. False when there is no more to do, ever."""
        with self._wake:
            while not (flight or self._undelivered or self._scheduler.has_work or self._stopping):
                self._wake.wait()
                self._progress = time.monotonic()
            plan = None if self._stopping else self._scheduler.schedule()
            outputs, self._undelivered = self._undelivered, []
        if plan is not None:
            packed, look = pack(plan), self._expert_load.due()
            if self._replica is not None:
                self._replica.broadcast(Step(packed.key, packed.iterations, packed.words, look))
            with self._dispatch:
                tokens = self._steps.run(packed)
                flight.append((plan, tokens, self._steps.load() if look else None))
        if flight and (plan is None or len(flight) > 1):
            done, tokens, load = flight.popleft()
            tokens = np.asarray(tokens)  # waits for the step
            if load is not None:
                self._expert_load.note(load)
            with self._wake:
                outputs += self._scheduler.commit(done, tokens)
                for output in outputs:
                    if output.finish_reason is not None:
                        self._requests.pop(output.request.id, None)
                self._steps_done += 1
                self._progress = time.monotonic()
        if outputs:
            self.deliver(outputs)
        return bool(flight) or not self._stopping
