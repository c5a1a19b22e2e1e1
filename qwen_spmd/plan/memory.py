# SPDX-License-Identifier: Apache-2.0
"""Bytes on one device, by kind, and what fits: from the declarations of parameters and state, not from a formula.

Not here: what the compiler makes of them (`compile`), time (`roofline`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from qwen_spmd import params, state
from qwen_spmd.config import ModelConfig
from qwen_spmd.mesh.rules import Layout
from qwen_spmd.params import Params

QUANTISED = frozenset(("w_q", "w_gate", "w_k", "w_v", "w_o", "w_qkv", "w_z", "w_up", "w_down"))
"""Leaves whose matrices a checkpoint in 8 bits has in 8 bits, as Qwen publishes it; all others stay as they are."""


def weights(cfg: ModelConfig, dtype: Any, weight_dtype: Any, layout: Layout) -> Params:
    """Abstract Params in `dtype`, the QUANTISED matrices in `weight_dtype`.

    Scales of a block format are not there: one float32 for 128 x 128 values is 1/4096 of the bytes.
    """

    def cast(path: Any, leaf: Any) -> Any:
        quantised = path[-1].name in QUANTISED
        return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(weight_dtype)) if quantised else leaf

    return jax.tree_util.tree_map_with_path(cast, params.abstract(cfg, dtype, layout))


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array's part on one device."""

    name: str
    elements: int
    dtype: jnp.dtype
    sharded: bool

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize


def on_device(tree: Any, specs: Any, layout: Layout) -> list[Leaf]:
    """What one device holds of abstract arrays with these PartitionSpecs."""
    sizes = {"dp": layout.dp, "ep": layout.ep, "tp": layout.tp}

    def leaf(path: Any, x: Any, spec: Any) -> Leaf:
        axes = [a for entry in spec if entry for a in ((entry,) if isinstance(entry, str) else entry)]
        parts = math.prod(sizes[a] for a in axes)
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return Leaf(name, math.prod(x.shape) // parts, jnp.dtype(x.dtype), parts > 1)

    return jax.tree.leaves(jax.tree_util.tree_map_with_path(leaf, tree, specs), is_leaf=lambda x: isinstance(x, Leaf))


def num_bytes(leaves: list[Leaf]) -> int:
    return sum(leaf.bytes for leaf in leaves)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What is asked for. Tokens and sequences of a step are those of one rank."""

    context: int
    concurrency: int
    page_size: int
    batched_tokens: int

    def sequences(self, layout: Layout) -> int:
        """Of one rank."""
        return -(-self.concurrency // layout.ranks)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device. `pages` and `slots` are counts of one rank, the null ones included.

    replicated, sharded   weights that every device has, and its part of those that are spread
    unused                of both: the MTP layer, which is loaded and not served
    page_bytes, slot_bytes   one more of them
    fixed                 state that neither pages nor slots make larger
    temporaries           what the largest step needs besides
    budget                what may be used
    """

    replicated: int
    sharded: int
    unused: int
    page_bytes: int
    slot_bytes: int
    fixed: int
    pages: int
    slots: int
    temporaries: int
    budget: int

    @property
    def used(self) -> int:
        """All but what is free."""
        state_bytes = self.pages * self.page_bytes + self.slots * self.slot_bytes + self.fixed
        return self.replicated + self.sharded + state_bytes + self.temporaries

    @property
    def free(self) -> int:
        """Negative: that much does not fit."""
        return self.budget - self.used

    def longest_context(self, limits: Limits, layout: Layout) -> int:
        """Tokens that each of `limits.concurrency` sequences can have; -1 where a model has no pages to fill."""
        if self.page_bytes == 0:
            return -1
        pages = self.pages - 1 + self.free // self.page_bytes
        return max(0, pages // limits.sequences(layout)) * limits.page_size

    def most_sequences(self, limits: Limits, layout: Layout) -> int:
        """Sequences of `limits.context` tokens, of all ranks together."""
        one = -(-limits.context // limits.page_size) * self.page_bytes + self.slot_bytes
        n = limits.sequences(layout)
        return max(0, n + math.floor(self.free / one)) * layout.ranks


def memory(
    cfg: ModelConfig,
    layout: Layout,
    limits: Limits,
    *,
    dtype: Any,
    weight_dtype: Any,
    state_dtype: Any,
    budget: int,
    temporaries: int | None = None,
) -> Memory:
    """The plan of one device. `temporaries` None: `estimate_temporaries`."""
    leaves = on_device(weights(cfg, dtype, weight_dtype, layout), params.specs(cfg, layout), layout)

    def state_bytes(pages: int, slots: int) -> int:
        st = state.declare(cfg, dtype, pages=pages, page_size=limits.page_size, slots=slots, layout=layout)
        st = dataclasses.replace(st, rec=jax.ShapeDtypeStruct(st.rec.shape, jnp.dtype(state_dtype)))
        return num_bytes(on_device(st, state.specs(layout), layout))

    one = state_bytes(1, 1)
    page_bytes, slot_bytes = state_bytes(2, 1) - one, state_bytes(1, 2) - one
    n = limits.sequences(layout)
    return Memory(
        replicated=sum(leaf.bytes for leaf in leaves if not leaf.sharded),
        sharded=sum(leaf.bytes for leaf in leaves if leaf.sharded),
        unused=sum(leaf.bytes for leaf in leaves if leaf.name.startswith("mtp.")),
        page_bytes=page_bytes,
        slot_bytes=slot_bytes,
        fixed=one - page_bytes - slot_bytes,
        pages=n * -(-limits.context // limits.page_size) + 1,
        slots=n + 1,
        temporaries=estimate_temporaries(cfg, layout, limits) if temporaries is None else temporaries,
        budget=budget,
    )


def estimate_temporaries(cfg: ModelConfig, layout: Layout, limits: Limits) -> int:
    """Work space of the largest step, coarsely: logits, a layer's projections, and all gathered rows at the experts.

    An upper figure: it takes each of these as there at the same time, in float32 where it is computed so.
    """
    T, D = limits.batched_tokens, cfg.hidden_size
    logits = 2 * 4 * limits.sequences(layout) * cfg.vocab_size
    widths = [2 * cfg.num_heads * cfg.head_dim]
    if cfg.gated_delta is not None:
        g = cfg.gated_delta
        widths.append(g.channels + 2 * g.value_heads * g.value_dim)
    mixer = 2 * 4 * T * max(widths) // layout.tp
    ffn = 3 * 4 * T * (cfg.mlp_width or 0) // layout.tp
    if cfg.moe is not None:
        # Any place may get all rows, so the sorted copies and their results hold every one.
        ffn = max(ffn, 2 * 2 * T * layout.ep * cfg.moe.experts_per_token * D)
    return logits + mixer + ffn + 4 * 4 * T * layout.ep * D
