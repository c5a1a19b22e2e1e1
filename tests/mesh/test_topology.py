# SPDX-License-Identifier: Apache-2.0
"""Hypercubes from the coordinates of TPUs, and what is none."""

import itertools
import re
from typing import NamedTuple

import numpy as np
import pytest
from jax.sharding import Mesh

from qwen_spmd.mesh.axes import make_mesh
from qwen_spmd.mesh.topology import Hypercube, axis_order, hypercube


class Grid(NamedTuple):
    """What `hypercube` reads of a mesh; a real one takes real devices only."""

    devices: np.ndarray
    axis_names: tuple[str, ...] = ("dp", "ep", "tp")

    @property
    def shape(self):
        return dict(zip(self.axis_names, self.devices.shape, strict=True))


class Tpu(NamedTuple):
    coords: list[int]
    core_on_chip: int
    platform: str = "tpu"


def tpus(x, y, z, cores=2):
    """In JAX's order: the cores of a chip, then x, y, z."""
    return [Tpu([i, j, k], c) for k, j, i, c in itertools.product(*map(range, (z, y, x, cores)))]


def grid(devices, *sizes) -> Mesh:
    array = np.empty(len(devices), object)
    array[:] = devices
    return Grid(array.reshape(sizes))  # type: ignore[return-value]


def apart(cube, devices):
    """For each link, the largest distance between neighbours along each of (core, x, y, z)."""
    at = np.array([(d.core_on_chip, *d.coords) for d in devices])[list(cube.indices)]
    return [np.abs(at - at[np.arange(len(at)) ^ 1 << bit]).max(0).tolist() for bit in range(len(cube.links))]


def test_one_host_of_ironwood():
    cube = hypercube(grid(tpus(2, 2, 1), 1, 8, 1), "ep")
    assert cube == Hypercube(tuple(range(8)), ("core", "x", "y"))
    assert apart(cube, tpus(2, 2, 1)) == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]


def test_any_order_of_devices():
    devices = [tpus(2, 2, 2)[i] for i in np.random.default_rng(0).permutation(16)]
    cube = hypercube(grid(devices, 1, 16, 1), "ep")
    assert cube.links == ("core", "x", "y", "z") and cube.corners != tuple(range(16))
    assert apart(cube, devices) == np.eye(4, dtype=int).tolist()
    assert [cube.corners[i] for i in cube.indices] == list(range(16))


def test_a_ring_of_four_chips():
    """Every neighbour is the next on the ring, which is three away where it closes."""
    devices = tpus(1, 1, 4)
    cube = hypercube(grid(devices, 1, 8, 1), "ep")
    assert cube.links == ("core", "z", "z")
    z = np.array([d.coords[2] for d in devices])[list(cube.indices)]
    for bit in (1, 2):
        assert set((z - z[np.arange(8) ^ 1 << bit]) % 4) == {1, 3}


def test_cores_on_another_axis():
    """tp over the two cores of a chip, ep over the chips of each dp: the same cube on every line."""
    cube = hypercube(grid(tpus(2, 2, 2), 2, 4, 2), "ep")
    assert cube == Hypercube((0, 1, 2, 3), ("x", "y"))
    assert hypercube(grid(tpus(2, 2, 2), 2, 4, 2), "tp") == Hypercube((0, 1), ("core",))
    assert hypercube(grid(tpus(2, 2, 2), 2, 4, 2), "dp") == Hypercube((0, 1), ("z",))


def test_without_coordinates_in_the_order_of_the_axis():
    assert hypercube(make_mesh(ep=4, tp=2), "ep") == axis_order(4)
    assert axis_order(4).corners == (0, 1, 2, 3) and axis_order(4).links == ("bit 0 of the axis", "bit 1 of the axis")
    assert axis_order(1) == Hypercube((0,), ())
    assert hash(axis_order(8)) == hash(axis_order(8))
    with pytest.raises(ValueError, match="axis has 6 devices, a hypercube needs a power of two"):
        axis_order(6)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (tpus(3, 1, 1), "x must have 1, 2 or 4 values in a row"),
        (tpus(3, 1, 1)[:2] + tpus(3, 1, 1)[4:], "x must have 1, 2 or 4 values in a row"),  # chips 0 and 2
        (tpus(8, 1, 1, cores=1), "x must have 1, 2 or 4 values in a row"),
        (tpus(2, 2, 1)[:6], "which needs each of its 8 corners once"),
        (tpus(2, 2, 1)[:7] + tpus(2, 2, 1)[:1], "which needs each of its 8 corners once"),
    ],
)
def test_no_hypercube(devices, message):
    named = re.escape(str([(d.core_on_chip, *d.coords) for d in devices]))
    with pytest.raises(
        ValueError, match=rf"axis ep: devices at \(core, x, y, z\) {named} form no hypercube, {message}"
    ):
        hypercube(grid(devices, 1, len(devices), 1), "ep")


def test_lines_in_different_orders():
    devices = tpus(2, 2, 1)
    swapped = [*devices[:4], devices[5], devices[4], *devices[6:]]
    with pytest.raises(ValueError, match=r"axis ep: devices \[\(0, 0, 0, 0\), .*\] are in different orders"):
        hypercube(grid(swapped, 2, 4, 1), "ep")
