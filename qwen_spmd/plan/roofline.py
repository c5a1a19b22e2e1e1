# SPDX-License-Identifier: Apache-2.0
"""A lower bound for the time of a step, building block by building block.

Each block does so much arithmetic and moves so many bytes of memory and network; the largest of the three times is its
bound, and a step's is their sum. What the bound takes for granted is written down in `Assumptions`.

Not here: kernels' real efficiency, launch costs, latency of collectives, the host, uneven experts.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from typing import Any, Literal

import jax.numpy as jnp

from qwen_spmd import params
from qwen_spmd.config import ModelConfig
from qwen_spmd.layers.moe_routes import Route
from qwen_spmd.mesh.rules import Layout
from qwen_spmd.plan.hardware import Topology
from qwen_spmd.plan.memory import Leaf, on_device, weights

CHUNK = 64
"""Tokens of a chunk in Gated DeltaNet's chunked form."""


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What a bound takes for granted.

    hbm, flops, network   shares of the peak that are reached
    experts_read          "expected": those that so many tokens reach when each picks at random; "all": every one
    matmul                what 8-bit weights are multiplied in: the model's dtype, or 8 bits at twice the rate
    kv_dtype, state_dtype   of KV pages and of the recurrent matrices
    overlap_network       collectives hide behind the rest of the step as far as it lasts
    moe_route             how rows reach their experts (`layers/moe_routes.py`); "auto": as the server chooses it
    moe_wire              what they travel in: activations' dtype, or 8 bits and a scale for each row
    """

    hbm: float = 1.0
    flops: float = 1.0
    network: float = 1.0
    experts_read: Literal["expected", "all"] = "expected"
    matmul: Literal["bfloat16", "float8_e4m3fn"] = "bfloat16"
    kv_dtype: str = "bfloat16"
    state_dtype: str = "float32"
    overlap_network: bool = False
    moe_route: Literal["auto", "gather_scatter", "all_to_all"] = "auto"
    moe_wire: Literal["auto", "fp8"] = "auto"

    def __post_init__(self) -> None:
        for name in ("hbm", "flops", "network"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, a share of the peak must be above 0 and at most 1")
        for name, allowed in (("moe_route", ("auto", "gather_scatter", "all_to_all")), ("moe_wire", ("auto", "fp8"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}, it must be one of {', '.join(allowed)}")


PUBLISHED = Assumptions(
    experts_read="all",
    matmul="float8_e4m3fn",
    kv_dtype="float8_e4m3fn",
    state_dtype="bfloat16",
    overlap_network=True,
    moe_route="gather_scatter",
)
"""Those under which Google's bound for Qwen3.5-397B-A17B on four Ironwood chips comes out: 16.36 ms a decode step.

