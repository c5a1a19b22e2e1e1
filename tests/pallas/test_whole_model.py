# SPDX-License-Identifier: Apache-2.0
"""The whole model on the GPU's kernels, interpreted on a CPU: within shard_map, with a trace."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_spmd import params
from qwen_spmd.config import load_config
from qwen_spmd.mesh.axes import make_mesh
from qwen_spmd.mesh.rules import layout
from qwen_spmd.pallas.triton import interpreted, launch
from qwen_spmd.serve import step
from qwen_spmd.serve.sizes import Shapes

ORACLES = Path(__file__).parents[1] / "oracles"
SHAPES = Shapes(page_size=16, pages=4, slots=3, pages_per_seq=2, window=2, ragged=(), windows=())


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3", (1, 1, 1)),
        pytest.param("qwen3_5", (1, 1, 1), marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", (1, 1, 1), marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", (1, 2, 2), marks=pytest.mark.slow),
    ],
)
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the interpreter leaves triton unable to compile")
def test_a_sequence_with_its_trace(name, sizes, monkeypatch):
    pytest.importorskip("triton")
    from qwen_spmd.pallas.add_norm import gpu as add_norm

    cfg = load_config(ORACLES / name)
    dp, ep, tp = sizes
    mesh, lay = make_mesh(*sizes), layout(cfg.dims(), dp=dp, ep=ep, tp=tp)
    whole = params.init(cfg, jnp.float32, jax.random.key(1))
    monkeypatch.setattr(step, "UNROLLED", ("cpu",))

    def run():
        jax.clear_caches()  # what was traced for another implementation
        steps = step.Steps(cfg, params.place(whole, cfg, mesh, lay), mesh, lay, SHAPES, jnp.float32, jnp.float32)
        return jax.tree.map(np.asarray, step.run_sequence(steps, list(range(3, 40))))

    want_logits, want = run()
    monkeypatch.setattr(step, "impl_for", lambda device: "gpu")
    launched = []
    monkeypatch.setattr(add_norm, "launch", lambda *args, **options: launched.append(args) or launch(*args, **options))
    with interpreted():
        logits, trace = run()
    jax.clear_caches()
    assert launched
    np.testing.assert_allclose(logits, want_logits, atol=1e-3)
    np.testing.assert_allclose(trace.hidden, want.hidden, atol=5e-3)
    if want.routing is not None:
        np.testing.assert_array_equal(trace.routing.experts_TX, want.routing.experts_TX)
        np.testing.assert_allclose(trace.routing.logits_TE, want.routing.logits_TE, atol=1e-3)
