# SPDX-License-Identifier: Apache-2.0
"""The mesh: always three axes, an unused one has size 1.

dp  independent groups of tokens
ep  experts; outside the experts, tokens too
tp  heads, FFN width, vocabulary; experts too
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

AXES = ("dp", "ep", "tp")

RANKS = ("dp", "ep")
"""The axes whose places each own requests, pages and slots: a rank is an index over them."""

EXPERTS = ("ep", "tp")
"""The axes that experts are spread over."""


def make_mesh(dp: int = 1, ep: int = 1, tp: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of `dp * ep * tp` devices, by default the first ones of this process's platform, in JAX's order."""
    devices = jax.devices() if devices is None else devices
    if len(devices) < dp * ep * tp:
        raise ValueError(f"mesh: dp={dp} ep={ep} tp={tp} needs {dp * ep * tp} devices, there are {len(devices)}")
    grid = np.asarray(devices[: dp * ep * tp]).reshape(dp, ep, tp)
    return Mesh(grid, AXES, axis_types=(AxisType.Explicit,) * 3)


def automatic[Tree](tree: Tree) -> Tree:
    """The same arrays in the same memory, typed so that any jnp function takes them and JAX shards its results.

    On the mesh of `make_mesh` it would ask for a sharding wherever several are possible.
    """

    def view(x: jax.Array) -> jax.Array:
        assert isinstance(x.sharding, NamedSharding) and isinstance(x.sharding.mesh, Mesh)
        sharding = NamedSharding(Mesh(x.sharding.mesh.devices, AXES), x.sharding.spec)  # type: ignore[arg-type]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, [s.data for s in x.addressable_shards])

    return jax.tree.map(view, tree)
