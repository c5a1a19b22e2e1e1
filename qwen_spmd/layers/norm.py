# SPDX-License-Identifier: Apache-2.0
"""The three RMS norms of the families; all normalise in float32 over the last axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _normalise(x: jax.Array, eps: float) -> jax.Array:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)


def rms_norm(x: jax.Array, w: jax.Array, *, eps: float, zero_centred: bool) -> jax.Array:
    """Qwen3: cast(n) * w. Qwen3.5 (zero-centred): cast(n * (1 + w)), the sum in float32 so that small w survive."""
    n = _normalise(x, eps)
    if zero_centred:
        return (n * (1.0 + w.astype(jnp.float32))).astype(x.dtype)
    return n.astype(x.dtype) * w.astype(x.dtype)


def gated_rms_norm(x: jax.Array, z: jax.Array, w: jax.Array, *, eps: float) -> jax.Array:
    """norm(x) * w * silu(z), normalised before gating."""
    n = _normalise(x, eps).astype(x.dtype).astype(jnp.float32)
    return (n * w.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)
