# SPDX-License-Identifier: Apache-2.0
"""Token embedding and its reverse."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwen_spmd.layers.linear import einsum
from qwen_spmd.params import Params


def embed(params: Params, tokens: jax.Array) -> jax.Array:
    """[..] ids -> [.., D]. Ids outside the vocabulary (padding) are clipped."""
    return params.embed.at[tokens].get(mode="clip")


def unembed(params: Params, hidden: jax.Array) -> jax.Array:
    """[.., D] after the last norm -> float32 logits [.., V]."""
    head_VD = params.embed if params.lm_head is None else params.lm_head
    return einsum("...d,vd->...v", hidden, head_VD, out_dtype=jnp.float32)
