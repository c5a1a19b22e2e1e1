# SPDX-License-Identifier: Apache-2.0
"""Named cases of paged attention, for the parity test and the benchmark: Qwen's shapes and ugly ones.

Everything that the contract says has no influence is NaN: unwritten places of pages, pages of nobody, the null page,
padding rows; and unused places of the page table name other pages.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from qwen_spmd import state
from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.paged_attention import paged_attention
from qwen_spmd.state import Batch


@dataclasses.dataclass(frozen=True)
class Case:
    """`seqs` are (q_len, kv_len) of the sequences, kv_len with the step's tokens.

    pages     in the pool; None: as many as there are tokens for
    kv_dtype  of the pages; None: dtype, which is that of the rows
    full      too big for a CPU test
    """

    name: str
    seqs: tuple[tuple[int, int], ...]
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    page_size: int = 16
    rows: int = 160
    batch: int = 8
    pages_per_seq: int = 16
    pages: int | None = 64
    dtype: str = "float32"
    kv_dtype: str | None = None
    one_token: bool = False
    full: bool = False
    notes: str = ""


@struct.dataclass
class Inputs:
    """Arguments of the op, with the batch in the place of its Ragged."""

    q_TNH: jax.Array
    k_TKH: jax.Array
    v_TKH: jax.Array
    kv: jax.Array
    layer: jax.Array
    batch: Batch
    page_size: int = struct.field(pytree_node=False)
    one_token: bool = struct.field(pytree_node=False)


def run(x: Inputs, impl: Impl) -> tuple[jax.Array, jax.Array]:
    rows = state.ragged(x.batch, x.page_size, one_token=x.one_token)
    return paged_attention(x.q_TNH, x.k_TKH, x.v_TKH, x.kv, x.layer, rows, impl=impl)


def inputs(case: Case, seed: int = 0) -> Inputs:
    """numpy arrays; keys and values as norm, rope and projection leave them, of unit size."""
    rng, dtype, kv_dtype = np.random.default_rng(seed), jnp.dtype(case.dtype), jnp.dtype(case.kv_dtype or case.dtype)
    S, B, T = case.page_size, case.batch, case.batch if case.one_token else case.rows
    layers, layer = 2, 1

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    q_len, kv_len = np.array([*case.seqs, *[(0, 0)] * (B - len(case.seqs))], np.int32).T
    need_B = -(-kv_len // S)
    pages = case.pages or int(need_B.sum()) + 4  # with the null page and three of nobody
    free = iter(rng.permutation(np.arange(1, pages, dtype=np.int32)))
    kv: Any = np.full((layers, pages, case.kv_heads, 2, S, case.head_dim), np.nan, kv_dtype)
    pages_BP = rng.integers(1, pages, (B, case.pages_per_seq), np.int32)
    for b, need in enumerate(need_B):
        for p in range(need):
            pages_BP[b, p] = page = next(free)
            n = np.clip(kv_len[b] - q_len[b] - p * S, 0, S)
            kv[layer, page, :, :, :n] = normal(case.kv_heads, 2, n, case.head_dim).astype(kv_dtype)
    q, k, v = (normal(T, n, case.head_dim) for n in (case.heads, case.kv_heads, case.kv_heads))
    if kv_dtype.itemsize == 1:  # too large for a page, but of no weight in the scores
        q[..., 0], k[..., 0] = 0, 1000 * np.sign(k[..., 0])
    valid_T = kv_len > 0 if case.one_token else np.arange(T) < q_len.sum()
    for rows in (q, k, v):
        rows[~valid_T] = np.nan
    unused = np.zeros(B, np.int32)
    batch: dict[str, Any] = {
        "tokens_T": np.zeros(T, np.int32),
        "q_start_B": np.cumsum([0, *q_len], dtype=np.int32),
        "kv_len_B": kv_len,
        "pages_BP": pages_BP,
        "read_slot_B": unused,
        "write_slot_B": unused,
        "fresh_B": unused > 0,
        "emit_B": unused > 0,
        "sampling": None,
    }
    x: dict[str, Any] = {"layer": np.int32(layer), "batch": Batch(**batch), "page_size": S, "one_token": case.one_token}
    return Inputs(q_TNH=q, k_TKH=k, v_TKH=v, kv=kv, **x)


# Programs are compiled for shapes: small cases share the default ones.
_MIXED = ((1, 33), (1, 1), (1, 256), (70, 70), (50, 130), (3, 19))
_BUCKET_OF_8 = ((0, 0), (1, 5), (0, 0), (1, 256), (1, 16), (0, 0), (1, 17), (1, 1))
_LONG: dict[str, Any] = {
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "page_size": 256,
    "batch": 2,
    "pages_per_seq": 132,
    "pages": None,
}
_FULL: dict[str, Any] = {"page_size": 256, "pages": None, "dtype": "bfloat16", "full": True}
_QWEN3_5: dict[str, Any] = {"heads": 32, "kv_heads": 2, "head_dim": 256, **_FULL}
_QWEN3: dict[str, Any] = {"heads": 64, "kv_heads": 4, "head_dim": 128, **_FULL}

CASES = (
    Case("one token", ((1, 1),)),
    Case("decode rows", ((1, 1), (1, 16), (1, 17), (1, 32), (1, 100), (1, 255), (1, 256), (1, 2))),
    Case("one page, full page, last partial", ((2, 2), (15, 15), (16, 16), (17, 17), (32, 32), (33, 33), (31, 31))),
    Case("chunks end at page edges", ((16, 32), (1, 33), (15, 47), (17, 48), (64, 64))),
    Case("mixed", _MIXED),
    Case("mixed, bfloat16", _MIXED, dtype="bfloat16"),
    Case("longer than a tile", ((130, 130),)),
    Case("tile edges with context", ((64, 200), (65, 256))),
    Case("chunks before decode rows", ((70, 70), (1, 40), (60, 61), (1, 1)), notes="speculation mixes orders"),
    Case("empty in the middle", ((0, 0), (1, 5), (0, 20), (7, 7), (0, 0), (1, 6), (0, 0), (40, 50))),
    Case("no padding", ((1, 8), (1, 9), (20, 20), (20, 36), (20, 37), (20, 80), (30, 90), (48, 256))),
    Case("only padding", ()),
    Case("a batch of 3", ((70, 70), (1, 9), (5, 8)), rows=80, batch=3),
    Case("a batch of 3, one token", ((1, 9), (1, 256), (0, 0)), batch=3, one_token=True),
    *(
        Case(f"bucket of 8, {live} live", _BUCKET_OF_8[:n], one_token=True)
        for live, n in ((1, 2), (2, 4), (3, 5), (5, 8))
    ),
    Case("bucket of 8, 5 live, bfloat16", _BUCKET_OF_8, one_token=True, dtype="bfloat16"),
    Case("bucket of 8, none live", (), one_token=True),
    Case("beyond 32k", ((1, 33000), (70, 32838)), rows=80, **_LONG),
    Case("beyond 32k, one token", ((1, 33000), (1, 32769)), one_token=True, **_LONG),
    Case("Qwen3.5 32/2 heads", _MIXED, heads=32, kv_heads=2, notes="397B, 122B with heads of 256"),
    Case("Qwen3 64/4 heads", ((1, 9), (20, 40)), heads=64, kv_heads=4, head_dim=16, rows=24, batch=2, notes="235B"),
    Case("Qwen3.5 24/4 heads", ((1, 9), (20, 40)), heads=24, kv_heads=4, rows=24, batch=2, notes="27B"),
    Case("8-bit pages, mixed", _MIXED, kv_dtype="float8_e4m3fn"),
    Case("8-bit pages, one token", _BUCKET_OF_8, one_token=True, kv_dtype="float8_e4m3fn"),
    Case("8-bit pages, mixed, bfloat16", _MIXED, dtype="bfloat16", kv_dtype="float8_e4m3fn"),
    Case("8-bit pages, one token, bfloat16", _BUCKET_OF_8, one_token=True, dtype="bfloat16", kv_dtype="float8_e4m3fn"),
    Case("one head", ((1, 9), (20, 40)), heads=1, kv_heads=1, rows=24, batch=2, notes="a shard of 0.6B over tp=16"),
    Case("Qwen3.5 decode", ((1, 4096),) * 64, batch=64, pages_per_seq=16, one_token=True, **_QWEN3_5),
    Case("Qwen3.5 long decode", ((1, 131072),) * 4, batch=4, pages_per_seq=512, one_token=True, **_QWEN3_5),
    Case("Qwen3.5 prefill", ((2048, 2048), (2048, 16384)), rows=4096, batch=8, pages_per_seq=64, **_QWEN3_5),
    Case("Qwen3.5 mixed", ((1, 4096),) * 60 + ((960, 8192),), rows=1024, batch=64, pages_per_seq=32, **_QWEN3_5),
    Case("Qwen3 decode", ((1, 4096),) * 64, batch=64, pages_per_seq=16, one_token=True, **_QWEN3),
    Case("Qwen3 prefill", ((2048, 2048), (2048, 16384)), rows=4096, batch=8, pages_per_seq=64, **_QWEN3),
    Case(
        "Qwen3.5 decode, 8-bit pages",
        ((1, 8192),) * 64,
        batch=64,
        pages_per_seq=32,
        one_token=True,
        kv_dtype="float8_e4m3fn",
        **_QWEN3_5,
    ),
    Case(
        "Qwen3.5 prefill, 8-bit pages",
        ((8192, 8192),),
        rows=8192,
        batch=8,
        pages_per_seq=32,
        kv_dtype="float8_e4m3fn",
        **_QWEN3_5,
    ),
    Case("Qwen3 mixed", ((1, 4096),) * 60 + ((960, 8192),), rows=1024, batch=64, pages_per_seq=32, **_QWEN3),
)
