# SPDX-License-Identifier: Apache-2.0
"""The step programs: the only jit and shard_map of the forward pass.

Two kinds. A *ragged* step runs any mix of prefill chunks and decode rows and samples once for each sequence. A *window*
is a `lax.while_loop` of up to N decode iterations with a stop flag for each row, so that the host is off the critical
path. Every bucket of both is compiled before the first request. All ranks run the same program on rows of their own.
Not here: which requests run (`scheduler`), when (`engine`).
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
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as MemoryLayout
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from qwen_spmd import model, params, state
from qwen_spmd.config import ModelConfig
from qwen_spmd.layers.moe import Route
from qwen_spmd.layers.sample import sample
from qwen_spmd.mesh.axes import RANKS
from qwen_spmd.mesh.rules import Layout
from qwen_spmd.mesh.vary import vary_like
from qwen_spmd.model import DEFAULT_ROUTE, Trace
from qwen_spmd.pallas import impl_for
from qwen_spmd.params import Params
from qwen_spmd.serve.packed import Key, Packed, num_words, unpack
from qwen_spmd.serve.sizes import Shapes
from qwen_spmd.state import FROM_SLOT, Batch, ModelState, Ragged
from qwen_spmd.unstacked import is_unstacked, unstack, unstack_specs

NO_TOKEN = -1
"""In a step's output: the sequence sampled nothing, since it had stopped or its prompt goes on."""

STOP_CHECK = 4
"""Iterations of a window between two looks at whether any rank has a live row: that takes a collective."""

COMPILER_OPTIONS = {
    # Otherwise 16-bit expert weights get another tiling within the program than outside of it: a copy of all of them.
    "tpu": {"xla_tpu_control_large_2nd_minor_layout_for_x16": "0"},
    # Pages fill the memory on purpose: XLA must not take that for a want of it, and compute things twice to save some.
    # And it must not hand slices of larger arrays to Triton's kernels, which count on an alignment of 16 bytes.
    "gpu": {"xla_gpu_memory_limit_slop_factor": "100000", "xla_gpu_enable_dynamic_slice_fusion": False},
}
"""By platform."""

UNROLLED = ("gpu", "cuda")
"""Platforms whose programs have code for each layer and take apart the stacks of weights (`unstacked.py`)."""


