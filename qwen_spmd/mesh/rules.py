# SPDX-License-Identifier: Apache-2.0
"""Layouts: which mesh axis shards which letter. A sharding spec is a declaration's letters looked up here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from jax.sharding import PartitionSpec as P

Axes = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A named table from dimension letters to mesh axes; letters that are not in it are replicated."""

    name: str
    axes: Mapping[str, Axes]

    def spec(self, dims: str) -> P:
        return P(*(self.axes.get(letter) for letter in dims))


SINGLE = Layout("single", MappingProxyType({}))
