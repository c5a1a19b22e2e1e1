# SPDX-License-Identifier: Apache-2.0
"""Weights in eight bits with float32 scales for blocks of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Scaled:
    """Matrices [.., I, O] as values float8_e4m3fn [.., I, O] times float32 scales [.., I / i, O / o], one a block.

    Blocks of 128 x 128 are how Qwen's FP8 checkpoints have them (o or i is the whole matrix: one scale a row, column).
    Their size follows from the shapes: a matrix that is no multiple of it has blocks as equal as their number allows.
    """

    values: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def block(self) -> tuple[int, int]:
        """(i, o), in elements; the last one may have fewer."""
        (I, O), (i, o) = self.values.shape[-2:], self.scales.shape[-2:]
        return -(-I // i), -(-O // o)

    def __getitem__(self, index: tuple) -> Scaled:
        """Of the leading axes."""
        return Scaled(self.values[index], self.scales[index])

    def astype(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The matrices."""
        scales = self.scales
        for axis, size in zip((-2, -1), self.block, strict=True):
            scales = jnp.repeat(scales, size, axis, total_repeat_length=None)
            scales = jax.lax.slice_in_dim(scales, 0, self.values.shape[axis], axis=axis)
        return (self.values.astype(jnp.float32) * scales).astype(dtype)
