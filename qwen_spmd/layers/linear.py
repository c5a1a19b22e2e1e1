# SPDX-License-Identifier: Apache-2.0
"""einsum of activations with weights, for what is no layer's projection (`pallas/linear`), and sums over `tp`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def einsum(spec: str, x: jax.Array, w: jax.Array, *, out_dtype: Any = None) -> jax.Array:
    """Activations by weights in x's dtype, accumulated in float32. float32 inputs multiply in full float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(spec, x, w.astype(x.dtype), precision=precision, preferred_element_type=out_dtype or x.dtype)


def sum_over_tp(parts: jax.Array, dtype: Any) -> jax.Array:
    """Parts [S, .., D] of a sum that `tp` shares -> parts of the whole: of one term in this dtype, if it travels."""
    if jax.lax.axis_size("tp") > 1:
        parts = jnp.sum(parts, 0, keepdims=True, dtype=jnp.float32).astype(dtype)
    return jax.lax.psum(parts, "tp")
