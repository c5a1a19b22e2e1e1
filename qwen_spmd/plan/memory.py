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
from qwen_spmd.mesh.rules import NAMES, Layout, layout, named
from qwen_spmd.params import Params
from qwen_spmd.plan.hardware import GIB, Topology, larger, topology

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
class Case:
    """A model on hardware in a layout, and what is asked for. Tokens and sequences of a step are those of one rank.

    layout_name, tp    as `mesh.rules.named`; a model without experts has dp where others have ep
    context            tokens of a sequence, prompt and answer
    concurrency        sequences of all ranks
    batched_tokens     of a step
    utilization        share of the memory that may be used
    """

    cfg: ModelConfig
    topology: Topology
    layout_name: str
    tp: int
    context: int
    concurrency: int
    dtype: str = "bfloat16"
    weight_dtype: str = "bfloat16"
    state_dtype: str = "float32"
    page_size: int = 256
    batched_tokens: int = 2048
    utilization: float = 0.9

    def __post_init__(self) -> None:
        for name in ("context", "concurrency", "page_size", "batched_tokens", "tp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if not 0 < self.utilization <= 1:
            raise ValueError(f"utilization is {self.utilization}, it must be above 0 and at most 1")
        if self.context > self.cfg.max_position_embeddings:
            most = self.cfg.max_position_embeddings
            raise ValueError(f"isl + osl is {self.context}, the model's max_position_embeddings is {most}")
        if self.batched_tokens < self.sequences:
            raise ValueError(
                f"max_num_batched_tokens is {self.batched_tokens}, a rank has {self.sequences} sequences, "
                "each of which needs one in a step"
            )

    @property
    def layout(self) -> Layout:
        sizes = named(self.layout_name, self.topology.devices, tp=self.tp)
        if self.cfg.moe is None:
            sizes = {"dp": sizes["dp"] * sizes["ep"], "ep": 1, "tp": sizes["tp"]}
        return layout(self.cfg.dims(), **sizes)

    @property
    def sequences(self) -> int:
        """Of one rank."""
        return -(-self.concurrency // self.layout.ranks)

    @property
    def pages_per_seq(self) -> int:
        return -(-self.context // self.page_size)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device. `pages` and `slots` are counts of one rank, the null ones included.

    replicated, sharded      weights that every device has all of, and its part of those that are spread
    page_bytes, slot_bytes   one more of them
    fixed                    state that neither pages nor slots make larger
    temporaries              what the largest step needs besides
    budget                   what may be used
    """

    case: Case
    replicated: int
    sharded: int
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

    @property
    def longest_context(self) -> int:
        """Tokens that each of the case's sequences can have, at most what the model is made for."""
        most = self.case.cfg.max_position_embeddings
        if self.page_bytes == 0:
            return most if self.free >= 0 else 0
        pages = max(0, self.pages - 1 + self.free // self.page_bytes)
        return min(most, pages // self.case.sequences * self.case.page_size)

    @property
    def most_sequences(self) -> int:
        """Sequences of the case's context, of all ranks together."""
        one = self.case.pages_per_seq * self.page_bytes + self.slot_bytes
        return max(0, self.case.sequences + self.free // one) * self.case.layout.ranks


def memory(case: Case, *, temporaries: int | None = None) -> Memory:
    """The plan of one device. `temporaries` None: `estimate_temporaries`."""
    cfg, lay = case.cfg, case.layout
    leaves = on_device(weights(cfg, case.dtype, case.weight_dtype, lay), params.specs(cfg, lay), lay)

    def state_bytes(pages: int, slots: int) -> int:
        sizes = {"pages": pages, "page_size": case.page_size, "slots": slots}
        st = state.declare(cfg, case.dtype, **sizes, rec_dtype=case.state_dtype, layout=lay)
        return num_bytes(on_device(st, state.specs(cfg, lay), lay))

    one = state_bytes(1, 1)
    page_bytes, slot_bytes = state_bytes(2, 1) - one, state_bytes(1, 2) - one
    chip = case.topology.chip
    return Memory(
        case=case,
        replicated=sum(leaf.bytes for leaf in leaves if not leaf.sharded),
        sharded=sum(leaf.bytes for leaf in leaves if leaf.sharded),
        page_bytes=page_bytes,
        slot_bytes=slot_bytes,
        fixed=one - page_bytes - slot_bytes,
        pages=case.sequences * case.pages_per_seq + 1,
        slots=case.sequences + 1,
        temporaries=estimate_temporaries(case) if temporaries is None else temporaries,
        budget=int(chip.hbm_bytes // chip.cores * case.utilization),
    )


def estimate_temporaries(case: Case) -> int:
    """Work space of the largest step, coarsely: logits, a layer's projections, and all gathered rows at the experts.

    An upper figure: it takes each of these as there at the same time, in float32 where it is computed so.
    """
    cfg, lay = case.cfg, case.layout
    T, D = case.batched_tokens, cfg.hidden_size
    logits = 2 * 4 * case.sequences * cfg.vocab_size
    widths = [2 * cfg.num_heads * cfg.head_dim]
    if cfg.gated_delta is not None:
        g = cfg.gated_delta
        widths.append(g.channels + 2 * g.value_heads * g.value_dim)
    mixer = 2 * 4 * T * max(widths) // lay.tp
    ffn = 3 * 4 * T * (cfg.mlp_width or 0) // lay.tp
    if cfg.moe is not None:
        # Any place may get all rows, so the sorted copies and their results hold every one.
        ffn = max(ffn, 2 * 2 * T * lay.ep * cfg.moe.experts_per_token * D)
    return logits + mixer + ffn + 4 * 4 * T * lay.ep * D


def remedies(case: Case) -> list[str]:
    """What would make a case fit that does not: each of these alone, tried with the estimate of `memory`."""
    out = []

    def attempt(text: str, **changes: Any) -> bool:
        """Whether the case fits with these changes. One that cannot be laid out does not."""
        try:
            free = memory(dataclasses.replace(case, **changes)).free
        except ValueError:
            return False
        if free >= 0:
            out.append(f"{text}: {free / GIB:,.1f} GiB a device are free then")
        return free >= 0

    if jnp.dtype(case.weight_dtype).itemsize > 1:
        attempt("8-bit weights, --weight-dtype float8_e4m3fn", weight_dtype="float8_e4m3fn")
    now = memory(case)
    if now.most_sequences:
        out.append(f"fewer slots and pages, --concurrency {now.most_sequences}")
    if now.longest_context:
        out.append(f"fewer pages, --isl and --osl of {now.longest_context:,} tokens together")
    for tokens in (1024, 512, 256):
        if case.sequences <= tokens < case.batched_tokens:
            text = f"smaller steps, --max-num-batched-tokens {tokens}"
            if attempt(text, batched_tokens=tokens):
                break
    for name in NAMES:
        for tp in _ranks_of(name, case.topology.devices):
            said = "" if tp == case.tp else f" --tp {tp}"
            if name != case.layout_name:
                text = f"another layout, --layout {name}{said}"
            elif name == "dp_ep" and said:
                text = f"heads and widths split {'more' if tp > case.tp else 'less'},{said}"
            else:
                continue
            if attempt(text, layout_name=name, tp=tp):
                break
    tp = case.tp if case.layout_name == "dp_ep" else 1
    said = "" if tp == case.tp else f" --tp {tp}"
    for name in larger(case.topology):
        if attempt(f"more devices, --topology {name}{said}", topology=topology(name), tp=tp):
            break
    return out


def _ranks_of(layout_name: str, devices: int) -> list[int]:
    """Each `tp` that a layout may have. dp_ep with all devices is tp_ep, and not said twice."""
    return [n for n in range(1, devices) if devices % n == 0] if layout_name == "dp_ep" else [1]
