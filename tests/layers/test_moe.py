# SPDX-License-Identifier: Apache-2.0
"""Dense and routed feed-forward: the router's choice and weights, padding, experts without tokens, shared expert."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_spmd.config import Moe as Config
from qwen_spmd.layers.mlp import mlp
from qwen_spmd.layers.moe import moe, moe_sequences, route
from qwen_spmd.params import Mlp, Moe

CFG = Config(num_experts=8, experts_per_token=3, width=24, norm_topk_prob=True, shared_width=40)
D, L, LAYER = 32, 2, jnp.int32(1)

jit_moe = jax.jit(lambda p, x, valid, cfg: moe(p, LAYER, x, valid, cfg=cfg, impl="reference"), static_argnums=3)


def weights(cfg=CFG, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    E, M, F = cfg.num_experts, cfg.width, cfg.shared_width

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape) * shape[-2] ** -0.5, dtype)

    p = Moe(normal(L, D, E), normal(L, E, D, M), normal(L, E, D, M), normal(L, E, M, D), None, None)
    if F is None:
        return p
    shared = Mlp(normal(L, D, F), normal(L, D, F), normal(L, F, D))
    return p.replace(w_shared_gate=normal(L, D), shared=shared)


def rows(n, dtype=jnp.float32, seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((n, D)), dtype)


def silu(x):
    return x / (1 + np.exp(-x))


def swiglu(x, gate, up, down):
    return (silu(x @ gate) * (x @ up)) @ down


def expected(p, x, cfg):
    """Row by row, in float64."""
    p, x = jax.tree.map(lambda a: np.asarray(a[LAYER], np.float64), p), np.asarray(x, np.float64)
    y = np.zeros_like(x)
    for t, row in enumerate(x):
        logits = row @ p.w_router
        prob = np.exp(logits - logits.max())
        prob /= prob.sum()
        best = np.argsort(-prob, kind="stable")[: cfg.experts_per_token]
        gates = prob[best] / (prob[best].sum() if cfg.norm_topk_prob else 1)
        for e, gate in zip(best, gates, strict=True):
            y[t] += gate * swiglu(row, p.w_gate[e], p.w_up[e], p.w_down[e])
        if p.shared is not None:
            shared = swiglu(row, p.shared.w_gate, p.shared.w_up, p.shared.w_down)
            y[t] += shared / (1 + np.exp(-row @ p.w_shared_gate))
    return y


def test_mlp():
    p, x = weights().shared, rows(7)
    want = swiglu(*(np.asarray(a, np.float64) for a in (x, p.w_gate[1], p.w_up[1], p.w_down[1])))
    np.testing.assert_allclose(mlp(p, LAYER, x), want, atol=1e-5)
    np.testing.assert_allclose(mlp(p, LAYER, x.reshape(7, 1, D))[:, 0], want, atol=1e-5)


VARIANTS = {
    "Qwen3.5": CFG,
    "Qwen3": dataclasses.replace(CFG, shared_width=None),
    "not renormalised": dataclasses.replace(CFG, norm_topk_prob=False, shared_width=None),
    "all experts": dataclasses.replace(CFG, experts_per_token=8),
}


@pytest.mark.parametrize("cfg", VARIANTS.values(), ids=VARIANTS)
def test_moe(cfg):
    p, x = weights(cfg), rows(16)
    want = expected(p, x, cfg)
    got, routing = jit_moe(p, x, jnp.ones(16, bool), cfg)
    np.testing.assert_allclose(got, want, atol=1e-5)
    trained, trained_routing = jax.jit(lambda p, x: moe_sequences(p, LAYER, x, cfg=cfg))(p, x[None])
    np.testing.assert_allclose(trained[0], want, atol=1e-5)
    np.testing.assert_array_equal(trained_routing.experts_TX[0], routing.experts_TX)


def test_router():
    """float32 logits from bfloat16 rows, renormalised weights, largest first."""
    p, x = weights(dtype=jnp.bfloat16), rows(16, jnp.bfloat16)
    r = route(p, LAYER, x, CFG)
    assert (r.logits_TE.dtype, r.gates_TX.dtype, r.experts_TX.dtype) == (jnp.float32, jnp.float32, jnp.int32)
    want = np.asarray(x, np.float64) @ np.asarray(p.w_router[1], np.float64)
    np.testing.assert_allclose(r.logits_TE, want, atol=1e-5)  # not rounded to bfloat16 on the way
    np.testing.assert_allclose(r.gates_TX.sum(-1), 1, atol=1e-6)
    assert np.all(np.diff(r.gates_TX, axis=-1) <= 0)
    top = np.sort(np.exp(want), -1)[:, ::-1][:, :3]
    np.testing.assert_allclose(r.gates_TX, top / top.sum(-1, keepdims=True), atol=1e-5)


def test_ties_go_to_the_lower_index():
    p = weights()
    p = p.replace(w_router=jnp.zeros_like(p.w_router))
    r = route(p, LAYER, rows(4), CFG)
    np.testing.assert_array_equal(r.experts_TX, [[0, 1, 2]] * 4)
    np.testing.assert_allclose(r.gates_TX, 1 / 3, atol=1e-6)
    twins = p.replace(w_router=p.w_router.at[..., 5].set(rows(1)[0]).at[..., 2].set(rows(1)[0]))
    r = route(twins, LAYER, rows(1), CFG)
    np.testing.assert_array_equal(r.experts_TX, [[2, 5, 0]])


@pytest.mark.parametrize("cfg", [VARIANTS["Qwen3.5"], VARIANTS["Qwen3"]], ids=["Qwen3.5", "Qwen3"])
@pytest.mark.parametrize("fill", [np.nan, np.inf, 0.0, 1e30])
def test_padding_is_zero_and_harmless(cfg, fill):
    """Padding rows, in the middle too, return zeros; the others' bits do not depend on what padding holds."""
    p, x = weights(cfg), rows(16)
    valid = np.ones(16, bool)
    valid[[2, 3, 11, 12, 13, 14, 15]] = False
    clean, _ = jit_moe(p, x, valid, cfg)
    got, _ = jit_moe(p, jnp.where(valid[:, None], x, fill), valid, cfg)
    np.testing.assert_array_equal(got[~valid], 0)
    np.testing.assert_array_equal(got[valid], clean[valid])
    np.testing.assert_allclose(got[valid], expected(p, x, cfg)[valid], atol=1e-5)


