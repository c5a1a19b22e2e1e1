# SPDX-License-Identifier: Apache-2.0
"""On a GPU: kernels at full size beside the references, and twice the same bits from the same inputs.

Small cases are compared with float64 oracles by test_parity.py, on a GPU too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_spmd.pallas.add_norm import cases as add_norm
from qwen_spmd.pallas.expert_sort import cases as expert_sort
from qwen_spmd.pallas.expert_sum import cases as expert_sum
from qwen_spmd.pallas.gated_delta import cases as gated_delta
from qwen_spmd.pallas.grouped_mlp import cases as grouped_mlp
from qwen_spmd.pallas.linear import cases as linear
from qwen_spmd.pallas.paged_attention import cases as paged_attention
from qwen_spmd.pallas.router import cases as router
from qwen_spmd.pallas.triton import capability

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
]


def defined(op, x, out):
    """What the contract defines of the op's results: not the null page and slot, nor places that are not taken."""
    if op is grouped_mlp:
        return out[: int(x.sizes_E.sum())]
    if op is expert_sort:
        here = (x.experts_TX >= 0) & (x.experts_TX < x.num_experts)
        return out.sizes_E, out.rows_R[: int(here.sum())], out.pos_TX
    if op in (paged_attention, gated_delta):
        y, *pools = out
        return y, *(pool.at[x.layer, 0].set(0) for pool in pools)
    return out


def compare(op, x, run):
    """Results of `run(x, impl)`: those of the kernels beside the reference's, and those of a second run."""
    want, got, again = (jax.tree.leaves(defined(op, x, run(x, impl))) for impl in ("reference", "gpu", "gpu"))
    for w, g, a in zip(want, got, again, strict=True):
        assert g.dtype == w.dtype
        if not jnp.issubdtype(g.dtype, jnp.floating):
            assert jnp.array_equal(g, w) and jnp.array_equal(g, a)
            continue
        assert jnp.array_equal(g, a, equal_nan=True), "two runs differ"
        assert jnp.array_equal(jnp.isnan(g), jnp.isnan(w)), "NaN where the reference has none, or the other way round"
        w, g = (jnp.nan_to_num(v).astype(jnp.float32) for v in (w, g))
        error = jnp.linalg.norm(w - g) / jnp.linalg.norm(w)
        assert error < 4 * float(jnp.finfo(jnp.bfloat16).eps), error
        assert np.abs(w - g).max() < 0.1 * np.abs(w).max()


FULL = [
    pytest.param(op, case, id=f"{op.__name__.split('.')[-2]}: {case.name}")
    for op in (linear, add_norm, router, expert_sort, grouped_mlp, expert_sum, paged_attention, gated_delta)
    for case in op.CASES
    if case.full
]


@pytest.mark.parametrize(("op", "case"), FULL)
def test_full_size(op, case):
    if getattr(case, "capability", 90) > capability():
        pytest.skip(f"needs compute capability {case.capability}")
    compare(op, jax.tree.map(jnp.asarray, op.inputs(case)), jax.jit(op.run, static_argnums=1))