class Steps:
    """Compiled step programs of one model on one mesh. `run` is asynchronous; it consumes and replaces `state`.

    Nothing is allocated before `compile`, so with abstract weights the programs can be built for any mesh.

    Where programs unroll the layers, `weights` is taken apart, and deleted (`unstacked.py`).

    The first program that is built chooses how the weights lie in memory, since a matrix that lies otherwise than the
    matrix unit wants it is copied in every step; `compile` begins with a decode window, and moves the weights.
    """

    state: ModelState

    def __init__(
        self,
        cfg: ModelConfig,
        weights: Params,
        mesh: Mesh,
        layout: Layout,
        shapes: Shapes,
        dtype: Any,
        rec_dtype: Any,
        route: Route = DEFAULT_ROUTE,
    ):
        self.cfg, self.mesh, self.layout, self.shapes, self.route = cfg, mesh, layout, shapes, route
        self.rec_dtype = jnp.dtype(rec_dtype)
        self._specs = (params.specs(cfg, layout), state.specs(cfg, layout))
        self.abstract_state = self._on_mesh(shapes.state(cfg, dtype, rec_dtype, layout), self._specs[1])
        self._platform = mesh.devices.flat[0].platform
        if self._platform in UNROLLED:
            weights = unstack(weights, cfg, layout, donate=True)
            self._specs = (unstack_specs(self._specs[0], cfg, layout), self._specs[1])
        self.weights = weights
        # CPUs multiply out of any layout.
        auto = lambda x: x.sharding if self._platform == "cpu" else Format(MemoryLayout.AUTO, x.sharding)  # noqa: E731
        self._formats, self._formats_chosen = jax.tree.map(auto, weights), self._platform == "cpu"
        self._programs: dict[Key, Any] = {}
        self._iterations: list[jax.Array] = []
        self._copy: Any = None

    def compile(self, *, progress: bool = True) -> None:
        """Make the state, all zeros, and compile every bucket, some at a time, with a progress bar."""
        declared = self.abstract_state
        zeros = lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), declared)  # noqa: E731
        self.state = jax.jit(zeros, out_shardings=jax.tree.map(lambda s: s.sharding, declared))()
        self._iterations = [self._put(np.int32(n), P()) for n in range(self.shapes.window + 1)]
        self._copy = None if declared.load is None else jax.jit(jnp.copy).lower(declared.load).compile()
        keys: list[Key] = [*reversed(self.shapes.windows), *self.shapes.ragged]
        with (
            tqdm(total=len(keys), desc="compile", unit="program", disable=not progress) as bar,
            ThreadPoolExecutor(os.cpu_count()) as pool,
        ):

            def add(key: Key) -> None:
                self._programs[key] = self.build(self.lower(key))
                bar.update()

            if not self._formats_chosen:
                add(keys.pop(0))
            list(pool.map(add, keys))
        self.weights = jax.tree.map(_lay_out, self.weights, self._formats)

    def set_weights(self, weights: Params) -> None:
        """What later steps use: the same tree as the constructor's, of the same shapes and dtypes."""
        if self._platform in UNROLLED:
            put = lambda x, spec: jax.device_put(x, NamedSharding(self.mesh, spec))  # noqa: E731
            weights = jax.tree.map(put, weights, params.specs(self.cfg, self.layout))
            weights = unstack(weights, self.cfg, self.layout)
        self.weights = jax.tree.map(lambda old, new: jax.device_put(new, old.format), self.weights, weights)

    def build(self, lowered: Any) -> Any:
        """The compiled program of what `lower` gave. The first one's choice of layouts binds the later ones."""
        program = lowered.compile(_compiler_options(self.mesh))
        if not self._formats_chosen:
            chosen = program.input_formats[0][0]
            # What no step reads is no argument of the program.
            keep = lambda old, new: old.sharding if new.layout is None else new  # noqa: E731
            self._formats, self._formats_chosen = jax.tree.map(keep, self._formats, chosen), True
        return program

    def lower(self, key: Key) -> Any:
        """The program of this key, traced and lowered."""
        shape = (self.layout.ranks, num_words(key, self.shapes.pages_per_seq))
        inputs = [(jax.ShapeDtypeStruct(shape, jnp.int32), P(RANKS))]
        if isinstance(key, int):
            inputs.append((jax.ShapeDtypeStruct((), jnp.int32), P()))
        body = functools.partial(self._window if isinstance(key, int) else self._ragged, key)
        in_specs = (*self._specs, *(spec for _, spec in inputs))
        program = jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=(self._specs[1], P()))
        args = [self._on_mesh(x, spec) for x, spec in inputs]
        args = [params.abstract_like(self.weights), self.abstract_state, *args]
        places = [self._formats, *(jax.tree.map(lambda x: x.sharding, x) for x in args[1:])]
        return jax.jit(program, donate_argnums=1, in_shardings=tuple(places)).lower(*args)

    def run(self, packed: Packed) -> jax.Array:
        """Dispatch what `pack` made of a plan. Returns the sampled tokens, int32 [ranks, B, iterations].

        NO_TOKEN where there is none. Every process must run the same steps in the same order; each gets all tokens.
        """
        inputs = [self._put(packed.words, P(RANKS))]
        if packed.iterations:
            inputs.append(self._iterations[packed.iterations])
        self.state, tokens = self._programs[packed.key](self.weights, self.state, *inputs)
        return tokens

    def load(self) -> jax.Array | None:
        """`ModelState.load` after the steps that were dispatched, as an array of its own: no later step touches it."""
        return None if self._copy is None else self._copy(self.state.load)

    def _put(self, x: Any, spec: P) -> jax.Array:
        """A host array that every process has, on the mesh."""
        return jax.make_array_from_callback(x.shape, NamedSharding(self.mesh, spec), lambda index: x[index])

    def _on_mesh(self, tree: Any, specs: Any) -> Any:
        put = lambda s, spec: jax.ShapeDtypeStruct(  # noqa: E731
            s.shape, s.dtype, sharding=NamedSharding(self.mesh, spec)
        )
        return jax.tree.map(put, tree, specs)

    def _ragged(self, key: Key, weights: Params, st: ModelState, words: jax.Array) -> tuple[ModelState, jax.Array]:
        batch = unpack(words[0], key, self.shapes.pages_per_seq)
        rows = state.ragged(batch, self.shapes.page_size)
        from_slot_T = st.token[batch.read_slot_B[rows.seq_T]]
        tokens_T = jnp.where(batch.tokens_T == FROM_SLOT, from_slot_T, batch.tokens_T)
        hidden_TD, st = self._forward(weights, st, tokens_T, rows)
        st = dataclasses.replace(st, stopped=st.stopped.at[jnp.where(batch.fresh_B, batch.write_slot_B, 0)].set(False))
        live_B = batch.emit_B & ~st.stopped[batch.read_slot_B]
        st, token_B, _ = self._sample(weights, st, hidden_TD[batch.q_start_B[1:] - 1], batch, live_B)
        return st, _from_all_ranks(token_B[:, None])

    def _window(
        self, key: Key, weights: Params, st: ModelState, words: jax.Array, iterations: jax.Array
    ) -> tuple[ModelState, jax.Array]:
        batch = unpack(words[0], key, self.shapes.pages_per_seq)
        slot_B = batch.write_slot_B
        B = len(slot_B)
        # Ranks take part in each other's collectives, so all of them go on as long as one has a live row.
        any_rank = lambda live_B: jax.lax.psum(jnp.any(live_B).astype(jnp.int32), RANKS) > 0  # noqa: E731
        every = STOP_CHECK if self.layout.ranks > 1 else 1

        def body(carry: tuple) -> tuple:
            i, go, live_B, st, out = carry
            now = dataclasses.replace(
                batch,
                kv_len_B=jnp.where(live_B, batch.kv_len_B + i, 0),
                read_slot_B=jnp.where(live_B, slot_B, 0),
                write_slot_B=jnp.where(live_B, slot_B, 0),
            )
            rows = state.ragged(now, self.shapes.page_size, one_token=True)
            hidden_BD, st = self._forward(weights, st, st.token[now.read_slot_B], rows)
            st, token_B, stop_B = self._sample(weights, st, hidden_BD, now, live_B)
            live_B, i = live_B & ~stop_B, i + 1
            go = jax.lax.cond(i % every == 0, any_rank, lambda _: go, live_B)
            return i, go, live_B, st, out.at[:, i - 1].set(token_B)

        live_B = (batch.kv_len_B > 0) & ~st.stopped[slot_B]
        out = vary_like(jnp.full((B, self.shapes.window), NO_TOKEN, jnp.int32), live_B)
        start = (jnp.int32(0), any_rank(live_B), live_B, st, out)
        *_, st, out = jax.lax.while_loop(lambda c: (c[0] < iterations) & c[1], body, start)
        return st, _from_all_ranks(out)

    def _forward(
        self, weights: Params, st: ModelState, tokens_T: jax.Array, rows: Ragged
    ) -> tuple[jax.Array, ModelState]:
        impl = impl_for(self.mesh.devices.flat[0])
        x, st, _ = model.forward(weights, st, tokens_T, rows, cfg=self.cfg, impl=impl, route=self.route)
        return x, st

    def _sample(
        self, weights: Params, st: ModelState, hidden_BD: jax.Array, batch: Batch, live_B: jax.Array
    ) -> tuple[ModelState, jax.Array, jax.Array]:
        """Sample for live sequences, and note token and stop in their slots. Returns (state, tokens, which stop)."""
        s, pos_B = batch.sampling, batch.kv_len_B
        with jax.named_scope("unembed"):
            logits_BV = model.unembed_shared(weights, hidden_BD)
        with jax.named_scope("sample"):
            token_B = sample(logits_BV, s, pos_B)
        stop_B = jnp.any(token_B[:, None] == s.stop_ids_B, -1) & (pos_B >= s.min_len_B)
        stop_B = (stop_B | (pos_B + 1 >= s.max_len_B)) & live_B
        slot_B = jnp.where(live_B, batch.write_slot_B, 0)
        st = dataclasses.replace(st, token=st.token.at[slot_B].set(token_B), stopped=st.stopped.at[slot_B].set(stop_B))
        return st, jnp.where(live_B, token_B, NO_TOKEN), stop_B


