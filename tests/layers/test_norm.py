# SPDX-License-Identifier: Apache-2.0
"""The three RMS norms: formula, rounding places, and small weights that bfloat16 would lose."""

import jax.numpy as jnp
import numpy as np
import pytest

from qwen_spmd.layers.norm import gated_rms_norm, rms_norm

EPS = 1e-6


def normalised(x):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    return rng.standard_normal((5, 3, 64)), rng.standard_normal((5, 3, 64)), rng.standard_normal(64)


def test_formulas(data):
    x, z, w = (jnp.asarray(a, jnp.float32) for a in data)
    n, tolerance = normalised(x), {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(rms_norm(x, w, eps=EPS, zero_centred=False), n * w, **tolerance)
    np.testing.assert_allclose(rms_norm(x, w, eps=EPS, zero_centred=True), n * (1 + np.asarray(w)), **tolerance)
    silu = np.asarray(z) / (1 + np.exp(-np.asarray(z)))
    np.testing.assert_allclose(gated_rms_norm(x, z, w, eps=EPS), n * w * silu, **tolerance)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-3, 1e4, 1e15])
def test_size_of_the_input(scale):
    """Squares of bfloat16 values up to 1e15 are summed in float32; rows of zeros stay zeros."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 64)) * scale, jnp.bfloat16)
    got = rms_norm(x, jnp.ones(64, jnp.bfloat16), eps=EPS, zero_centred=False)
    np.testing.assert_allclose(got.astype(jnp.float32), normalised(x.astype(jnp.float32)), rtol=2**-7, atol=1e-30)


def test_small_zero_centred_weights_survive_bfloat16(data):
    """1 + 1e-4 is 1 in bfloat16, but not in float32: it moves outputs that lie near a rounding edge."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((64, 64)), jnp.bfloat16)
    zeros, small = jnp.zeros(64, jnp.bfloat16), jnp.full(64, 1e-4, jnp.bfloat16)
    norm = lambda w: np.asarray(rms_norm(x, w, eps=EPS, zero_centred=True), np.float32)  # noqa: E731
    assert norm(zeros).dtype == norm(small).dtype
    assert np.any(norm(small) != norm(zeros))
    want = (normalised(x.astype(jnp.float32)) * (1 + float(small[0]))).astype(jnp.bfloat16)
    assert np.mean(norm(small) == want.astype(np.float32)) > 0.999


def test_places_of_rounding(data):
    """bfloat16 rounds as transformers does: plain and gated after normalising, zero-centred at the end only."""
    x, z, w = (jnp.asarray(a, jnp.bfloat16) for a in data)
    n = normalised(x.astype(jnp.float32)).astype(np.float32)
    rounded = n.astype(jnp.bfloat16)
    wf, zf = np.asarray(w, np.float32), np.asarray(z, np.float32)
    plain = rounded * np.asarray(w)
    zero_centred = (n * (1 + wf)).astype(jnp.bfloat16)
    gated = (rounded.astype(np.float32) * wf * (zf / (1 + np.exp(-zf)))).astype(jnp.bfloat16)
    for got, want in (
        (rms_norm(x, w, eps=EPS, zero_centred=False), plain),
        (rms_norm(x, w, eps=EPS, zero_centred=True), zero_centred),
        (gated_rms_norm(x, z, w, eps=EPS), gated),
    ):
        assert got.dtype == jnp.bfloat16
        assert np.mean(np.asarray(got, np.float32) == want.astype(np.float32)) > 0.99
