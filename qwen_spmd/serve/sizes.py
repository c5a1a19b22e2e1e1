# SPDX-License-Identifier: Apache-2.0
"""Sizes: from limits that a user may set to the static shapes of a server, and the plan that it prints at start.

Not here: which model, what runs.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Literal

import jax

from qwen_spmd import params, state
from qwen_spmd.config import ModelConfig
from qwen_spmd.mesh import rules
from qwen_spmd.mesh.rules import SINGLE, Layout
from qwen_spmd.params import Params
from qwen_spmd.serve.scheduler import SchedulerConfig
from qwen_spmd.state import ModelState

MIB = 1 << 20
SMALLEST_BUCKET = 8
"""Rows of the smallest step: fewer multiply no faster anywhere, and one row is a slow matrix-vector product on CPUs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits and sizes; None lets the engine choose (`Engine.load` prints what it chose).

    dtype                   of weights, activations and KV pages; "auto" is the checkpoint's
    max_model_len           longest prompt + output; None: what the model was trained for, as far as the pages hold it
    block_size              tokens of a KV page
    max_num_seqs            requests that run at once, on all ranks together; a multiple of their number
    max_num_batched_tokens  tokens of one step, of all ranks together; likewise
    memory_utilization      share of the device's memory for weights, pages, slots and work space (not on CPU)
    num_pages               KV pages of all ranks, null pages not counted; likewise; overrides the memory budget
    decode_window           most decode iterations between two visits of the host
    max_queue               requests that may wait
    seed                    of the requests that bring none
    dp, ep, tp              sizes of the mesh's axes (`mesh/rules.py`): independent ranks; ranks that share the experts;
                            devices of each rank
    moe_route, moe_wire     how rows reach their experts (`layers/moe_routes.py`), and the dtype they travel in
    moe_reduce, moe_chunks  how their sums come back, and in how many parts, each summed while the one before travels
    hf_overrides            merged into config.json
    compilation_cache       folder for compiled programs; None: no cache
    progress                progress bars and the plan on stderr
    """

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    max_model_len: int | None = None
    block_size: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    memory_utilization: float = 0.9
    num_pages: int | None = None
    decode_window: int = 8
    max_queue: int = 1024
    patience_s: float = 30.0
    seed: int = 0
    dp: int = 1
    ep: int = 1
    tp: int = 1
    moe_route: Literal["auto", "gather_scatter", "all_to_all"] = "auto"
    moe_wire: Literal["auto", "fp8"] = "auto"
    moe_reduce: Literal["xla", "hierarchical"] = "xla"
    moe_chunks: int = 1
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    hf_overrides: dict[str, Any] | None = None
    compilation_cache: Path | None = Path.home() / ".cache" / "qwen_spmd" / "programs"
    progress: bool = True

    def __post_init__(self) -> None:
        def check(name: str, ok: bool, allowed: str) -> None:
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)!r}, it must be {allowed}")

        check("dtype", self.dtype in ("auto", "bfloat16", "float32"), "auto, bfloat16 or float32")
        check("state_dtype", self.state_dtype in ("bfloat16", "float32"), "bfloat16 or float32")
        sizes = ("max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens", "num_pages")
        routes = ("auto", "gather_scatter", "all_to_all")
        check("moe_route", self.moe_route in routes, ", ".join(routes))
        check("moe_wire", self.moe_wire in ("auto", "fp8"), "auto or fp8")
        check("moe_reduce", self.moe_reduce in ("xla", "hierarchical"), "xla or hierarchical")
        for name in (*sizes, "decode_window", "max_queue", "dp", "ep", "tp", "moe_chunks"):
            value = getattr(self, name)
            chosen = value is None and name in sizes
            check(name, chosen or (isinstance(value, int) and value >= 1), "an integer of at least 1")
        check("memory_utilization", 0 < self.memory_utilization <= 1, "above 0 and at most 1")


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The static shapes of a server, for each rank: what is compiled, and nothing else ever runs."""

    page_size: int
    pages: int
    slots: int
    pages_per_seq: int
    window: int
    ragged: tuple[tuple[int, int], ...]
    windows: tuple[int, ...]

    def state(self, cfg: ModelConfig, dtype: Any, rec_dtype: Any, layout: Layout = SINGLE) -> ModelState:
        """The model's state in these shapes, abstract."""
        sizes = {"pages": self.pages, "page_size": self.page_size, "slots": self.slots}
        return state.declare(cfg, dtype, **sizes, rec_dtype=rec_dtype, layout=layout)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What was chosen; `str()` is the plan for the screen. Bytes are those of one device, the rest of all ranks."""

    layout: Layout
    scheduler: SchedulerConfig
    shapes: Shapes
    weight_bytes: int
    page_bytes: int
    slot_bytes: int
    num_params: int

    def __str__(self) -> str:
        s, c, ranks = self.shapes, self.scheduler, self.layout.ranks
        tokens = (s.pages - 1) * s.page_size
        full = min(c.max_num_seqs, tokens // c.max_model_len)
        each = " a device" if self.layout.devices > 1 else ""
        by_rank = f" ({ranks} ranks)" if ranks > 1 else ""
        return "\n".join(
            [
                f"mesh         {self.layout.name}",
                f"weights      {self.num_params / 1e6:,.1f} M parameters, {_size(self.weight_bytes)}{each}",
                f"KV pages     {ranks * (s.pages - 1):,} of {s.page_size} tokens{by_rank}, "
                f"{_size(s.pages * self.page_bytes)}{each}",
                f"slots        {ranks * (s.slots - 1):,}{by_rank}, "
                f"{_size(s.slots * self.slot_bytes)}{each} of recurrent state",
                f"context      up to {c.max_model_len:,} tokens a request, {ranks * tokens:,} in all",
                f"concurrency  {ranks * c.max_num_seqs} requests, {ranks * full} of them at full length",
                f"steps        up to {ranks * c.max_num_batched_tokens:,} tokens, windows of {s.window} decode "
                f"iterations; {len(s.ragged) + len(s.windows)} programs",
            ]
        )


def make_layout(cfg: ModelConfig, config: EngineConfig) -> Layout:
    """The layout that a config asks for. ValueError if it does not fit the model."""
    return rules.layout(cfg.dims(), dp=config.dp, ep=config.ep, tp=config.tp)


def choose(cfg: ModelConfig, weights: Params, device: Any, layout: Layout, config: EngineConfig) -> Sizes:
    """Fill in what the config leaves open. ValueError names the limit that cannot be met and what would fit.

    `weights` may be abstract; `device` is one of the mesh's on this host.
    """
    cpu, ranks = device.platform == "cpu", layout.ranks
    for name in ("max_num_seqs", "max_num_batched_tokens", "num_pages"):
        if (value := getattr(config, name)) is not None and value % ranks:
            near = f"{value // ranks * ranks} or {-(-value // ranks) * ranks}" if value > ranks else ranks
            raise ValueError(f"{name} is {value}, it must be a multiple of the {ranks} ranks, such as {near}")
    seqs = -(-(config.max_num_seqs or (16 if cpu else 256)) // ranks)
    page_size = config.block_size or (64 if cpu else 256)
    batched = -(-(config.max_num_batched_tokens or max(512 if cpu else 2048 * ranks, seqs * ranks)) // ranks)
    if batched < seqs:
        raise ValueError(
            f"max_num_batched_tokens is {batched * ranks}, it must be at least max_num_seqs ({seqs * ranks}): "
            "a step has a token of every request that runs"
        )
    # Bytes of a page and of a slot on a device: what one more of it on each rank adds, shared by all devices.
    one = [
        params.num_bytes(
            Shapes(page_size, p, s, 1, 1, (), ()).state(cfg, weights.embed.dtype, config.state_dtype, layout)
        )
        for p, s in ((1, 1), (2, 1), (1, 2))
    ]
    page_bytes, slot_bytes = ((n - one[0]) // layout.devices for n in one[1:])
    weight_bytes = params.device_bytes(weights)
    num_params = params.num_params(params.declare(cfg, weights.embed.dtype))
    max_len = config.max_model_len or cfg.max_position_embeddings
    if max_len > cfg.max_position_embeddings:
        raise ValueError(
            f"max_model_len is {max_len}, the model's max_position_embeddings is {cfg.max_position_embeddings}"
        )
    wanted = seqs * -(-max_len // page_size)
    pages = None if config.num_pages is None else config.num_pages // ranks
    if pages is None:
        budget = _budget(device, config.memory_utilization, weight_bytes) - (seqs + 1) * slot_bytes
        pages = wanted if page_bytes == 0 else min(wanted, budget // page_bytes - 1)
    if pages < 1:
        raise ValueError(
            f"max_num_seqs is {seqs} a rank, whose recurrent state ({_size((seqs + 1) * slot_bytes)}) leaves no memory "
            "for KV pages; lower it or raise the memory share"
        )
    if pages * page_size < max_len:
        if config.max_model_len is not None:
            remedy = "lower it, or max_num_seqs, or raise the memory share"
            if config.num_pages is not None:
                remedy = f"lower it, or raise num_pages ({config.num_pages})"
            raise ValueError(
                f"max_model_len is {max_len}, the {pages} KV pages of a rank hold {pages * page_size} tokens; {remedy}"
            )
        max_len = pages * page_size
        if max_len < 2:
            raise ValueError(f"num_pages is {config.num_pages}, a rank's part holds {max_len} token; a request needs 2")
    window = config.decode_window
    token_buckets = _buckets(min(32, batched), batched)
    seq_buckets = _buckets(min(SMALLEST_BUCKET, seqs), seqs, step=4)
    scheduler = SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        max_model_len=max_len,
        token_buckets=token_buckets,
        seq_buckets=seq_buckets,
        max_queue=config.max_queue,
        decode_window=window,
        patience_s=config.patience_s,
    )
    shapes = Shapes(
        page_size=page_size,
        pages=pages + 1,
        slots=seqs + 1,
        pages_per_seq=-(-max_len // page_size),
        window=window,
        # A step of T tokens has at most T sequences, so it never needs a bucket beyond the first that holds T.
        ragged=tuple((T, B) for T in token_buckets for B, below in zip(seq_buckets, (0, *seq_buckets)) if below < T),
        windows=seq_buckets,
    )
    return Sizes(layout, scheduler, shapes, weight_bytes, page_bytes, slot_bytes, num_params)


def _budget(device: Any, utilization: float, weight_bytes: int) -> int:
    """Bytes for pages and slots of a device."""
    stats = device.memory_stats()
    if device.platform == "cpu" or not stats or "bytes_limit" not in stats:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") // 4 // jax.local_device_count()
    # Half a GiB, or a tenth, for what a step needs beside weights and state.
    work = max(512 * MIB, stats["bytes_limit"] // 10)
    return int(stats["bytes_limit"] * utilization) - weight_bytes - work


def _buckets(smallest: int, largest: int, step: int = 2) -> tuple[int, ...]:
    """`smallest`, times `step`, ..., and `largest` itself."""
    sizes = [smallest]
    while sizes[-1] * step < largest:
        sizes.append(sizes[-1] * step)
    return tuple(dict.fromkeys([*sizes, largest]))


def _size(n: int) -> str:
    return f"{n / MIB:,.1f} MiB" if n < 1024 * MIB else f"{n / MIB / 1024:,.2f} GiB"
