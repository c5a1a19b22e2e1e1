# SPDX-License-Identifier: Apache-2.0
"""Weights in eight or four bits with scales for blocks of them."""

from __future__ import annotations

import itertools
from typing import Literal

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


Format = Literal["mxfp8", "mxfp4", "nvfp4"]

GROUP: dict[Format, int] = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
"""Neighbours along I that share a scale."""

OF_ROWS: dict[Format, Format] = {"mxfp8": "mxfp8", "mxfp4": "mxfp8", "nvfp4": "nvfp4"}
"""Format of the rows that weights multiply. Blackwell's matrix unit takes e4m3 times e2m1 with scales e8m0 for each 32,
but scales e4m3 for each 16 only where both sides are e2m1 (PTX, tcgen05.mma: kinds mxf8f6f4 and mxf4nvf4)."""


@struct.dataclass
class Microscaled:
    """Matrices [.., I, O] of numbers in eight or four bits, with a scale for each few neighbours along I, the axis that
    a product contracts.

    format  values                       scales                         scale
    mxfp8   float8_e4m3fn [.., O, I]     e8m0, uint8 [.., O, I / 32]    None
    mxfp4   e2m1, uint8 [.., O, I / 2]   e8m0, uint8 [.., O, I / 32]    None
    nvfp4   e2m1, uint8 [.., O, I / 2]   float8_e4m3fn [.., O, I / 16]  float32 [..], one a matrix

    mxfp8 and mxfp4 are MXFP8 (E4M3) and MXFP4 of the OCP Microscaling Formats (MX) Specification v1.0; nvfp4 is
    NVIDIA's (developer.nvidia.com/blog/introducing-nvfp4-for-efficient-and-accurate-low-precision-inference). Two e2m1
    stand in a byte, the first in the low bits. An e8m0 b is 2^(b - 127), or NaN for 255, and held as a byte, as
    Triton takes it: XLA might copy what it converts.

    Transposed, since the matrix unit takes four bits with the contracted axis contiguous only, and all scales so.
    """

    values: jax.Array
    scales: jax.Array
    scale: jax.Array | None
    format: Format = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        *leading, O, groups = self.scales.shape
        return *leading, groups * GROUP[self.format], O

    def __getitem__(self, index: tuple) -> Microscaled:
        """Of the leading axes."""
        scale = None if self.scale is None else self.scale[index]
        return Microscaled(self.values[index], self.scales[index], scale, self.format)

    def astype(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The matrices [.., I, O], computed in float32, where all of mxfp8 and mxfp4 but subnormals are exact."""
        values = self.values.astype(jnp.float32) if self.format == "mxfp8" else _from_e2m1(self.values)
        if self.scale is None:
            scales = jax.lax.bitcast_convert_type(self.scales, jnp.float8_e8m0fnu).astype(jnp.float32)
        else:
            scales = self.scales.astype(jnp.float32) * self.scale[..., None, None]
        w = values.reshape(*scales.shape, GROUP[self.format]) * scales[..., None]
        return w.reshape(values.shape).swapaxes(-1, -2).astype(dtype)

    def rows(self, x: jax.Array) -> Microscaled:
        """Rows [.., I] as these matrices multiply them: each is a matrix [I, 1] in `OF_ROWS`."""
        return Microscaled.quantise(x[..., None], OF_ROWS[self.format])

    @staticmethod
    def quantise(w: jax.Array, format: Format) -> Microscaled:
        """The nearest values under these scales, ties to even; beyond the largest, that one.

        mxfp8, mxfp4  the power of two that brings a group's largest magnitude to the exponent of the largest value (the
                      specification's rule, 6.3), from 2^-126 on: a smaller one is no normal float32
        nvfp4         a matrix's largest magnitude is 448 * 6, the largest scale times the largest value; then a group's
                      is 6, as nearly as e4m3 can

        A NaN or infinity makes all that shares its scale NaN: its group, or in nvfp4 its matrix.
        """
        I, group = w.shape[-2], GROUP[format]
        if I % group:
            raise ValueError(f"{format} has a scale for each {group} along the contracted axis, which has {I}")
        w = w.swapaxes(-1, -2).astype(jnp.float32)
        groups = w.reshape(*w.shape[:-1], I // group, group)
        largest = jnp.max(jnp.abs(groups), -1)
        if format == "nvfp4":
            scale = jnp.max(largest, (-1, -2)) * (1 / (448 * 6))
            scale = jnp.where(jnp.isfinite(scale), jnp.maximum(scale, 2.0**-117), jnp.nan)  # times any e4m3 is normal
            each = scale[..., None, None]
            scales = (largest / (6 * each)).astype(jnp.float8_e4m3fn)
            each = scales.astype(jnp.float32) * each
            groups = jnp.where(each[..., None] == 0, 0, groups / each[..., None])
        else:
            scale = None
            exponent = jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23  # biased, as e8m0 is
            byte = jnp.where(exponent == 255, 255, jnp.maximum(exponent - (8 if format == "mxfp8" else 2), 1))
            scales = byte.astype(jnp.uint8)
            groups *= jax.lax.bitcast_convert_type((254 - byte) << 23, jnp.float32)[..., None]
        values = groups.reshape(w.shape)
        values = jnp.clip(values, -448, 448).astype(jnp.float8_e4m3fn) if format == "mxfp8" else _to_e2m1(values)
        return Microscaled(values, scales, scale, format)


_E2M1 = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0
"""Codes' magnitudes; the fourth bit is the sign."""


def _from_e2m1(packed: jax.Array) -> jax.Array:
    codes = jnp.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    return jnp.array([*_E2M1, *(-x for x in _E2M1)], jnp.float32)[codes]


def _to_e2m1(x: jax.Array) -> jax.Array:
    """Two a byte. A code is how many midpoints lie below; one that is hit goes to the even code. NaN is 0."""
    size = jnp.abs(x)
    codes = jnp.signbit(x).astype(jnp.uint8) * 8
    for code, (low, high) in enumerate(itertools.pairwise(_E2M1)):
        middle = (low + high) / 2
        codes += size >= middle if code % 2 else size > middle
    return codes[..., ::2] | codes[..., 1::2] << 4
