# SPDX-License-Identifier: Apache-2.0
"""The hierarchical reduce-scatter gives what the compiler's own does, for any cube; the order of its links."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from qwen_spmd.mesh.axes import make_mesh
from qwen_spmd.mesh.collectives import reduce_scatter
from qwen_spmd.mesh.topology import Hypercube

SHUFFLED = Hypercube((5, 0, 3, 6, 1, 4, 7, 2), ("core", "x", "y"))


def scattered(mesh, x, **choices):
    """x [devices of ep, n * T, D]: each device's summands. Returns the sums in order, and the compiled program."""
    body = lambda x: reduce_scatter(x[0], "ep", **choices)  # noqa: E731
    x = jax.device_put(x, NamedSharding(mesh, P("ep")))
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))).lower(x).compile()
    return program(x), program


def summands(n, T=3, D=10, dtype=jnp.float32):
    """Small integers: sums are exact in any order."""
    return jnp.asarray(np.random.default_rng(n).integers(-8, 9, (n, n * T, D)), dtype)


@pytest.mark.parametrize("cube", [None, SHUFFLED], ids=["axis order", "shuffled"])
@pytest.mark.parametrize("micro_batches", [1, 3, 10])
def test_hierarchical_is_a_reduce_scatter(cube, micro_batches):
    mesh, x = make_mesh(ep=8), summands(8)
    got, _ = scattered(mesh, x, how="hierarchical", cube=cube, micro_batches=micro_batches)
    np.testing.assert_array_equal(got, scattered(mesh, x)[0])
    np.testing.assert_array_equal(got, x.sum(0))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 1), (1, 4, 2), (2, 2, 2)], ids=str)
def test_any_power_of_two(sizes):
    """On the other axes, too, where each group has sums of its own."""
    x = summands(sizes[1], dtype=jnp.bfloat16)
    got, _ = scattered(make_mesh(*sizes), x, how="hierarchical", micro_batches=2)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, x.sum(0))


def test_order_of_the_links():
    """Half of the rows over the first link, a quarter over the next; micro-batches leave the chip by different ones."""
    _, program = scattered(make_mesh(ep=8), summands(8, T=1), how="hierarchical", cube=SHUFFLED, micro_batches=2)
    permute = r"= f32\[([\d,]+)\].* collective-permute\(.*source_target_pairs=\{\{(.*?)\}\}"
    seen = []
    for shape, pairs in re.findall(permute, program.as_text()):
        devices = [map(int, pair.split(",")) for pair in pairs.split("},{")]
        bits = {SHUFFLED.corners[a] ^ SHUFFLED.corners[b] for a, b in devices}
        assert len(bits) == 1
        seen.append((int(np.prod([int(n) for n in shape.split(",")])) // 5, bits.pop()))
    core, x, y = 1, 2, 4
    assert sorted(seen) == sorted([(4, core), (2, x), (1, y), (4, core), (2, y), (1, x)])


def test_cube_of_another_size():
    with pytest.raises(ValueError, match="cube has 8 corners, axis ep has 4 devices"):
        scattered(make_mesh(ep=4), summands(4), how="hierarchical", cube=SHUFFLED)
