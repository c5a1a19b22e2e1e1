# SPDX-License-Identifier: Apache-2.0
"""The step programs: the only jit and shard_map.

Two kinds. A *ragged* step runs any mix of prefill chunks and decode rows and samples once for each sequence. A *window*
is a `lax.while_loop` of up to N decode iterations with a stop flag for each row, so that the host is off the critical
path. Every bucket of both is compiled before the first request. Not here: which requests run (`scheduler`), when
(`engine`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from qwen_spmd import model, params, state
from qwen_spmd.config import ModelConfig
from qwen_spmd.layers.sample import sample
from qwen_spmd.mesh.rules import Layout
from qwen_spmd.model import Trace
from qwen_spmd.pallas import impl_for
from qwen_spmd.pallas.gated_delta.reference import CHUNK
from qwen_spmd.params import Params
from qwen_spmd.serve.scheduler import StepPlan
from qwen_spmd.serve.sizes import Shapes
from qwen_spmd.state import FROM_SLOT, MAX_STOP_IDS, Batch, ModelState, Sampling

NO_TOKEN = -1
"""In a step's output: the sequence sampled nothing, since it had stopped or its prompt goes on."""


class Steps:
    """Compiled step programs of one model on one mesh. `run` is asynchronous; it consumes and replaces `state`."""

    def __init__(
        self, cfg: ModelConfig, weights: Params, mesh: Mesh, layout: Layout, shapes: Shapes, dtype: Any, rec_dtype: Any
    ):
        self.cfg, self.mesh, self.shapes = cfg, mesh, shapes
        self.weights = weights
        declared = shapes.state(cfg, dtype, rec_dtype)
        self._state_specs = jax.tree.map(lambda s: P(*(None,) * len(s.shape)), declared)
        self._param_specs = params.specs(cfg, layout)
        self._abstract_state = self._on_mesh(declared, self._state_specs)
        zeros = lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), declared)  # noqa: E731
        self.state = jax.jit(zeros, out_shardings=jax.tree.map(lambda s: s.sharding, self._abstract_state))()
        self._programs: dict[tuple[int, int] | int, Any] = {}
        self._iterations = [np.int32(n) for n in range(shapes.window + 1)]

    def compile(self, *, progress: bool = True) -> None:
        """Compile every bucket, some at a time, with a progress bar."""
        keys: list[tuple[int, int] | int] = [*self.shapes.ragged, *self.shapes.windows]
        with (
            tqdm(total=len(keys), desc="compile", unit="program", disable=not progress) as bar,
            ThreadPoolExecutor(os.cpu_count()) as pool,
        ):
            for key, program in zip(keys, pool.map(lambda key: self.lower(key).compile(), keys)):
                self._programs[key] = program
                bar.update()

    def lower(self, key: tuple[int, int] | int) -> Any:
        """The program of (tokens, sequences), or of a window of that many sequences, traced and lowered."""
        T, B = (key, key) if isinstance(key, int) else key
        batch = self._on_mesh(abstract_batch(T, B, self.shapes.pages_per_seq), None)
        args = [params.abstract_like(self.weights), self._abstract_state, batch]
        body = self._ragged
        if isinstance(key, int):
            body = self._window
            args.append(self._on_mesh(jax.ShapeDtypeStruct((), jnp.int32), None))
        specs = (self._param_specs, self._state_specs, *(P() for _ in args[2:]))
        program = jax.shard_map(body, mesh=self.mesh, in_specs=specs, out_specs=(self._state_specs, P()))
        return jax.jit(program, donate_argnums=1).lower(*args)

    def run(self, plan: StepPlan) -> jax.Array:
        """Dispatch a plan. Returns the sampled tokens, int32 [B, iterations], NO_TOKEN where there is none."""
        batch = to_batch(plan)
        if plan.iterations == 0:
            key = (len(batch.tokens_T), len(batch.kv_len_B))
            self.state, tokens = self._programs[key](self.weights, self.state, batch)
        else:
            n = self._iterations[plan.iterations]
            self.state, tokens = self._programs[len(batch.kv_len_B)](self.weights, self.state, batch, n)
        return tokens

    def _on_mesh(self, tree: Any, specs: Any) -> Any:
        put = lambda s, spec: jax.ShapeDtypeStruct(  # noqa: E731
            s.shape, s.dtype, sharding=NamedSharding(self.mesh, spec)
        )
        if specs is None:
            return jax.tree.map(lambda s: put(s, P()), tree)
        return jax.tree.map(put, tree, specs)

    def _ragged(self, weights: Params, st: ModelState, batch: Batch) -> tuple[ModelState, jax.Array]:
        rows = state.ragged(batch, self.shapes.page_size)
        from_slot_T = st.token[batch.read_slot_B[rows.seq_T]]
        tokens_T = jnp.where(batch.tokens_T == FROM_SLOT, from_slot_T, batch.tokens_T)
        hidden_TD, st, _ = self._forward(weights, st, tokens_T, rows)
        st = dataclasses.replace(st, stopped=st.stopped.at[jnp.where(batch.fresh_B, batch.write_slot_B, 0)].set(False))
        live_B = batch.emit_B & ~st.stopped[batch.read_slot_B]
        st, token_B, _ = self._sample(weights, st, hidden_TD[batch.q_start_B[1:] - 1], batch, live_B)
        return st, token_B[:, None]

    def _window(
        self, weights: Params, st: ModelState, batch: Batch, iterations: jax.Array
    ) -> tuple[ModelState, jax.Array]:
        slot_B = batch.write_slot_B
        B = len(slot_B)

        def body(carry: tuple) -> tuple:
            i, live_B, st, out = carry
            now = dataclasses.replace(
                batch,
                kv_len_B=jnp.where(live_B, batch.kv_len_B + i, 0),
                read_slot_B=jnp.where(live_B, slot_B, 0),
                write_slot_B=jnp.where(live_B, slot_B, 0),
            )
            rows = state.ragged(now, self.shapes.page_size, one_token=True)
            hidden_BD, st, _ = self._forward(weights, st, st.token[now.read_slot_B], rows)
            st, token_B, stop_B = self._sample(weights, st, hidden_BD, now, live_B)
            return i + 1, live_B & ~stop_B, st, out.at[:, i].set(token_B)

        live_B = (batch.kv_len_B > 0) & ~st.stopped[slot_B]
        start = (jnp.int32(0), live_B, st, jnp.full((B, self.shapes.window), NO_TOKEN, jnp.int32))
        _, _, st, out = jax.lax.while_loop(lambda c: (c[0] < iterations) & jnp.any(c[1]), body, start)
        return st, out

    def _forward(self, weights: Params, st: ModelState, tokens_T: jax.Array, rows: state.Ragged) -> Any:
        impl = impl_for(self.mesh.devices.flat[0])
        return model.forward(weights, st, tokens_T, rows, cfg=self.cfg, impl=impl)

    def _sample(
        self, weights: Params, st: ModelState, hidden_BD: jax.Array, batch: Batch, live_B: jax.Array
    ) -> tuple[ModelState, jax.Array, jax.Array]:
        """Sample for live sequences, and note token and stop in their slots. Returns (state, tokens, which stop)."""
        s, pos_B = batch.sampling, batch.kv_len_B
        token_B = sample(model.unembed(weights, hidden_BD), s, pos_B)
        stop_B = jnp.any(token_B[:, None] == s.stop_ids_B, -1) & (pos_B >= s.min_len_B)
        stop_B = (stop_B | (pos_B + 1 >= s.max_len_B)) & live_B
        slot_B = jnp.where(live_B, batch.write_slot_B, 0)
        st = dataclasses.replace(st, token=st.token.at[slot_B].set(token_B), stopped=st.stopped.at[slot_B].set(stop_B))
        return st, jnp.where(live_B, token_B, NO_TOKEN), stop_B


