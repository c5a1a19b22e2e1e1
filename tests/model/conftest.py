# SPDX-License-Identifier: Apache-2.0
"""Running the model without an engine: one sequence or several, in any chunks, on pages and slots in odd places."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from qwen_spmd import model, params
from qwen_spmd import state as state_lib
from qwen_spmd.mesh.axes import RANKS, make_mesh
from qwen_spmd.mesh.rules import SINGLE
from qwen_spmd.state import MAX_STOP_IDS, Batch, Sampling


def sampling(B):
    z = np.zeros(B, np.int32)
    return Sampling(
        temperature_B=np.zeros(B, np.float32),
        top_k_B=z,
        top_p_B=np.ones(B, np.float32),
        min_p_B=np.zeros(B, np.float32),
        seed_B=z.astype(np.uint32),
        stop_ids_B=np.full((B, MAX_STOP_IDS), -1, np.int32),
        min_len_B=z,
        max_len_B=z + 2**30,
    )


@dataclasses.dataclass
class Sequence:
    """A sequence that is fed in pieces; `done` tokens are in its pages and slot."""

    tokens: list[int]
    slot: int
    pages: list[int]
    done: int = 0


MESH = make_mesh()


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _step(weights, state, batch, cfg, page_size, one_token):
    def body(weights, state, batch):
        rows = state_lib.ragged(batch, page_size, one_token=one_token)
        x, state, trace = model.forward(weights, state, batch.tokens_T, rows, cfg=cfg, impl="reference", trace=True)
        return x, model.unembed_shared(weights, x), state, trace

    specs, rows = (params.specs(cfg, SINGLE), state_lib.specs(cfg, SINGLE)), P(RANKS)
    outs = (rows, rows, specs[1], P(None, RANKS))
    return jax.shard_map(body, mesh=MESH, in_specs=(*specs, rows), out_specs=outs)(weights, state, batch)


def on_mesh(tree, specs):
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(MESH, spec)), tree, specs)


class Runner:
    """forward() under jit; its state starts full of NaN, so nothing may be read before it is written."""

    def __init__(self, weights, cfg, *, dtype=jnp.float32, page_size=16, pages=64, slots=12, width=32):
        self.params = params.place(weights, cfg, MESH, SINGLE)
        self.cfg, self.page_size, self.width = cfg, page_size, width
        shapes = state_lib.declare(cfg, dtype, pages=pages, page_size=page_size, slots=slots)
        nan = lambda s: jnp.full(s.shape, jnp.nan if jnp.issubdtype(s.dtype, jnp.floating) else 0, s.dtype)  # noqa: E731
        self.state = on_mesh(jax.tree.map(nan, shapes), state_lib.specs(cfg, SINGLE))
        self._free = list(np.random.default_rng(0).permutation(np.arange(1, pages)))
        self._slots = list(np.random.default_rng(1).permutation(np.arange(1, slots)))

    def sequence(self, tokens):
        n = -(-len(tokens) // self.page_size) + 4
        pages, self._free = self._free[:n], self._free[n:]
        return Sequence(list(map(int, tokens)), int(self._slots.pop()), [int(p) for p in pages])

    def step(self, parts, *, T=None, B=None, one_token=False):
        """`parts` is [(sequence, number of tokens)]. Per part: hidden [n, D], logits [n, V], trace [L, n, *]."""
        lengths = [n for _, n in parts]
        B = B or len(parts) + 1
        T = B if one_token else (T or sum(lengths) + 3)
        tokens = np.full(T, 7, np.int32)
        pages, kv_len = np.zeros((B, self.width), np.int32), np.zeros(B, np.int32)
        slots, fresh = np.zeros(B, np.int32), np.zeros(B, bool)
        row, starts = 0, []
        for b, (s, n) in enumerate(parts):
            tokens[row : row + n] = s.tokens[s.done : s.done + n]
            pages[b, : len(s.pages)] = s.pages
            kv_len[b], slots[b], fresh[b] = s.done + n, s.slot, s.done == 0
            starts.append(row)
            row += n
            s.done += n
        q_start = np.full(B + 1, row, np.int32)
        q_start[: len(parts)] = starts
        batch = Batch(tokens, q_start, kv_len, pages, slots, slots, fresh, kv_len > 0, sampling(B))
        batch = on_mesh(batch, jax.tree.map(lambda _: P(RANKS), batch))
        hidden, logits, self.state, trace = _step(self.params, self.state, batch, self.cfg, self.page_size, one_token)
        cut = lambda x, a, n: jax.tree.map(lambda x: np.asarray(x[:, a : a + n]), x)  # noqa: E731
        return [
            (np.asarray(hidden[a : a + n]), np.asarray(logits[a : a + n]), cut(trace, a, n))
            for a, n in zip(starts, lengths, strict=True)
        ]


@pytest.fixture
def runner():
    return Runner


@pytest.fixture
def same_shards():
    def check(a, b):
        """Two placed Params: shardings, and every device's shard bit by bit."""
        assert jax.tree.structure(a) == jax.tree.structure(b)
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
            assert (x.dtype, x.shape, x.sharding) == (y.dtype, y.shape, y.sharding), path
            for one, other in zip(x.addressable_shards, y.addressable_shards, strict=True):
                assert (one.device, one.index) == (other.device, other.index)
                np.testing.assert_array_equal(one.data, other.data, err_msg=jax.tree_util.keystr(path))

    return check
