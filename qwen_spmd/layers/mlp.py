# SPDX-License-Identifier: Apache-2.0
"""Dense SwiGLU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.linear import linear, linear_parts
from qwen_spmd.params import Mlp


def mlp(p: Mlp, l: jax.Array, x: jax.Array, impl: Impl = "reference") -> jax.Array:
    """[.., D] -> parts [S, .., D]: of the F columns that are here, so a partial sum where `tp` shares them."""
    gate, up = linear(x, (p.w_gate[l], p.w_up[l]), out_dtypes=(jnp.float32, jnp.float32), impl=impl)
    h = (jax.nn.silu(gate) * up).astype(x.dtype)
    return linear_parts(h, (p.w_down[l],), dtype=x.dtype, impl=impl)[0]