def run_sequence(weights: Params, tokens: Sequence[int], cfg: ModelConfig) -> tuple[jax.Array, Trace]:
    """A whole sequence without state: float32 logits [T, V] and the trace. Compiles once for each power of two of T."""
    T = len(tokens)
    padded = np.zeros((1, max(CHUNK, 1 << (T - 1).bit_length())), np.int32)
    padded[0, :T] = tokens
    logits, trace = _sequence(weights, padded, cfg, jax.typeof(weights.embed).sharding.mesh)
    trace = Trace(trace.hidden[:, 0, :T], jax.tree.map(lambda x: x[:, 0, :T], trace.routing))
    return logits[0, :T], trace


@functools.partial(jax.jit, static_argnums=(2, 3))
def _sequence(weights: Params, tokens_BT: jax.Array, cfg: ModelConfig, mesh: Mesh) -> tuple[jax.Array, Trace]:
    def body(weights: Params, tokens_BT: jax.Array) -> tuple[jax.Array, Trace]:
        hidden_BTD, trace = model.forward_sequences(weights, tokens_BT, cfg)
        return model.unembed(weights, hidden_BTD), trace

    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, weights)
    return jax.shard_map(body, mesh=mesh, in_specs=(specs, P()), out_specs=P())(weights, tokens_BT)


def to_batch(plan: StepPlan) -> Batch:
    """A plan's numpy arrays as the pytree that the programs take."""
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(Batch) if f.name != "sampling"}  # type: ignore[arg-type]
    sampling = {f.name: getattr(plan, f.name) for f in dataclasses.fields(Sampling)}  # type: ignore[arg-type]
    return Batch(**fields, sampling=Sampling(**sampling))


def abstract_batch(T: int, B: int, pages_per_seq: int) -> Batch:
    """The shapes and dtypes of a Batch."""
    shape: Any = jax.ShapeDtypeStruct  # stands for an Array
    i32, f32, flag = shape((B,), jnp.int32), shape((B,), jnp.float32), shape((B,), jnp.bool_)
    return Batch(
        tokens_T=shape((T,), jnp.int32),
        q_start_B=shape((B + 1,), jnp.int32),
        kv_len_B=i32,
        pages_BP=shape((B, pages_per_seq), jnp.int32),
        read_slot_B=i32,
        write_slot_B=i32,
        fresh_B=flag,
        emit_B=flag,
        sampling=Sampling(
            temperature_B=f32,
            top_k_B=i32,
            top_p_B=f32,
            min_p_B=f32,
            seed_B=shape((B,), jnp.uint32),
            stop_ids_B=shape((B, MAX_STOP_IDS), jnp.int32),
            min_len_B=i32,
            max_len_B=i32,
        ),
    )


def use_compilation_cache(folder: Path) -> None:
    """Keep compiled programs in `folder`, so that the next start with the same shapes only reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


class CompileCounter:
    """Counts XLA compilations in this process from when it is made. One after ready is a bug that a metric shows."""

    def __init__(self) -> None:
        self.count, self._counting = 0, True
        jax.monitoring.register_event_duration_secs_listener(self._seen)

    def _seen(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1

    def close(self) -> None:
        """Stop counting. Idempotent."""
        if self._counting:
            jax.monitoring.unregister_event_duration_listener(self._seen)
        self._counting = False
