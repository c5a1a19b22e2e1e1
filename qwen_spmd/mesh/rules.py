# SPDX-License-Identifier: Apache-2.0
"""Layouts: which mesh axis shards which letter, and what must divide. A spec is a declaration's letters looked up here.

There is one table for every layout; the sizes of the mesh's axes make the difference:

    single   dp=1  ep=1  tp=1
    dp_ep    ep=n         attention data-parallel, experts sharded: each rank has its own requests, pages and slots
    tp_ep    tp=n         heads, widths, vocabulary and experts sharded over the same devices, tokens on all of them
    mixed    any other    such as ep=4 tp=2: four ranks of two devices each, experts over all eight
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from jax.sharding import PartitionSpec as P

from qwen_spmd.mesh.axes import EXPERTS, RANKS

Axes = str | tuple[str, ...] | None

NAMES = ("single", "dp_ep", "tp_ep")

AXES_OF: Mapping[str, Axes] = {
    **dict.fromkeys("NKJUCFV", "tp"),  # heads of each kind and their channels, FFN width, vocabulary
    "Q": EXPERTS,  # places for experts
    **dict.fromkeys("PR", RANKS),  # KV pages, recurrent slots
    "I": "dp",  # independent groups of tokens
}
"""Letters that are not here are never sharded."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of the mesh's axes for one model, checked. Make it with `layout`.

    whole     letters of parameters that every rank of `tp` holds all of: K where there are fewer KV heads than ranks
    kv_heads  of the KV pages, all ranks together: each rank of `tp` has at least one, the same as its neighbour's
              where there are fewer than ranks; None: as many as the model's
    places    for experts (letter Q), null ones included; None: one for each
    copies    most places that one expert may have (letter A); 0: expert e is in place e, and there is no table
    """

    dp: int = 1
    ep: int = 1
    tp: int = 1
    whole: str = ""
    kv_heads: int | None = None
    places: int | None = None
    copies: int = 0

    @property
    def ranks(self) -> int:
        """Places that own requests, pages and slots."""
        return self.dp * self.ep

    @property
    def devices(self) -> int:
        return self.dp * self.ep * self.tp

    @property
    def name(self) -> str:
        sizes = {"dp": self.dp, "ep": self.ep, "tp": self.tp}
        return " ".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1) or "single"

    def spec(self, dims: str) -> P:
        """The PartitionSpec of a parameter with these dims."""
        return P(*(None if letter in self.whole else AXES_OF.get(letter) for letter in dims))

    def state_spec(self, dims: str) -> P:
        """The PartitionSpec of an array of the model's state."""
        return P(*map(AXES_OF.get, dims))


SINGLE = Layout()


def layout(dims: Mapping[str, int], *, dp: int = 1, ep: int = 1, tp: int = 1, redundant_experts: int = 0) -> Layout:
    """The layout of a model with these dims (`ModelConfig.dims`) on a mesh of these sizes.

    `redundant_experts` are places for copies of experts beyond one each. Places are padded to a multiple of
    `ep * tp` with null experts, which no token reaches. ValueError names what does not divide, and the valid sizes.
    """
    for name, n in (("dp", dp), ("ep", ep), ("tp", tp)):
        if n < 1:
            raise ValueError(f"{name} is {n}, it must be at least 1")
    if not _divides(dims, tp):
        fits = lambda n: _divides(dims, n) and ep * n <= dims.get("E", ep * n)  # noqa: E731
        valid = [n for n in range(1, dims["N"] + 1) if fits(n)]
        kinds = {
            "N": "attention heads",
            "J": "Gated DeltaNet key heads",
            "F": "FFN width",
            "V": "vocabulary",
        }
        named = ", ".join(f"{kind} ({dims[letter]})" for letter, kind in kinds.items() if letter in dims)
        raise ValueError(
            f"tp is {tp}, it must divide the {named}, and divide the KV heads ({dims['K']}) or be a multiple of them; "
            f"valid sizes are {', '.join(map(str, valid)) or 'none'}"
        )
    heads = {"whole": "K" if dims["K"] % tp else "", "kv_heads": max(dims["K"], tp)}
    if "E" not in dims:
        if ep > 1:
            raise ValueError(f"ep is {ep}, this model has no experts; use dp={dp * ep} for independent ranks")
        if redundant_experts:
            raise ValueError(f"redundant_experts is {redundant_experts}, this model has no experts")
        return Layout(dp, ep, tp, **heads)
    if ep * tp > dims["E"]:
        raise ValueError(f"ep * tp is {ep * tp}, it must be at most the {dims['E']} experts of the model")
    most = dims["E"] * (ep * tp - 1)  # one copy on every device
    if not 0 <= redundant_experts <= most:
        raise ValueError(f"redundant_experts is {redundant_experts}, it must be from 0 to {most}")
    places = ep * tp * math.ceil((dims["E"] + redundant_experts) / (ep * tp))
    copies = min(redundant_experts + 1, ep * tp) if ep * tp > 1 else 0
    return Layout(dp, ep, tp, **heads, places=places, copies=copies)


def _divides(dims: Mapping[str, int], tp: int) -> bool:
    """Whether `tp` ranks get whole heads and equal parts. Fewer KV heads than ranks: several ranks hold the same."""
    kv_heads = dims["K"] % tp == 0 or tp % dims["K"] == 0
    return kv_heads and all(dims[letter] % tp == 0 for letter in "NJFV" if letter in dims)


def named(name: str, devices: int, *, tp: int = 1) -> dict[str, int]:
    """The axis sizes of a named layout on so many devices: {"dp": .., "ep": .., "tp": ..}. `tp` splits each rank."""
    if name not in NAMES:
        raise ValueError(f"layout is {name!r}, it must be one of {', '.join(NAMES)}")
    if tp > 1 and name != "dp_ep" and (name, tp) != ("tp_ep", devices):
        allowed = "1" if name == "single" else f"1 or the {devices} devices"
        raise ValueError(f"tp is {tp}, with layout {name} it must be {allowed}; dp_ep has ranks of several devices")
    if name == "single":
        return {"dp": 1, "ep": 1, "tp": 1}
    if name == "tp_ep":
        return {"dp": 1, "ep": 1, "tp": devices}
    if devices % tp:
        raise ValueError(f"tp is {tp}, it must divide the {devices} devices")
    return {"dp": 1, "ep": devices // tp, "tp": tp}
