# SPDX-License-Identifier: Apache-2.0
"""On a GPU: kernels at full size beside the references, and twice the same bits from the same inputs.

Small cases are compared with float64 oracles by test_parity.py, on a GPU too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_spmd.pallas.gated_delta import cases as gated_delta
from qwen_spmd.pallas.grouped_mlp import cases as grouped_mlp
from qwen_spmd.pallas.paged_attention import cases as paged_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
]


def defined(op, x, out):
    """What the contract defines of the op's results: not the null page and slot, nor rows beyond the last expert's."""
    if op is grouped_mlp:
        return out[: int(x.sizes_E.sum())]
    y, *pools = out
    return y, *(pool.at[x.layer, 0].set(0) for pool in pools)


FULL = [
    pytest.param(op, case, id=f"{op.__name__.split('.')[-2]}: {case.name}")
    for op in (paged_attention, gated_delta, grouped_mlp)
    for case in op.CASES
    if case.full
]


@pytest.mark.parametrize(("op", "case"), FULL)
def test_full_size(op, case):
    x = jax.tree.map(jnp.asarray, op.inputs(case))
    run = jax.jit(lambda x, impl: defined(op, x, op.run(x, impl)), static_argnums=1)
    want, got, again = (run(x, impl) for impl in ("reference", "gpu", "gpu"))
    for w, g, a in zip(*map(jax.tree.leaves, (want, got, again)), strict=True):
        assert jnp.array_equal(g, a, equal_nan=True), "two runs differ"
        assert jnp.array_equal(jnp.isnan(g), jnp.isnan(w)), "NaN where the reference has none, or the other way round"
        w, g = (jnp.nan_to_num(v).astype(jnp.float32) for v in (w, g))
        error = jnp.linalg.norm(w - g) / jnp.linalg.norm(w)
        assert error < 4 * float(jnp.finfo(jnp.bfloat16).eps), error
        assert np.abs(w - g).max() < 0.1 * np.abs(w).max()
