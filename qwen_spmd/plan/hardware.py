# SPDX-License-Identifier: Apache-2.0
"""Hardware by name: what a chip can do at its peak, and how so many of them hang together.

    tpu7x:2x2x1   a torus of 4 Ironwood chips of 2 cores; each core is a JAX device with half of the chip
    gb200:16      so many GPUs of one NVLink domain

Not here: efficiency. These are data sheet peaks; what a kernel reaches of them is an assumption of the roofline.
"""

from __future__ import annotations

import dataclasses
import math

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peaks of one chip. Bandwidths in bytes/s, arithmetic in FLOP/s without sparsity.

    cores        JAX devices of a chip; each has an equal part of everything
    link         to another chip, one direction. TPU: of one of the six links; GPU: to the switch
    core_link    between the cores of a chip, one direction; 0: there is one core
    largest      chips that one fast network joins
    """

    name: str
    platform: str
    cores: int
    bf16: float
    fp8: float
    hbm_bytes: int
    hbm: float
    link: float
    core_link: float
    largest: int
    source: str


CHIPS = {
    chip.name: chip
    for chip in (
        # 1200 GB/s of interconnect a chip, both directions of six links; the cores' own link is six times one of those.
        Chip(
            "tpu7x",
            platform="tpu",
            cores=2,
            bf16=2307e12,
            fp8=4614e12,
            hbm_bytes=192 * GIB,
            hbm=7.38e12,
            link=100e9,
            core_link=600e9,
            largest=9216,
            source="docs.cloud.google.com/tpu/docs/tpu7x",
        ),
        Chip(
            "h200",
            platform="cuda",
            cores=1,
            bf16=989e12,
            fp8=1979e12,
            hbm_bytes=141 * 10**9,
            hbm=4.8e12,
            link=450e9,
            core_link=0,
            largest=8,
            source="NVIDIA H200 data sheet (SXM); the figures with sparsity halved",
        ),
        Chip(
            "b200",
            platform="cuda",
            cores=1,
            bf16=2250e12,
            fp8=4500e12,
            hbm_bytes=180 * 10**9,
            hbm=8e12,
            link=900e9,
            core_link=0,
            largest=8,
            source="NVIDIA DGX B200 data sheet: 1.44 TB and 64 TB/s for eight; the figures with sparsity halved",
        ),
        Chip(
            "gb200",
            platform="cuda",
            cores=1,
            bf16=2500e12,
            fp8=5000e12,
            hbm_bytes=186 * 10**9,
            hbm=8e12,
            link=900e9,
            core_link=0,
            largest=72,
            source="NVIDIA GB200 NVL72 data sheet: 13.4 TB and 576 TB/s for 72; the figures with sparsity halved",
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """So many chips in one fast network. Make it with `topology`.

    links   of a chip that lead to another one: on a torus two along each axis that closes to a ring (a multiple of 4
            chips), one along any other axis of several chips
    """

    name: str
    chip: Chip
    chips: int
    links: int

    @property
    def devices(self) -> int:
        return self.chips * self.chip.cores

    def rate(self, peak: float) -> float:
        """A device's part of a chip's peak."""
        return peak / self.chip.cores

    @property
    def network(self) -> float:
        """Bytes/s that a device can get from other chips while every other one does the same."""
        return self.rate(self.chip.link * self.links)

    def shared(self, group: int, stride: int) -> int:
        """Devices of a mesh axis that sit on one chip: an axis of `group` devices that are `stride` apart."""
        return max(1, min(group, self.chip.cores // stride))


def topology(name: str) -> Topology:
    """The Topology of a name such as "tpu7x:2x2x1" or "h200:8". ValueError names what is wrong with it."""
    kind, _, size = name.partition(":")
    if kind not in CHIPS:
        raise ValueError(f"topology is {name!r}, it must be one of {', '.join(CHIPS)}, ':' and a size")
    chip = CHIPS[kind]
    example = "2x2x1" if chip.platform == "tpu" else "8"
    axes = size.split("x")
    if not all(n.isdecimal() and int(n) for n in axes) or len(axes) != (3 if chip.platform == "tpu" else 1):
        raise ValueError(f"topology is {name!r}, the size of {kind} must be like {kind}:{example}")
    sizes = [int(n) for n in axes]
    chips = math.prod(sizes)
    if chips > chip.largest:
        raise ValueError(f"topology is {name!r}, one network of {kind} has at most {chip.largest} chips")
    links = sum(0 if n == 1 else 2 if n % 4 == 0 else 1 for n in sizes) if chip.platform == "tpu" else int(chips > 1)
    return Topology(name, chip, chips, links)


def larger(than: Topology) -> list[str]:
    """Names of usual topologies of the same chip with more devices, smallest first."""
    chip = than.chip
    if chip.platform == "tpu":
        names = [f"{chip.name}:{n}" for n in ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")]
    else:
        names = [f"{chip.name}:{n}" for n in (1, 2, 4, 8, 16, 32, 64, 72) if n <= chip.largest]
    return [name for name in names if topology(name).chips > than.chips]
