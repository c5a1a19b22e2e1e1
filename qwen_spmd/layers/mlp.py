# SPDX-License-Identifier: Apache-2.0
"""Dense SwiGLU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwen_spmd.layers.linear import einsum
from qwen_spmd.params import Mlp


def mlp(p: Mlp, l: jax.Array, x: jax.Array) -> jax.Array:
    """[.., D] -> [.., D]: of the F columns that are here, so a partial sum where `tp` shares them."""
    gate = einsum("...d,df->...f", x, p.w_gate[l], out_dtype=jnp.float32)
    up = einsum("...d,df->...f", x, p.w_up[l], out_dtype=jnp.float32)
    return einsum("...f,fd->...d", (jax.nn.silu(gate) * up).astype(x.dtype), p.w_down[l])
