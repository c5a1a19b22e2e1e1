# SPDX-License-Identifier: Apache-2.0
"""Sizes, scratch memory and small functions of the TPU's kernel of Gated DeltaNet.

All that is of one token lies in rows of Y lanes, one for each head's query, key or value (several if values are longer
than keys), N in all: a token's convolution then works on full registers, and the rows of one head over many tokens
are a strided load.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


@dataclasses.dataclass(frozen=True)
class Sizes:
    """c rows in a block, B sequences, and the contract's C, W, J, U, Y and Z."""

    c: int
    C: int
    W: int
    J: int
    U: int
    Y: int
    Z: int
    B: int
    chunks: bool

    @property
    def N(self) -> int:
        return self.C // self.Y

    @property
    def pitch(self) -> int:
        """Rows from one token to the next. Odd: eight of an even distance are not one load, but eight."""
        return self.N | 1

    @property
    def P(self) -> int:
        """Rows of a value."""
        return self.Z // self.Y

    @property
    def V(self) -> int:
        """Value heads of a key head."""
        return self.U // self.J

    def tiles(self) -> list[tuple[int, int, int, int]]:
        """(key head, value head, part, row of [U P]) of each square part of the states."""
        return [(u // self.V, u, p, u * self.P + p) for u in range(self.U) for p in range(self.P)]


PITCH = 9
"""Rows from one tile of eight to the next, for the same reason as Sizes.pitch."""
DECAY, BETA, V, KQ, KS, QS, D, O = range(8)


@dataclasses.dataclass(frozen=True)
class Scratch:
    """float32 in VMEM.

    xs        [(W-1 + c) pitch, Y] the block's inputs, after room for those before a sequence's first
    taps      [W pitch, Y] conv_w
    gates     [2, c, U] log decay and write strength

    of one token:
    window    [W pitch, Y] its inputs and those before it
    u         [N, Y] silu of its convolution
    of_value  [8, U P, Y] decay, write strength, value, k . q, S^T k, S^T q, d and o
    rows      [9 J, Y] three parts of k, and of q
    products  [9 U P, Y] of rows and states
    """

    xs: Any
    taps: Any
    gates: Any
    window: Any
    u: Any
    of_value: Any
    rows: Any
    products: Any

    @staticmethod
    def shapes(n: Sizes) -> list[Any]:
        rows = ((n.W - 1 + n.c) * n.pitch, n.Y), (n.W * n.pitch, n.Y)
        token = (n.W * n.pitch, n.Y), (n.N, n.Y), (8, n.U * n.P, n.Y), (PITCH * n.J, n.Y), (PITCH * n.U * n.P, n.Y)
        return [pltpu.VMEM(shape, jnp.float32) for shape in (*rows, (2, n.c, n.U), *token)]


def convolve(inputs: list[jax.Array], taps: list[jax.Array]) -> jax.Array:
    """silu of the convolution, of W shifted inputs."""
    u = inputs[0] * taps[0]
    for x, w in zip(inputs[1:], taps[1:]):
        u += x * w
    return u * sigmoid(u)


def sigmoid(x: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp(-x))


def normalise(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


def split(x: jax.Array) -> list[jax.Array]:
    """Three float32 that bfloat16 holds, and whose sum is x.

    Bits are cut, not rounded by conversions: compilers take the latter for excess precision and drop them.
    """
    parts = []
    for _ in range(3):
        bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
        parts.append(lax.bitcast_convert_type(bits, jnp.float32))
        x = x - parts[-1]
    return parts


def take_tail(n: Sizes, tail: Any, rows: Any, first: Any) -> None:
    """A sequence's last inputs, `tail` [W-1, C], as rows [.., Y] of the W-1 tokens from row `first` on."""
    for row in range(n.N):
        part = tail[:, row * n.Y : (row + 1) * n.Y].astype(jnp.float32)
        rows[pl.ds(first + row, n.W - 1, stride=n.pitch)] = part


def put_tail(n: Sizes, rows: Any, first: Any, tail: Any) -> None:
    for row in range(n.N):
        part = rows[pl.ds(first + row, n.W - 1, stride=n.pitch)].astype(tail.dtype)
        tail[:, row * n.Y : (row + 1) * n.Y] = part
