# SPDX-License-Identifier: Apache-2.0
"""What paged attention launches on a TPU: one kernel for all sequences of one token, one for all longer ones."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from qwen_spmd.pallas.paged_attention.tpu_kernel import LANES, Blocks, kernel, subs_of
from qwen_spmd.state import Ragged

VMEM = 60 << 20  # of 64 MiB
SPILLS = 6 << 20  # what the compiler may need besides
SMEM = 768 << 10  # of 1 MiB


def paged_attention(
    q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, kv: jax.Array, layer: jax.Array, rows: Ragged
) -> tuple[jax.Array, jax.Array]:
    (T, N, H), K = q_TNH.shape, k_TKH.shape[1]
    G = N // K
    # Rows of a (token, key head) fill whole tiles of registers, so that tokens times G are rows of a product.
    tile = 8 * 4 // q_TNH.dtype.itemsize
    q = q_TNH.reshape(T, K, G, H)
    few = 0 if rows.one_token else max(subs_of(K) - T, 0)
    if G % tile or few:
        q = jnp.pad(q, ((0, few), (0, 0), (0, -G % tile), (0, 0)))
    # A token's new rows, keys then values, as float32: tokens lie along no tiled dimension and copies may begin at any.
    new = jnp.concatenate([k_TKH, v_TKH], axis=1).astype(jnp.float32)
    new = jnp.pad(new, ((0, few), (0, 0), (0, 0)))
    if kv.dtype.itemsize == 1:  # eight bits saturate
        limit = float(jnp.finfo(kv.dtype).max)
        new = jnp.clip(new, -limit, limit)
    o = None
    if not rows.one_token:
        o, kv = _launch(q, new, kv, None, layer, rows, several=True)
    o, kv = _launch(q, new, kv, o, layer, rows, several=False)
    return o[:T, :, :G].reshape(T, N, H), kv


def blocks(q: Any, kv: Any, pages_per_seq: int, several: bool) -> Blocks:
    """The largest that fit into vector memory. Few long blocks have few beginnings and ends, where matrix units idle.

    q [T, K, G, H], kv [L, P, K, 2, S, H]. Items of several rows have up to 4096 rows of a key head, in products of 256:
    halved first, as blocks of keys matter more (docs/tpu-paged-attention.md has the figures).
    """
    T, K, G, _ = q.shape
    S = kv.shape[4]

    def candidates():
        for keys in (2048, 1024, 512, 256):
            pages = max(1, min(keys // S, pages_per_seq))
            if not several:
                yield Blocks(1, min(4, T), pages, max(1, math.gcd(pages, 1024 // S)), 1)
                continue
            subs = subs_of(K)
            for rows in (4096, 2048, 1024):
                tokens = max(min(T, rows // G) // subs, 1) * subs
                sub = math.gcd(tokens // subs, max(1, 256 // G))
                yield Blocks(tokens, 1, pages, max(1, math.gcd(pages, 512 // S)), sub)

    for c in candidates():
        if sum(map(_bytes, _vectors(c, q, kv, several).values())) <= VMEM - SPILLS:
            return c
    raise ValueError(f"no blocks of {q.shape} queries and {kv.shape} pages fit into vector memory")


def _vectors(c: Blocks, q: Any, kv: Any, several: bool) -> dict[str, Any]:
    """Scratch in vector memory."""
    T, K, G, H = q.shape
    S = kv.shape[4]
    rows, keys, group = c.tokens * G, c.pages * S, min(32, S)
    new = (2 * S + min(T, S), 2 * K, H) if several else (2, c.streams, 1, 2 * K, H)
    units = 4 if several else c.streams * K
    shapes: dict[str, tuple] = {
        "kv_buf": ((2, c.streams, c.pages, K, 2, S, H), kv.dtype),
        "q_buf": ((2, c.streams, c.tokens + c.sub, K, G, H), q.dtype),
        "o_buf": ((c.streams, c.tokens, K, G, H), q.dtype),
        "zeros": ((min(c.tokens, 16), K, G, H), q.dtype),
        "acc": ((c.streams, K, rows, H), jnp.float32),
        "m": ((c.streams, K, rows, LANES), jnp.float32),
        "l": ((c.streams, K, rows, LANES), jnp.float32),
        "new_buf": (new, jnp.float32),
        "out_buf": ((K, 2, S, H) if several else (c.streams, K, 2, group, H), kv.dtype),
    }
    for i in range(units):
        shapes[f"scores{i}"] = (c.sub * G, keys), jnp.float32
        shapes[f"max{i}"] = shapes[f"decay{i}"] = (c.sub * G, LANES), jnp.float32
    return {name: jax.ShapeDtypeStruct(*x) for name, x in shapes.items()}


def _bytes(x: Any) -> int:
    """With what is lost to whole tiles."""
    tile = 8 * 4 // x.dtype.itemsize
    *outer, rows, lanes = x.shape
    return math.prod(outer) * -(-rows // tile) * tile * -(-lanes // LANES) * LANES * x.dtype.itemsize


def _launch(
    q: jax.Array,
    new: jax.Array,
    kv: jax.Array,
    o: jax.Array | None,
    layer: jax.Array,
    rows: Ragged,
    *,
    several: bool,
) -> tuple[jax.Array, jax.Array]:
    """Attention of sequences of several tokens, or of one. q and o [T, K, G, H], new [T, 2K, H]; o is filled in."""
    T, H, S = q.shape[0], q.shape[3], kv.shape[4]
    c = blocks(q, kv, rows.pages_BP.shape[1], several)
    if rows.pages_BP.size * 4 > SMEM:
        B, most = rows.pages_BP.shape
        raise ValueError(
            f"a page table of {B} x {most} takes {B * most * 4} bytes of scalar memory, at most {SMEM} fit"
        )
    keys = c.pages * S
    scratch = {name: pltpu.VMEM(x.shape, x.dtype) for name, x in _vectors(c, q, kv, several).items()} | {
        "pending": pltpu.SMEM((c.streams,), jnp.int32),
        "skipped": pltpu.SMEM((1,), jnp.int32),
        "kv_sem": pltpu.SemaphoreType.DMA((2, c.streams)),
        "q_sem": pltpu.SemaphoreType.DMA((2, c.streams)),
        "o_sem": pltpu.SemaphoreType.DMA((c.streams,)),
        "z_sem": pltpu.SemaphoreType.DMA,
    }
    smem, any_ = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)
    scalars = [jnp.reshape(layer, 1).astype(jnp.int32), rows.q_start_B, rows.kv_len_B, rows.pages_BP.reshape(-1)]
    arrays = [q, new, kv, *([] if o is None else [o])]
    run = functools.partial(
        kernel, c=c, T=T, B=len(rows.kv_len_B), several=several, one_token=rows.one_token, names=tuple(scratch),
        scale=H**-0.5, given=o is not None,
    )  # fmt: skip
    return pl.pallas_call(
        run,
        out_shape=(jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(kv.shape, kv.dtype)),
        in_specs=[smem] * 4 + [any_] * len(arrays),
        out_specs=(any_, any_),
        scratch_shapes=list(scratch.values()),
        input_output_aliases={6: 1} | ({} if o is None else {7: 0}),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM, has_side_effects=True),
        name=f"paged_attention_{'several' if several else 'one'}_{c.tokens}x{c.streams}x{keys}",
    )(*scalars, *arrays)
