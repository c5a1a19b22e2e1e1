# SPDX-License-Identifier: Apache-2.0
"""Programs that unroll the layers, out of matrices taken apart, compute what those that loop over stacks do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_spmd import params
from qwen_spmd.mesh.axes import make_mesh
from qwen_spmd.mesh.rules import layout
from qwen_spmd.serve import step
from qwen_spmd.serve.sizes import Shapes
from qwen_spmd.serve.step import Steps, run_sequence
from qwen_spmd.unstacked import is_unstacked, stack

SHAPES = Shapes(page_size=16, pages=4, slots=3, pages_per_seq=2, window=2, ragged=(), windows=())


@pytest.mark.parametrize(
    ("name", "sizes"), [("qwen3", (1, 1, 2)), ("qwen3_5_moe", (1, 2, 2))], ids=["tp=2", "ep=2 tp=2"]
)
def test_unrolled_is_scanned(oracle, monkeypatch, name, sizes):
    cfg = oracle(name).cfg
    lay, mesh = layout(cfg.dims(), dp=sizes[0], ep=sizes[1], tp=sizes[2]), make_mesh(*sizes)
    whole = params.init(cfg, jnp.float32, jax.random.key(1))
    tokens = list(range(3, 40))

    def steps():
        return Steps(cfg, params.place(whole, cfg, mesh, lay), mesh, lay, SHAPES, jnp.float32, jnp.float32)

    want, trace = run_sequence(steps(), tokens)
    monkeypatch.setattr(step, "UNROLLED", ("cpu",))
    unrolled = steps()
    assert is_unstacked(unrolled.weights)
    got, got_trace = run_sequence(unrolled, tokens)
    np.testing.assert_allclose(got, want, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got_trace, trace)
    jax.tree.map(np.testing.assert_array_equal, stack(unrolled.weights), params.place(whole, cfg, mesh, lay))


def test_weights_are_assigned_from_anywhere(oracle, monkeypatch):
    monkeypatch.setattr(step, "UNROLLED", ("cpu",))
    cfg = oracle("qwen3").cfg
    lay, mesh = layout(cfg.dims(), tp=2), make_mesh(1, 1, 2)
    old, new = (params.init(cfg, jnp.float32, jax.random.key(seed)) for seed in (1, 2))
    steps = Steps(cfg, params.place(old, cfg, mesh, lay), mesh, lay, SHAPES, jnp.float32, jnp.float32)
    shardings = jax.tree.map(lambda x: x.sharding, steps.weights)
    for given in (jax.tree.map(np.asarray, new), new):  # numpy, and arrays on one device
        steps.set_weights(given)
        jax.tree.map(np.testing.assert_array_equal, stack(steps.weights), new)
        assert jax.tree.map(lambda x: x.sharding, steps.weights) == shardings