def _compiler_options(mesh: Mesh) -> dict[str, Any] | None:
    return COMPILER_OPTIONS.get(mesh.devices.flat[0].platform.replace("cuda", "gpu"))


def _lay_out(x: jax.Array, place: Any) -> jax.Array:
    """The array in this layout; it is given up if it lies otherwise."""
    if not isinstance(place, Format) or x.format == place:  # type: ignore[attr-defined]
        return x
    return jax.device_put(x, place, donate=True)


def _from_all_ranks(x: jax.Array) -> jax.Array:
    """[ranks, ...], on every device, so that every process can read it."""
    return jax.lax.all_gather(x, RANKS, to="invarying")


def run_sequence(steps: Steps, tokens: Sequence[int]) -> tuple[jax.Array, Trace]:
    """A sequence from its start, through the layers, layout and routes of `steps`: float32 logits [T, V] and the trace.

    The first rank runs it, with pages and slots of its own; the others have no row.
    """
    T = len(tokens)
    padded = np.zeros(max(SMALLEST, 1 << (T - 1).bit_length()), np.int32)
    padded[:T] = tokens
    static = (steps.cfg, steps.mesh, steps.layout, steps.route, steps.rec_dtype)
    logits, trace = _sequence_program(steps.mesh)(steps.weights, padded, np.int32(T), *static)
    return logits[:T], jax.tree.map(lambda x: x[:, :T], trace)