def test_only_padding():
    got, _ = jit_moe(weights(), jnp.full((16, D), jnp.nan), np.zeros(16, bool), CFG)
    np.testing.assert_array_equal(got, 0)


def test_rows_do_not_depend_on_the_batch():
    """A row alone among padding gives what it gives in a full batch."""
    p, x = weights(), rows(16)
    together, _ = jit_moe(p, x, np.ones(16, bool), CFG)
    alone, _ = jit_moe(p, x, np.arange(16) == 9, CFG)
    np.testing.assert_allclose(alone[9], together[9], atol=1e-6)


def test_experts_without_tokens():
    """A router that sends everything to three of eight experts, the others' weights full of NaN."""
    p, x = weights(), rows(16)
    x = jnp.abs(x) * jnp.sign(x[0])
    router = p.w_router.at[..., jnp.array([1, 4, 7])].add(jnp.sign(x[0])[:, None])
    unused = jnp.array([0, 2, 3, 5, 6])
    p = p.replace(w_router=router)
    want = expected(p, x, CFG)
    p = p.replace(**{n: getattr(p, n).at[:, unused].set(jnp.nan) for n in ("w_gate", "w_up", "w_down")})
    got, routing = jit_moe(p, x, np.ones(16, bool), CFG)
    assert set(np.unique(routing.experts_TX)) == {1, 4, 7}
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_bfloat16_sums_experts_in_float32():
    p, x = weights(dtype=jnp.bfloat16), rows(16, jnp.bfloat16)
    got, _ = jit_moe(p, x, np.ones(16, bool), CFG)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), expected(p, x, CFG), atol=0.02)
