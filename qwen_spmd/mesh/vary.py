# SPDX-License-Identifier: Apache-2.0
"""Types of values inside shard_map: over which mesh axes they differ. `check_vma` holds every layer to it."""

from __future__ import annotations

import jax


def vary_like[Tree](tree: Tree, *like: jax.Array) -> Tree:
    """`tree` typed as varying over every axis that any of `like` varies over. Moves no data.

    A loop's carry must begin with the type that its body returns; constants begin as the same everywhere.
    """
    axes = frozenset().union(*(jax.typeof(x).mat.varying for x in like))

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(axes - jax.typeof(x).mat.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)
