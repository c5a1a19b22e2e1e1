# SPDX-License-Identifier: Apache-2.0
"""The RMS norms of the families; all normalise in float32 over the last axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwen_spmd.pallas.add_norm.reference import normalise, rms_norm

__all__ = ["gated_rms_norm", "rms_norm"]


def gated_rms_norm(x: jax.Array, z: jax.Array, w: jax.Array, *, eps: float) -> jax.Array:
    """norm(x) * w * silu(z), normalised before gating."""
    n = normalise(x, eps).astype(x.dtype).astype(jnp.float32)
    return (n * w.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)
