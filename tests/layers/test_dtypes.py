# SPDX-License-Identifier: Apache-2.0
"""What stays float32 when everything else is bfloat16, and recurrent state kept in bfloat16 on request."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from qwen_spmd import checkpoint, model, params
from qwen_spmd import state as state_lib
from qwen_spmd.layers import gated_delta
from qwen_spmd.layers.embed import unembed, unembed_shared
from qwen_spmd.layers.linear import einsum
from qwen_spmd.layers.norm import gated_rms_norm, rms_norm
from qwen_spmd.mesh.axes import RANKS, make_mesh
from qwen_spmd.mesh.rules import SINGLE
from qwen_spmd.serve.sizes import Shapes
from qwen_spmd.state import Batch

MESH = make_mesh()
BF16, F32 = jnp.bfloat16, jnp.float32
FLOAT32 = {"a_log", "dt_bias", "norm"}
"""Of a Gated DeltaNet layer: exponentials of them steer the state, and the gated norm's weight is stored so."""


@pytest.fixture(scope="module")
def tiny(oracle):
    """(cfg, bfloat16 weights) of the hybrid mixture-of-experts model."""
    folder, cfg, _ = oracle("qwen3_5_moe")
    return cfg, checkpoint.load(folder, cfg, dtype=BF16, progress=False)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_declared_parameters(tiny, dtype):
    cfg, _ = tiny
    p = params.abstract(cfg, dtype)
    for block in p.blocks:
        if not isinstance(block.mixer, params.GatedDelta):
            continue
        got = {f.name: getattr(block.mixer, f.name).dtype for f in dataclasses.fields(block.mixer)}
        assert got == {name: F32 if name in FLOAT32 else dtype for name in got}
    mixers = [jax.tree.leaves(b.mixer) for b in p.blocks if isinstance(b.mixer, params.GatedDelta)]
    assert mixers
    rest = p.replace(blocks=[b.replace(mixer=None) for b in p.blocks])
    assert {x.dtype for x in jax.tree.leaves(rest)} == {jnp.dtype(dtype)}


def test_loaded_parameters(tiny, oracle):
    """float32 tensors of the checkpoint arrive bit for bit; bfloat16 ones that are kept in float32 keep their value."""
    cfg, weights = tiny
    full = checkpoint.load(oracle("qwen3_5_moe").folder, cfg, dtype=F32, progress=False)
    declared = params.abstract(cfg, BF16)
    for leaf, want, exact in zip(*map(jax.tree.leaves, (weights, declared, full)), strict=True):
        assert leaf.dtype == want.dtype
        np.testing.assert_array_equal(leaf, exact.astype(want.dtype))
    a_log = next(b.mixer.a_log for b in weights.blocks if isinstance(b.mixer, params.GatedDelta))
    assert np.any(a_log != a_log.astype(BF16).astype(F32))  # nothing rounded it on the way


def test_declared_state(tiny):
    cfg, _ = tiny
    state = state_lib.declare(cfg, BF16, pages=3, page_size=4, slots=2)
    got = {f.name: getattr(state, f.name).dtype for f in dataclasses.fields(state)}
    assert got == {"kv": BF16, "conv": BF16, "rec": F32, "token": jnp.int32, "stopped": jnp.bool_, "load": jnp.int32}
    shapes = Shapes(4, 3, 2, 1, 1, (), ())
    assert [shapes.state(cfg, BF16, d).rec.dtype for d in ("float32", "bfloat16")] == [F32, BF16]


def bits_beyond_bfloat16(x):
    return x.dtype == F32 and bool(np.any(x != x.astype(BF16).astype(F32)))


def test_float32_out_of_bfloat16(tiny):
    """Gate projections, router logits and head logits come straight from the float32 accumulator."""
    cfg, weights = tiny
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, cfg.hidden_size)), BF16)
    block = next(b for b in weights.blocks if isinstance(b.mixer, params.GatedDelta))
    qkv, b, a, z = gated_delta._project(block.mixer, 0, x, "reference")
    assert qkv.dtype == z.dtype == BF16 and bits_beyond_bfloat16(b) and bits_beyond_bfloat16(a)
    assert bits_beyond_bfloat16(unembed(weights, x))
    assert einsum("td,dc->tc", x, block.mixer.w_qkv[0]).dtype == BF16


