# SPDX-License-Identifier: Apache-2.0
"""Token embedding and its reverse. The forms for a step have a rank's share of the vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwen_spmd.layers.linear import einsum
from qwen_spmd.params import Params


def embed(params: Params, tokens: jax.Array) -> jax.Array:
    """[..] ids -> [.., D]. Ids outside the vocabulary (padding) are clipped."""
    return _rows(params.embed, tokens)


def embed_shared(params: Params, tokens: jax.Array) -> jax.Array:
    """`embed` where `tp` shares the rows of the vocabulary."""
    V = params.embed.shape[0]
    local = jnp.clip(tokens, 0, V * jax.lax.axis_size("tp") - 1) - V * jax.lax.axis_index("tp")
    here = (local >= 0) & (local < V)
    return jax.lax.psum(jnp.where(here[..., None], embed(params, local), 0), "tp")


def unembed(params: Params, hidden: jax.Array) -> jax.Array:
    """[.., D] after the last norm -> float32 logits [.., V]."""
    head_VD = params.embed if params.lm_head is None else params.lm_head
    return einsum("...d,vd->...v", hidden, head_VD, out_dtype=jnp.float32)


def unembed_shared(params: Params, hidden: jax.Array) -> jax.Array:
    """`unembed` where `tp` shares the rows of the vocabulary; every rank gets all logits."""
    logits = unembed(params, hidden)
    return jax.lax.all_gather(logits, "tp", axis=logits.ndim - 1, tiled=True, to="invarying")


@jax.custom_vjp
def _rows(embed_VD: jax.Array, tokens: jax.Array) -> jax.Array:
    return embed_VD.at[tokens].get(mode="clip")


def _rows_forward(embed_VD: jax.Array, tokens: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _rows(embed_VD, tokens), (embed_VD, tokens)


def _rows_backward(saved: tuple[jax.Array, jax.Array], d: jax.Array) -> tuple[jax.Array, None]:
    """As a matmul: a gather's own gradient adds row after row, and padding and frequent tokens share their rows."""
    embed_VD, tokens = saved
    V, D = embed_VD.shape
    one_hot = jax.nn.one_hot(jnp.clip(tokens.reshape(-1), 0, V - 1), V, dtype=d.dtype)
    return einsum("vt,td->vd", one_hot.T, d.reshape(-1, D)).astype(embed_VD.dtype), None


_rows.defvjp(_rows_forward, _rows_backward)
