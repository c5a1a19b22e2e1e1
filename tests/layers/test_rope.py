# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding: plain, partial, and both published YaRN recipes."""

import jax.numpy as jnp
import numpy as np
import pytest

from qwen_spmd.config import Rope
from qwen_spmd.layers.rope import angles, inverse_frequencies, rotate


def expected(x, pos, theta, dim, factor=1.0, inverse=None):
    """Pair (i, i + dim/2) as a complex number, turned by pos * theta^(-2i/dim)."""
    half = dim // 2
    inverse = theta ** (-2 * np.arange(half) / dim) if inverse is None else inverse
    z = x[..., :half] + 1j * x[..., half:dim]
    z = z * factor * np.exp(1j * pos[:, None] * inverse)[:, None]
    return np.concatenate([z.real, z.imag, x[..., dim:]], -1)


@pytest.mark.parametrize(("head_dim", "dim", "theta"), [(128, 128, 1e6), (256, 64, 1e7), (16, 16, 1e4)])
def test_rotation(head_dim, dim, theta):
    pos = np.array([0, 1, 2, 77, 4095])
    x = np.random.default_rng(0).standard_normal((5, 3, head_dim))
    got = rotate(jnp.asarray(x, jnp.float32), angles(pos, Rope(theta, dim)))
    # A float32 angle near 4095 is off by 2e-4 at most.
    np.testing.assert_allclose(got, expected(x, pos, theta, dim), atol=2e-3)
    np.testing.assert_allclose(got[:4], expected(x, pos, theta, dim)[:4], atol=3e-5)
    np.testing.assert_array_equal(got[..., dim:], x[..., dim:].astype(np.float32))
    np.testing.assert_array_equal(got[0], x[0].astype(np.float32))


def test_only_distances_matter():
    x = np.random.default_rng(0).standard_normal((2, 1, 64)).astype(np.float32)
    dots = []
    for start in (0, 5, 900):
        q, k = rotate(jnp.asarray(x), angles(np.array([start + 7, start]), Rope(1e6, 64)))[:, 0]
        dots.append(float(q @ k))
    np.testing.assert_allclose(dots, dots[0], atol=1e-3)


def test_positions_of_any_shape():
    rope, pos = Rope(1e6, 32), np.arange(6)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((6, 2, 32)), jnp.float32)
    got = rotate(x.reshape(2, 3, 2, 32), angles(pos.reshape(2, 3), rope))
    np.testing.assert_array_equal(got.reshape(6, 2, 32), rotate(x, angles(pos, rope)))


def test_rotation_is_float32_inside():
    """Only the result is rounded to bfloat16."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 2, 64)), jnp.bfloat16)
    cos_sin = angles(np.array([1, 100, 1000, 2000]), Rope(1e6, 64))
    got = rotate(x, cos_sin)
    assert (got.dtype, cos_sin[0].dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(got, rotate(x.astype(jnp.float32), cos_sin).astype(jnp.bfloat16))


# rope, then the last pair that keeps its frequency and the first that is divided by the factor.
YARN = [
    pytest.param(Rope(1e7, 64, 4.0, 262144, attention_factor=0.1 * np.log(4) + 1), 14, 22, id="Qwen3.5"),
    pytest.param(Rope(1e6, 128, 4.0, 32768, attention_factor=0.1 * np.log(4) + 1), 23, 40, id="Qwen3"),
]


@pytest.mark.parametrize(("rope", "low", "high"), YARN)
def test_yarn(rope, low, high):
    plain, yarn = inverse_frequencies(Rope(rope.theta, rope.dim)), inverse_frequencies(rope)
    ratio = plain / yarn
    np.testing.assert_allclose(ratio[: low + 1], 1, rtol=1e-12)
    np.testing.assert_allclose(ratio[high:], 4, rtol=1e-12)
    assert np.all((ratio[low + 1 : high] > 1) & (ratio[low + 1 : high] < 4))
    middle = (np.arange(low, high) - low) / (high - low)
    np.testing.assert_allclose(yarn[low:high], plain[low:high] * (1 - middle + middle / 4), rtol=1e-12)


@pytest.mark.parametrize(("rope", "low", "high"), YARN)
def test_yarn_scales_what_it_rotates(rope, low, high):
    """The attention factor is on the rotated dims only, at position 0 too."""
    x = np.random.default_rng(0).standard_normal((3, 2, rope.dim + 8))
    pos = np.array([0, 1, 50])
    got = rotate(jnp.asarray(x, jnp.float32), angles(pos, rope))
    want = expected(x, pos, rope.theta, rope.dim, 1.1386294, inverse_frequencies(rope))
    np.testing.assert_allclose(got, want, atol=3e-5)
    np.testing.assert_allclose(got[0, :, : rope.dim], 1.1386294 * x[0, :, : rope.dim], rtol=1e-6)
