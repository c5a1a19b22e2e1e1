# SPDX-License-Identifier: Apache-2.0
"""Where the devices along a mesh axis sit, for collectives that go over links one after the other.

The only place that reads device coordinates. Results are static and hashable, so that a compiled program can depend on
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True)
class Hypercube:
    """Device i of an axis is at corner `corners[i]`; those whose corners differ in bit b are neighbours over links[b].

    Bit 0 is the fastest link: on TPUs that have it, the one between the two cores of a chip.
    """

    corners: tuple[int, ...]
    links: tuple[str, ...]

    @property
    def indices(self) -> tuple[int, ...]:
        """Device at each corner: the inverse of `corners`."""
        return tuple(sorted(range(len(self.corners)), key=self.corners.__getitem__))


def axis_order(size: int) -> Hypercube:
    """Device i at corner i, for devices without coordinates: neighbours on the axis count as the nearest.

    ValueError if `size` is no power of two.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"axis has {size} devices, a hypercube needs a power of two")
    return Hypercube(tuple(range(size)), tuple(f"bit {b} of the axis" for b in range(size.bit_length() - 1)))


def hypercube(mesh: Mesh, axis: str) -> Hypercube:
    """The hypercube along an axis of the mesh, which must be the same wherever on the other axes.

    From the coordinates of TPUs: core, x, y, z, each with 1, 2 or 4 values in a row. Four in a row are taken for a ring
    of two bits; coordinates do not show whether it is closed, and where it is not, its ends exchange over three hops.
    CPUs and GPUs have no coordinates: `axis_order`. ValueError names the coordinates that form no hypercube.
    """
    lines = mesh.devices.swapaxes(mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])
    if lines[0, 0].platform != "tpu":
        return axis_order(mesh.shape[axis])
    cubes = [_of_coordinates([(d.core_on_chip, *d.coords) for d in line], axis) for line in lines]
    for line, cube in zip(lines, cubes, strict=True):
        if cube != cubes[0]:
            raise ValueError(f"axis {axis}: devices {_named(lines[0])} and {_named(line)} are in different orders")
    return cubes[0]


def _of_coordinates(at: Sequence[tuple[int, ...]], axis: str) -> Hypercube:
    """`at`: (core, x, y, z) of each device."""
    corners, links, bits = [0] * len(at), [], 0
    for name, values in zip(("core", "x", "y", "z"), zip(*at), strict=False):
        low, size = min(values), len(set(values))
        if size not in (1, 2, 4) or max(values) - low != size - 1:
            raise ValueError(
                f"axis {axis}: devices at (core, x, y, z) {list(at)} form no hypercube, {name} must have 1, 2 or 4"
                " values in a row"
            )
        for i, value in enumerate(values):  # Gray code: the four of a ring in a row differ in one bit from the next
            corners[i] |= ((value - low) ^ (value - low) >> 1) << bits
        links += [name] * (size.bit_length() - 1)
        bits = len(links)
    if sorted(corners) != list(range(1 << bits)):
        raise ValueError(
            f"axis {axis}: devices at (core, x, y, z) {list(at)} form no hypercube, which needs each of its"
            f" {1 << bits} corners once"
        )
    return Hypercube(tuple(corners), tuple(links))


def _named(devices: Iterable[Any]) -> list[tuple[int, ...]]:
    return [(d.core_on_chip, *d.coords) for d in devices]
