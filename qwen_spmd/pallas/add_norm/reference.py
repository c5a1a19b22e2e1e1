# SPDX-License-Identifier: Apache-2.0
"""Adding and normalising in plain jnp."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from qwen_spmd.pallas.expert_sum.reference import expert_sum


@struct.dataclass
class Gathered:
    """The arguments of `expert_sum`, in place of its result."""

    y_RD: jax.Array
    pos_TX: jax.Array
    gates_TX: jax.Array


Term = jax.Array | Gathered


def add(x_TD: jax.Array, terms: tuple[Term, ...]) -> jax.Array:
    """x plus the terms, in x's dtype."""
    total = x_TD.astype(jnp.float32)
    for term in terms:
        if isinstance(term, Gathered):
            total += expert_sum(term.y_RD, term.pos_TX, term.gates_TX)
        else:
            total += total_of(term)
    return total.astype(x_TD.dtype)


def total_of(parts: jax.Array) -> jax.Array:
    """float32 sum over the first axis, in order. By slices: XLA computes them within what uses the sum."""
    total = parts[0].astype(jnp.float32)
    for s in range(1, parts.shape[0]):
        total += parts[s].astype(jnp.float32)
    return total


def rms_norm(x: jax.Array, w: jax.Array, *, eps: float, zero_centred: bool) -> jax.Array:
    """Qwen3: cast(n) * w. Qwen3.5 (zero-centred): cast(n * (1 + w)), the sum in float32 so that small w survive."""
    n = normalise(x, eps)
    if zero_centred:
        return (n * (1.0 + w.astype(jnp.float32))).astype(x.dtype)
    return n.astype(x.dtype) * w.astype(x.dtype)


def normalise(x: jax.Array, eps: float) -> jax.Array:
    """float32, over the last axis."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)


def add_norm(
    x_TD: jax.Array, terms: tuple[Term, ...], w_D: jax.Array, eps: float, zero_centred: bool
) -> tuple[jax.Array, jax.Array]:
    x_TD = add(x_TD, terms) if terms else x_TD
    return x_TD, rms_norm(x_TD, w_D, eps=eps, zero_centred=zero_centred)
