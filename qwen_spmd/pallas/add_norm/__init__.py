# SPDX-License-Identifier: Apache-2.0
"""Adding to the residual stream and normalising it for the next part of a layer, in one pass."""

from __future__ import annotations

import jax

from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.add_norm import reference
from qwen_spmd.pallas.add_norm.reference import Gathered, Term

__all__ = ["Gathered", "Term", "add_norm"]


def add_norm(
    x_TD: jax.Array, terms: tuple[Term, ...], w_D: jax.Array, *, eps: float, zero_centred: bool, impl: Impl
) -> tuple[jax.Array, jax.Array]:
    """(x + terms, its RMS norm), both [T, D] in x's dtype. A term is [S, T, D], a sum over S, or Gathered.

    The sum is taken in float32, rounded once, and what was rounded is normalised (`layers/norm.py:rms_norm`).
    """
    match impl:
        case "reference" | "tpu":
            return reference.add_norm(x_TD, terms, w_D, eps, zero_centred)
        case "gpu":
            from qwen_spmd.pallas.add_norm import gpu

            return gpu.add_norm(x_TD, terms, w_D, eps, zero_centred)
