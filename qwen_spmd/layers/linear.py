# SPDX-License-Identifier: Apache-2.0
"""einsum of activations with weights: the one place that knows how a weight is stored and how products accumulate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def einsum(spec: str, x: jax.Array, w: jax.Array, *, out_dtype: Any = None) -> jax.Array:
    """Activations by weights in x's dtype, accumulated in float32. float32 inputs multiply in full float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(spec, x, w.astype(x.dtype), precision=precision, preferred_element_type=out_dtype or x.dtype)
