# SPDX-License-Identifier: Apache-2.0
"""Microscaled weights: their bits, and how they round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_spmd.pallas.scaled import GROUP, Microscaled

quantise = jax.jit(Microscaled.quantise, static_argnums=1)


def column(w, format):
    """One output's inputs: (bytes, scales' bytes, scale, what they stand for)."""
    q = quantise(np.array(w, np.float32)[:, None], format)
    values, scales = (np.asarray(x).view(np.uint8)[0] for x in (q.values, q.scales))
    return values, scales, q.scale, np.asarray(q.astype(jnp.float32))[:, 0]


def padded(w):
    return [*w, *[0] * (32 - len(w))]


def test_known_bits_of_mxfp8():
    """256 is the largest power of two that e4m3 holds, and the scale brings 1.75 to its binade; 2^-7 is subnormal."""
    values, scales, _, w = column(padded([1.75, -1, 2.0**-15, 0]), "mxfp8")
    assert scales.tolist() == [127 - 8]
    assert values[:4].tolist() == [0x7E, 0xF8, 0x04, 0]
    np.testing.assert_array_equal(w[:4], [1.75, -1, 2.0**-15, 0])


def test_known_bits_of_mxfp4():
    """4 is the largest power of two that e2m1 holds; the first of two is in the low bits."""
    values, scales, _, w = column(padded([6, -4, 0.5, -1.5]), "mxfp4")
    assert scales.tolist() == [127]
    assert values[:2].tolist() == [0xE7, 0xB1] and not values[2:].any()
    np.testing.assert_array_equal(w[:4], [6, -4, 0.5, -1.5])


def test_known_bits_of_nvfp4():
    """The largest magnitude is the largest scale, 448, times 6; the second group has its own scale."""
    values, scales, scale, w = column([2688, *[0] * 15, 6, -3, *[0] * 14], "nvfp4")
    assert scale == 1 and scales.tolist() == [0x7E, 0x38]
    assert values[0] == 0x07 and values[8] == 0xD7
    np.testing.assert_array_equal(w[[0, 16, 17]], [2688, 6, -3])


def test_ties_go_to_even_and_what_is_too_large_to_the_largest():
    _, _, _, w = column(padded([4, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5, 7.9, -0.25]), "mxfp4")
    np.testing.assert_array_equal(w[:11], [4, 0, 1, 1, 2, 2, 4, 4, -4, 6, -0.0])
    assert np.signbit(w[10])
    _, _, _, w = column(padded([256, 17, 19, 500]), "mxfp8")
    np.testing.assert_array_equal(w[:4], [256, 16, 20, 448])


@pytest.mark.parametrize("format", GROUP)
def test_round_trip(format):
    """Values that the format holds come back; others within half a step of the largest magnitude's binade."""
    w = np.random.default_rng(0).standard_normal((2, 3, 64, 40)).astype(np.float32)
    w *= 10.0 ** np.arange(-3, 3).reshape(2, 3, 1, 1)
    q = quantise(w, format)
    assert q.shape == w.shape
    got = np.asarray(q.astype(jnp.float32))
    np.testing.assert_array_equal(np.asarray(q[1, 2].astype(jnp.float32)), got[1, 2])
    np.testing.assert_allclose(quantise(got, format).astype(jnp.float32), got, rtol=2e-7)
    groups = lambda x: x.reshape(2, 3, 64 // GROUP[format], GROUP[format], 40)  # noqa: E731
    largest = np.abs(groups(w)).max(3, keepdims=True)
    # Of the largest: mxfp8 from 448 to 512, mxfp4 from 6 to 8 are cut off; nvfp4's scale is off by up to 1/16.
    worst = {"mxfp8": 1 / 8, "mxfp4": 1 / 4, "nvfp4": 1 / 6 + 1 / 16}[format]
    assert np.all(np.abs(groups(got - w)) <= worst * largest)


@pytest.mark.parametrize("format", GROUP)
def test_zeros_tiny_and_huge(format):
    size = GROUP[format]
    for value, want in ((0, 0), (1e-45, 0), (1e-30, 1e-30), (3e38, 3e38)):
        _, _, _, w = column([value] * 32, format)
        np.testing.assert_allclose(w, want, rtol=1 / 4)
        assert np.isfinite(w).all()
    _, _, _, w = column([3e38] * size + [0] * size, format)
    assert np.isfinite(w).all() and not w[size:].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", GROUP)
def test_nan_spreads_over_what_shares_its_scale(format, bad):
    size = GROUP[format]
    _, _, _, w = column([1.0] * size + [bad] + [1.0] * (2 * size - 1), format)
    assert np.isnan(w[size : 2 * size]).all()
    assert np.isnan(w).all() if format == "nvfp4" else np.all(w[:size] == 1) and np.all(w[2 * size :] == 1)


def test_groups_are_whole():
    with pytest.raises(ValueError, match="nvfp4 has a scale for each 16 along the contracted axis, which has 40"):
        Microscaled.quantise(jnp.zeros((40, 8)), "nvfp4")
