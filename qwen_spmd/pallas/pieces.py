# SPDX-License-Identifier: Apache-2.0
"""Work lists: ragged groups of rows cut into pieces of at most `size` rows, on the device.

The groups are the sequences of a batch or the rows of each expert. A loop over `count` pieces costs what the rows
cost, whatever the padding of the arrays.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Pieces:
    """`count` pieces; piece i is rows start to start + length of `group`, its `part`-th piece."""

    count: jax.Array
    ends_G: jax.Array
    starts_G: jax.Array
    lengths_G: jax.Array
    size: int = struct.field(pytree_node=False)

    def __getitem__(self, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """(group, part, start, length) of piece i."""
        group = jnp.sum(self.ends_G <= i, dtype=jnp.int32)  # a binary search would be a loop within the caller's loop
        before = jnp.where(group > 0, self.ends_G[group - 1], 0)
        part = i - before
        start = self.starts_G[group] + part * self.size
        return group, part, start, jnp.minimum(self.lengths_G[group] - part * self.size, self.size)


def cut(starts_G: jax.Array, lengths_G: jax.Array, size: int) -> Pieces:
    """Cut G groups of `lengths_G` rows that begin at `starts_G` into pieces; groups of length 0 have none."""
    ends_G = jnp.cumsum((lengths_G + size - 1) // size).astype(jnp.int32)
    return Pieces(ends_G[-1], ends_G, starts_G.astype(jnp.int32), lengths_G.astype(jnp.int32), size)