Every expert of a core is read in every step, though 64 tokens reach 72 % of them; 8-bit KV and 16-bit recurrent states,
as its server has them; the whole `lm_head` on each core, in 16 bits; memory at its peak; no time for collectives.
"""


@dataclasses.dataclass(frozen=True)
class Step:
    """What one rank computes in a step; averages need not be whole.

    tokens    rows
    chunked   of them, those of sequences with several rows
    emitted   sequences that sample a token
    pairs     (query, key) pairs of one head of one layer
    context   tokens whose keys and values are read
    states    sequences whose recurrent state is read and written
    """

    tokens: float
    chunked: float
    emitted: float
    pairs: float
    context: float
    states: float

    def __add__(self, other: Step) -> Step:
        names = [f.name for f in dataclasses.fields(Step)]
        return Step(**{name: getattr(self, name) + getattr(other, name) for name in names})


def decode(sequences: float, context: float) -> Step:
    """One token of each of so many sequences, with so many tokens before and with it."""
    n = sequences
    return Step(tokens=n, chunked=0, emitted=n, pairs=n * context, context=n * context, states=n)


def prefill(tokens: float, prompt: int) -> Step:
    """So many tokens of prompts of this length, each prompt cut into chunks of that many at most."""
    chunk = min(tokens, prompt)
    chunks = tokens / chunk
    return Step(
        tokens=tokens,
        chunked=tokens,
        emitted=tokens / prompt,
        pairs=tokens * (prompt + 1) / 2,
        context=chunks * (prompt + chunk) / 2,
        states=chunks,
    )


@dataclasses.dataclass(frozen=True)
class Block:
    """One building block of a step on one device, all its layers together.

    flops, fp8_flops   arithmetic at the rate of 16 bits and of 8
    hbm                bytes of memory: weights and state once, what comes in and goes out once
    network            bytes from other chips
    core               bytes from the chip's other cores
    """

    name: str
    flops: float = 0
    fp8_flops: float = 0
    hbm: float = 0
    network: float = 0
    core: float = 0

    def times(self, topology: Topology, a: Assumptions) -> dict[str, float]:
        """Seconds that each of the three takes."""
        chip = topology.chip
        compute = self.flops / topology.rate(chip.bf16) + self.fp8_flops / topology.rate(chip.fp8)
        network = self.network / topology.network if self.network else 0.0
        core = self.core / chip.core_link if self.core else 0.0
        return {
            "flops": compute / a.flops,
            "hbm": self.hbm / topology.rate(chip.hbm) / a.hbm,
            "network": max(network, core) / a.network,
        }


class Roofline:
    """Bounds of one model in one layout on one topology. Activations have 16 bits."""

    def __init__(
        self,
        cfg: ModelConfig,
        layout: Layout,
        topology: Topology,
        *,
        dtype: Any = "bfloat16",
        weight_dtype: Any = "bfloat16",
        assumptions: Assumptions | None = None,
    ):
        self.cfg, self.layout, self.topology = cfg, layout, topology
        self.assumptions = a = assumptions or Assumptions(kv_dtype=str(dtype))
        for name, value in (("moe_route", a.moe_route), ("moe_wire", a.moe_wire)):
            if (cfg.moe is None or layout.ep == 1) and value not in ("auto", "gather_scatter"):
                raise ValueError(f"{name} is {value!r}, with ep=1 nothing travels: it must be 'auto'")
        self._route = Route(a.moe_route, ragged=topology.chip.platform == "tpu")
        self._row_bytes = cfg.hidden_size * _size(dtype)  # for the server's choice only
        leaves = on_device(weights(cfg, dtype, weight_dtype, layout), params.specs(cfg, layout), layout)
        self._leaves: dict[str, list[Leaf]] = defaultdict(list)
        for leaf in leaves:
            self._leaves[_block_of(leaf.name, cfg)].append(leaf)

    def blocks(self, step: Step) -> list[Block]:
        """What the step does, in the order of a layer."""
        cfg, layout = self.cfg, self.layout
        T, D = step.tokens, cfg.hidden_size
        row = 2 * D  # bytes
        attention_layers, delta_layers, moe_layers = (cfg.count(k) for k in ("attention", "gated_delta", "moe"))
        out = [Block("embedding", hbm=2 * T * row)]
        if attention_layers:
            kv_heads = (layout.kv_heads or cfg.num_kv_heads) // layout.tp
            kv_bytes = 2 * kv_heads * cfg.head_dim * _size(self.assumptions.kv_dtype)
            q_bytes = 2 * cfg.num_heads // layout.tp * cfg.head_dim
            out += [
                self._matrices("attention projections", T, 2 * attention_layers * T * (row + q_bytes)),
                Block(
                    "attention core",
                    flops=attention_layers * 4 * step.pairs * cfg.num_heads // layout.tp * cfg.head_dim,
                    hbm=attention_layers * ((step.context + T) * kv_bytes + 2 * T * q_bytes),
                ),
            ]
        if (g := cfg.gated_delta) is not None:
            heads = g.value_heads // layout.tp
            channels, values = g.channels // layout.tp, heads * g.value_dim
            state = heads * g.key_dim * g.value_dim * _size(self.assumptions.state_dtype)
            state += (g.conv_width - 1) * channels * 2
            io = T * 2 * (channels + 2 * values)
            out += [
                self._matrices("Gated DeltaNet projections", T, delta_layers * (2 * T * row + io)),
                Block(
                    "Gated DeltaNet core",
                    flops=delta_layers * (_delta_flops(step, g, heads) + 2 * T * g.conv_width * channels),
                    hbm=delta_layers * (2 * step.states * state + io),
                ),
            ]
        if cfg.mlp_width is not None:
            out.append(self._matrices("feed-forward", T, 2 * cfg.count("mlp") * T * row))
        if cfg.moe is not None:
            out += [
                self._matrices("router", T, moe_layers * T * row),
                self._experts(step, moe_layers),
            ]
            if cfg.moe.shared_width is not None:
                out.append(self._matrices("shared expert", T, 2 * moe_layers * T * row))
        logits = step.emitted * cfg.vocab_size * 4
        return [
            *out,
            self._collectives(step, moe_layers),
            self._matrices("unembedding", step.emitted, logits / layout.tp),
            Block("sampling", hbm=logits),
        ]

    def seconds(self, step: Step) -> float:
        """The bound of a step."""
        times = {b.name: b.times(self.topology, self.assumptions) for b in self.blocks(step)}
        network = times.pop("collectives")["network"]
        rest = sum(max(t.values()) for t in times.values())
        return max(rest, network) if self.assumptions.overlap_network else rest + network

    def decode_rate(self, concurrency: int, context: float) -> tuple[float, float]:
        """(seconds of a step, tokens/s/chip) while so many sequences decode."""
        seconds = self.seconds(decode(concurrency / self.layout.ranks, context))
        return seconds, concurrency / seconds / self.topology.chips

    def prefill_rate(self, tokens: int, prompt: int) -> tuple[float, float]:
        """(seconds of a step, tokens/s/chip) while each rank computes so many tokens of prompts a step."""
        seconds = self.seconds(prefill(tokens, prompt))
        return seconds, tokens * self.layout.ranks / seconds / self.topology.chips

    def serve_rate(self, isl: int, osl: int, concurrency: int, batched_tokens: int) -> tuple[float, float]:
        """(seconds of a request, input and output tokens/s/chip) while so many requests always run.

        A request that ends makes room for the next, whose prompt shares steps with the decoding of the others: in the
        time of one request, `osl` steps, all prompts of a rank are computed once, `batched_tokens` at a time.
        """
        n = concurrency / self.layout.ranks
        context = isl + osl / 2
        chunk = max(1.0, batched_tokens - n)
        mixed = n * isl / chunk
        if mixed <= osl:
            seconds = mixed * self.seconds(prefill(chunk, isl) + decode(n, context))
            seconds += (osl - mixed) * self.seconds(decode(n, context))
        else:  # the prompts take more steps than the answers: a part of the requests decodes in each
            seconds = mixed * self.seconds(prefill(chunk, isl) + decode(n * osl / mixed, context))
        return seconds, concurrency * (isl + osl) / seconds / self.topology.chips

    def _matrices(self, name: str, rows: float, io: float) -> Block:
        """Rows by all weights of a block, each read once; `io` bytes go in and out."""
        block = Block(name, hbm=io)
        for leaf in self._leaves[name]:
            block = self._plus(block, leaf, 2 * rows * leaf.elements, leaf.bytes)
        return block

    def _experts(self, step: Step, layers: int) -> Block:
        """The rows of all ranks that share the experts, spread evenly over the devices."""
        moe = self.cfg.moe
        assert moe is not None
        rows = step.tokens * self.layout.ep
        devices = self.layout.ep * self.layout.tp
        read = 1.0
        if self.assumptions.experts_read == "expected":
            read -= (1 - moe.experts_per_token / moe.num_experts) ** rows
        name, row = "routed experts", 2 * self.cfg.hidden_size
        # Gathered rows are written and read, their weighted sums written and read.
        block = Block(name, hbm=4 * layers * rows * row)
        for leaf in self._leaves[name]:
            # A matrix of every place, of which E hold an expert and a row meets X.
            matrix = leaf.elements * devices / (self.layout.places or moe.num_experts)
            flops = 2 * rows * moe.experts_per_token * matrix / devices
            block = self._plus(block, leaf, flops, read * leaf.bytes * moe.num_experts / self._places)
        return block

    @property
    def _places(self) -> int:
        assert self.cfg.moe is not None
        return self.layout.places or self.cfg.moe.num_experts

    def _plus(self, block: Block, leaf: Leaf, flops: float, hbm: float) -> Block:
        fp8 = leaf.dtype.itemsize == 1 and self.assumptions.matmul == "float8_e4m3fn"
        return dataclasses.replace(
            block,
            flops=block.flops + (0 if fp8 else flops),
            fp8_flops=block.fp8_flops + (flops if fp8 else 0),
            hbm=block.hbm + hbm,
        )

    def _collectives(self, step: Step, moe_layers: int) -> Block:
        """Tokens to the experts and back over ep, partial sums over tp, and the logits' parts over tp."""
        cfg, layout = self.cfg, self.layout
        rows = 2 * step.tokens * cfg.hidden_size
        network = core = 0.0

        def spread(nbytes: float, group: int, stride: int) -> None:
            """An all-gather to, or a reduce-scatter from, an array of so many bytes.

            A chip gets what its cores lack once, and they share it.
            """
            nonlocal network, core
            shared = self.topology.shared(group, stride)
            network += nbytes * (1 - shared / group) / shared
            core += nbytes * (1 - 1 / shared)

        def exchange(nbytes: float, group: int, stride: int) -> None:
            """Parts for each device alone, of so many bytes with what it has itself; cores have nothing to share."""
            nonlocal network, core
            shared = self.topology.shared(group, stride)
            network += nbytes * (1 - shared / group)
            core += nbytes * (shared - 1) / group

        if layout.ep > 1 and cfg.moe is not None:
            ep, X = layout.ep, cfg.moe.experts_per_token
            fp8 = self.assumptions.moe_wire == "fp8"
            there_and_back = (rows / 2 if fp8 else rows) + rows
            routing = 4 * step.tokens * (2 * X + fp8)  # ids, weights, a scale
            kind = self._route.resolve(math.ceil(step.tokens), ep, X, self._row_bytes)
            travel = exchange if kind == "all_to_all" else spread
            # Empty room travels, too, where the platform cannot leave it out.
            empty = kind == "gather_scatter" or not self._route.ragged
            copies = ep if empty else ep * (1 - (1 - 1 / ep) ** X)
            travel(moe_layers * there_and_back * copies, ep, layout.tp)
            travel(moe_layers * routing * ep, ep, layout.tp)
        if layout.tp > 1:
            sums = 1 + 2 * cfg.num_layers  # the embedding; each layer's mixer and feed-forward
            spread(sums * 2 * rows, layout.tp, 1)
            spread(4 * step.emitted * cfg.vocab_size, layout.tp, 1)
        return Block("collectives", network=network, core=core)


def _block_of(name: str, cfg: ModelConfig) -> str:
    """The building block that a parameter, such as "blocks.0.mixer.w_q", belongs to."""
    first, *rest = name.split(".")
    if first == "embed":
        return "unembedding" if cfg.tied_embeddings else "embedding"
    if first in ("lm_head", "norm"):
        return "unembedding"
    if first == "mtp":
        return "MTP"
    run = cfg.runs[int(rest[0])]
    if rest[1] == "mixer" or rest[1] == "mixer_norm":
        return {"attention": "attention projections", "gated_delta": "Gated DeltaNet projections"}[run.mixer]
    if run.ffn == "mlp":
        return "feed-forward"
    if rest[-1] in ("w_router", "places", "ffn_norm"):
        return "router"
    return "shared expert" if "shared" in name else "routed experts"


def _delta_flops(step: Step, g: Any, heads: int) -> float:
    """Of one layer. One token alone: three products with the state. In chunks: besides, those within the chunk."""
    state = 2 * g.key_dim * g.value_dim
    inside = 2 * CHUNK * (2 * g.key_dim + 2 * g.value_dim) + 2 * CHUNK**2 / 3
    return heads * (3 * state * step.tokens + inside * step.chunked)


def _size(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize
