# SPDX-License-Identifier: Apache-2.0
"""The optimizer that trains the demo: Muon for the matrices, Adam for everything else.

Muon makes every update of a matrix nearly orthogonal; scaled to the usual size of an Adam update, both share one
learning rate, which the training loop multiplies in (it follows the clock).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from qwen_spmd.params import Leaf

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of an odd polynomial that drives singular values towards 1 in few iterations."""


def optimizer(declared: Any, *, kind: str = "muon", weight_decay: float = 0.03) -> optax.GradientTransformation:
    """`declared` is the tree of Leafs. Updates still have to be multiplied by minus the learning rate."""
    matrices = jax.tree.map(lambda leaf: _matrix(leaf) is not None, declared)
    labels = jax.tree.map(lambda is_matrix: "muon" if is_matrix and kind == "muon" else "adam", matrices)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.partition({"muon": _muon(declared), "adam": optax.scale_by_adam(b1=0.9, b2=0.98)}, labels),
        optax.add_decayed_weights(weight_decay, mask=matrices),
    )


def _matrix(leaf: Leaf) -> tuple[int, int, int] | None:
    """(stacked, in, out) of a leaf that is a stack of matrices large enough for Muon."""
    lead = len(leaf.dims) - len(leaf.dims.lstrip("LE"))
    kept = leaf.dims[lead:]
    if len(kept) < 2 or "V" in kept:
        return None
    inside = 1 if kept[0] == "D" else len(kept) - 1
    sizes = leaf.shape[:lead], leaf.shape[lead : lead + inside], leaf.shape[lead + inside :]
    stacked, rows, columns = (math.prod(s) for s in sizes)
    return (stacked, rows, columns) if min(rows, columns) >= 16 else None


def _muon(declared: Any, momentum: float = 0.95) -> optax.GradientTransformation:
    def init(params: Any) -> Any:
        return optax.tree.zeros_like(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        state = jax.tree.map(lambda m, g: momentum * m + g, state, updates)
        nesterov = jax.tree.map(lambda m, g: momentum * m + g, state, updates)

        def orthogonal(x: Any, leaf: Leaf) -> Any:
            shape = _matrix(leaf)
            if isinstance(x, optax.MaskedNode) or shape is None:
                return x
            return _orthogonal(x.reshape(shape)).reshape(x.shape) * (0.2 * max(shape[1:]) ** 0.5)

        is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
        return jax.tree.map(orthogonal, nesterov, declared, is_leaf=is_masked), state

    return optax.GradientTransformation(init, update)


def _orthogonal(x: jax.Array, iterations: int = 5) -> jax.Array:
    """[.., m, n] -> the same with all singular values near 1."""
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[-2] > x.shape[-1]
    x = jnp.swapaxes(x, -1, -2) if tall else x
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)
    for _ in range(iterations):
        square = x @ jnp.swapaxes(x, -1, -2)
        x = a * x + (b * square + c * square @ square) @ x
    return jnp.swapaxes(x, -1, -2) if tall else x
