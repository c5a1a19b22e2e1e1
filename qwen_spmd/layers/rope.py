# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: rotate-half pairs (i, i + dim/2) over the first `dim` of a head, YaRN scaling.

Text positions are equal on all axes, so the interleaved multimodal form of Qwen3.5 is this one.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from qwen_spmd.config import Rope


def inverse_frequencies(rope: Rope) -> np.ndarray:
    """Radians a token for each of the dim/2 pairs, float64. YaRN: Peng et al. 2023, as static scaling."""
    i = np.arange(rope.dim // 2)
    inv = rope.theta ** (-2 * i / rope.dim)
    if rope.yarn_factor is None:
        return inv

    def turns(n: float) -> float:
        """The pair that turns n times over the original context."""
        return rope.dim * math.log(rope.yarn_original_len / (2 * math.pi * n)) / (2 * math.log(rope.theta))

    low = max(math.floor(turns(rope.yarn_beta_fast)), 0)
    high = min(math.ceil(turns(rope.yarn_beta_slow)), rope.dim - 1)
    keep = 1 - np.clip((i - low) / max(high - low, 1e-3), 0, 1)
    return inv * keep + inv / rope.yarn_factor * (1 - keep)


def angles(pos_T: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), float32 [.., dim/2], of positions of any shape."""
    a = pos_T.astype(jnp.float32)[..., None] * jnp.asarray(inverse_frequencies(rope), jnp.float32)
    return jnp.cos(a) * rope.attention_factor, jnp.sin(a) * rope.attention_factor


def rotate(x_TNH: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the first dims of every head in float32; the rest passes through."""
    cos, sin = (a[..., None, :] for a in cos_sin)
    half = cos.shape[-1]
    x1, x2 = x_TNH[..., :half].astype(jnp.float32), x_TNH[..., half : 2 * half].astype(jnp.float32)
    rotated = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).astype(x_TNH.dtype)
    return jnp.concatenate([rotated, x_TNH[..., 2 * half :]], -1)