def test_bfloat16_in_bfloat16_out(tiny):
    cfg, _ = tiny
    x, w = jnp.ones((3, 8), BF16), jnp.ones(8, F32)
    assert gated_rms_norm(x, x, w, eps=cfg.norm_eps).dtype == BF16
    assert {rms_norm(x, w.astype(BF16), eps=1e-6, zero_centred=z).dtype for z in (True, False)} == {jnp.dtype(BF16)}


def test_float32_products_are_full():
    """Ten bits of a float32 factor would be lost in one pass of reduced precision."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64)), F32)
    w = jnp.asarray(np.random.default_rng(1).standard_normal((64, 4)), F32)
    with jax.default_matmul_precision("default"):
        lowered = jax.jit(lambda x, w: einsum("td,de->te", x, w)).lower(x, w).as_text()
    assert "HIGHEST" in lowered


@functools.partial(jax.jit, static_argnums=3)
def step(weights, state, batch, cfg):
    def body(weights, state, batch):
        rows = state_lib.ragged(batch, 16)
        x, state, trace = model.forward(weights, state, batch.tokens_T, rows, cfg=cfg, impl="reference", trace=True)
        return x, state, trace, unembed_shared(weights, x)

    specs, rows = (params.specs(cfg, SINGLE), state_lib.specs(cfg, SINGLE)), P(RANKS)
    outs = (rows, specs[1], P(None, RANKS), rows)
    return jax.shard_map(body, mesh=MESH, in_specs=(*specs, rows), out_specs=outs)(weights, state, batch)


def on_mesh(tree, specs):
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(MESH, spec)), tree, specs)


def one_sequence(tokens, start, stop):
    """A batch with tokens start to stop of a sequence in slot 1."""
    tokens_T, one = np.zeros(len(tokens), np.int32), np.ones(1, np.int32)
    tokens_T[: stop - start] = tokens[start:stop]
    q_start, pages = np.array([0, stop - start], np.int32), np.array([[1, 2, 3]], np.int32)
    return Batch(tokens_T, q_start, stop * one, pages, one, one, one * start == 0, one > 0, None)


def test_whole_model_and_bfloat16_state(tiny):
    """Both state dtypes go through a prefill and decode steps, keep their dtypes, and agree to bfloat16 rounding."""
    cfg, weights = tiny
    weights = params.place(weights, cfg, MESH, SINGLE)
    tokens, recs = np.random.default_rng(0).integers(0, 400, 20), {}
    for rec_dtype in ("float32", "bfloat16"):
        declared = Shapes(16, 4, 2, 3, 1, (), ()).state(cfg, BF16, rec_dtype)
        state = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), declared)
        state = on_mesh(state, state_lib.specs(cfg, SINGLE))
        for start, stop in ((0, 18), (18, 19), (19, 20)):
            batch = one_sequence(tokens, start, stop)
            batch = on_mesh(batch, jax.tree.map(lambda _: P(RANKS), batch))
            hidden, state, trace, logits = step(weights, state, batch, cfg)
        assert (hidden.dtype, trace.hidden.dtype, logits.dtype) == (BF16, BF16, F32)
        assert (trace.routing.logits_TE.dtype, trace.routing.gates_TX.dtype) == (F32, F32)
        assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, declared)
        recs[rec_dtype] = np.asarray(state.rec[:, 1], np.float32)
    assert np.any(recs["float32"] != recs["float32"].astype(BF16).astype(np.float32))
    # In the first layer only the state's own rounding counts: three times half a unit of its largest values.
    first = recs["float32"][0]
    np.testing.assert_allclose(recs["bfloat16"][0], first, atol=3 * 2**-9 * np.abs(first).max())
    assert np.any(recs["bfloat16"] != recs["float32"])