SMALLEST = 64


@functools.cache
def _sequence_program(mesh: Mesh) -> Any:
    return jax.jit(_sequence, static_argnums=(3, 4, 5, 6, 7), compiler_options=_compiler_options(mesh))


def _sequence(
    weights: Params,
    tokens_T: jax.Array,
    length: jax.Array,
    cfg: ModelConfig,
    mesh: Mesh,
    layout: Layout,
    route: Route,
    rec_dtype: Any,
) -> tuple[jax.Array, Trace]:
    T = len(tokens_T)
    sizes = {"pages": 2, "page_size": T, "slots": 2}
    declared = state.declare(cfg, weights.embed.dtype, **sizes, rec_dtype=rec_dtype, layout=layout)

    def zeros(s: jax.ShapeDtypeStruct, spec: P) -> jax.Array:
        """This device's part of a state array, typed as different on each."""
        axes = [axis for dim in spec if dim is not None for axis in ((dim,) if isinstance(dim, str) else dim)]
        local = NamedSharding(mesh, spec).shard_shape(s.shape)
        return jax.lax.pcast(jnp.zeros(local, s.dtype), tuple(axes), to="varying")

    def body(weights: Params, tokens_T: jax.Array, length: jax.Array) -> tuple[jax.Array, Trace]:
        first = jax.lax.axis_index(RANKS) == 0
        n = jnp.where(first, length, 0)
        one = jnp.where(first, jnp.ones(1, jnp.int32), 0)
        valid_T = jnp.arange(T) < n
        pos_T = jnp.where(valid_T, jnp.arange(T), 0)
        rows = Ragged(
            seq_T=jnp.zeros_like(pos_T),
            pos_T=pos_T,
            valid_T=valid_T,
            page_T=valid_T.astype(jnp.int32),
            slot_T=pos_T,
            q_start_B=jnp.stack([jnp.zeros_like(n), n]),
            kv_len_B=n[None],
            pages_BP=one[None],
            read_slot_B=one,
            write_slot_B=one,
            fresh_B=one > 0,
            one_token=False,
        )
        st = jax.tree.map(zeros, declared, state.specs(cfg, layout))
        impl = impl_for(mesh.devices.flat[0])
        tokens_T = vary_like(tokens_T, n)
        x, _, trace = model.forward(weights, st, tokens_T, rows, cfg=cfg, impl=impl, route=route, trace=True)
        of_first = lambda x: jax.lax.psum(jnp.where(first, x, 0), RANKS)  # noqa: E731
        return of_first(model.unembed_shared(weights, x)), jax.tree.map(of_first, trace)

    specs = params.specs(cfg, layout)
    in_specs = (unstack_specs(specs, cfg, layout) if is_unstacked(weights) else specs, P(), P())
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=P())(weights, tokens_T, length)


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
