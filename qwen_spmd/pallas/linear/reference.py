# SPDX-License-Identifier: Apache-2.0
"""Products in plain jnp: XLA's own."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def linear(x: jax.Array, ws: Sequence[jax.Array], out_dtypes: Sequence[DTypeLike]) -> tuple[jax.Array, ...]:
    return tuple(_product(x, w, 1, dtype) for w, dtype in zip(ws, out_dtypes, strict=True))


def linear_parts(x: jax.Array, ws: Sequence[jax.Array], dtype: DTypeLike) -> tuple[jax.Array, ...]:
    return tuple(_product(x, w, w.ndim - 1, dtype)[None] for w in ws)


def _product(x: jax.Array, w: jax.Array, axes: int, dtype: DTypeLike) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.tensordot(x, w.astype(x.dtype), axes, precision=precision, preferred_element_type=jnp.dtype(dtype))
