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
import jax.numpy as jnp

from qwen_spmd import params, state
from qwen_spmd.config import ModelConfig
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
    max_num_seqs            requests that run at once
    max_num_batched_tokens  tokens of one step
    memory_utilization      share of the device's memory for weights, pages, slots and work space (not on CPU)
    num_pages               KV pages, null page not counted; overrides the memory budget
    decode_window           most decode iterations between two visits of the host
    max_queue               requests that may wait
    seed                    of the requests that bring none
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
        for name in (*sizes, "decode_window", "max_queue"):
            value = getattr(self, name)
            chosen = value is None and name in sizes
            check(name, chosen or (isinstance(value, int) and value >= 1), "an integer of at least 1")
        check("memory_utilization", 0 < self.memory_utilization <= 1, "above 0 and at most 1")


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The static shapes of a server: what is compiled, and nothing else ever runs."""

    page_size: int
    pages: int
    slots: int
    pages_per_seq: int
    window: int
    ragged: tuple[tuple[int, int], ...]
    windows: tuple[int, ...]

    def state(self, cfg: ModelConfig, dtype: Any, rec_dtype: Any) -> ModelState:
        """The model's state in these shapes, abstract."""
        st = state.declare(cfg, dtype, pages=self.pages, page_size=self.page_size, slots=self.slots)
        return dataclasses.replace(st, rec=jax.ShapeDtypeStruct(st.rec.shape, jnp.dtype(rec_dtype)))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What was chosen; `str()` is the plan for the screen."""

    scheduler: SchedulerConfig
    shapes: Shapes
    weight_bytes: int
    page_bytes: int
    slot_bytes: int
    num_params: int

    def __str__(self) -> str:
        s, c = self.shapes, self.scheduler
        tokens = (s.pages - 1) * s.page_size
        full = min(c.max_num_seqs, tokens // c.max_model_len)
        return "\n".join(
            [
                f"weights      {self.num_params / 1e6:,.1f} M parameters, {_size(self.weight_bytes)}",
                f"KV pages     {s.pages - 1:,} of {s.page_size} tokens, {_size(s.pages * self.page_bytes)}",
                f"slots        {s.slots - 1:,}, {_size(s.slots * self.slot_bytes)} of recurrent state",
                f"context      up to {c.max_model_len:,} tokens a request, {tokens:,} in all",
                f"concurrency  {c.max_num_seqs} requests, {full} of them at full length",
                f"steps        up to {c.max_num_batched_tokens:,} tokens, windows of {s.window} decode iterations; "
                f"{len(s.ragged) + len(s.windows)} programs",
            ]
        )


def choose(cfg: ModelConfig, weights: Params, device: Any, config: EngineConfig) -> Sizes:
    """Fill in what the config leaves open. ValueError names the limit that cannot be met and what would fit."""
    cpu = device.platform == "cpu"
    seqs = config.max_num_seqs or (16 if cpu else 256)
    page_size = config.block_size or (64 if cpu else 256)
    batched = config.max_num_batched_tokens or max(512 if cpu else 2048, seqs)
    # Bytes of a page and of a slot: what one more of it adds.
    one = [
        params.num_bytes(Shapes(page_size, p, s, 1, 1, (), ()).state(cfg, weights.embed.dtype, config.state_dtype))
        for p, s in ((1, 1), (2, 1), (1, 2))
    ]
    page_bytes, slot_bytes = one[1] - one[0], one[2] - one[0]
    max_len = config.max_model_len or cfg.max_position_embeddings
    if max_len > cfg.max_position_embeddings:
        raise ValueError(
            f"max_model_len is {max_len}, the model's max_position_embeddings is {cfg.max_position_embeddings}"
        )
    wanted = seqs * -(-max_len // page_size)
    pages = config.num_pages
    if pages is None:
        budget = _budget(device, config.memory_utilization, params.num_bytes(weights)) - (seqs + 1) * slot_bytes
        pages = wanted if page_bytes == 0 else min(wanted, budget // page_bytes - 1)
    if pages < 1:
        raise ValueError(
            f"max_num_seqs is {seqs}, whose recurrent state ({_size((seqs + 1) * slot_bytes)}) leaves no memory for KV "
            "pages; lower it or raise the memory share"
        )
    if pages * page_size < max_len:
        if config.max_model_len is not None:
            raise ValueError(
                f"max_model_len is {max_len}, the {pages} KV pages that fit hold {pages * page_size} tokens; "
                "lower it, or max_num_seqs, or raise the memory share"
            )
        max_len = pages * page_size
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
    return Sizes(scheduler, shapes, params.num_bytes(weights), page_bytes, slot_bytes, params.num_params(weights))


def _budget(device: Any, utilization: float, weight_bytes: int) -> int:
    """Bytes for pages and slots."""
    stats = device.memory_stats()
    if device.platform == "cpu" or not stats or "bytes_limit" not in stats:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") // 4
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
