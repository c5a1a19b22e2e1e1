# SPDX-License-Identifier: Apache-2.0
"""Named cases of the Gated DeltaNet core, for the parity test and the benchmark: Qwen's shapes and ugly ones.

Everything that the contract says has no influence is NaN: slots of nobody, those of fresh sequences, slots that are
only written, the null slot, padding rows.
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
from qwen_spmd.pallas.gated_delta import gated_delta
from qwen_spmd.state import Batch


@dataclasses.dataclass(frozen=True)
class Case:
    """`seqs` are (q_len, kv_len) of the sequences, kv_len with the step's tokens; fresh where they are equal.

    forks         sequences that read one snapshot slot and write another, their own
    extreme       decays of 0 and -500, write strengths of 0 and 1, rows of zeros
    full          too big for a CPU test
    """

    name: str
    seqs: tuple[tuple[int, int], ...]
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 32
    rows: int = 208
    batch: int = 8
    forks: tuple[int, ...] = ()
    extreme: bool = False
    dtype: str = "float32"
    rec_dtype: str = "float32"
    one_token: bool = False
    full: bool = False
    notes: str = ""


@struct.dataclass
class Inputs:
    """Arguments of the op, with the batch in the place of its Ragged."""

    qkv_TC: jax.Array
    b_TU: jax.Array
    a_TU: jax.Array
    conv_w_WC: jax.Array
    a_log_U: jax.Array
    dt_bias_U: jax.Array
    conv: jax.Array
    rec: jax.Array
    layer: jax.Array
    batch: Batch
    one_token: bool = struct.field(pytree_node=False)


def run(x: Inputs, impl: Impl) -> tuple[jax.Array, jax.Array, jax.Array]:
    rows = state.ragged(x.batch, page_size=1 << 30, one_token=x.one_token)  # one page: there is no KV here
    weights = x.conv_w_WC, x.a_log_U, x.dt_bias_U
    return gated_delta(x.qkv_TC, x.b_TU, x.a_TU, *weights, x.conv, x.rec, x.layer, rows, impl=impl)


def inputs(case: Case, seed: int = 0) -> Inputs:
    """numpy arrays; activations of unit size, decay rates as Qwen initialises them."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(case.dtype)
    J, U, Y, Z, W = case.key_heads, case.value_heads, case.key_dim, case.value_dim, 4
    B, T, C = case.batch, case.batch if case.one_token else case.rows, 2 * J * Y + U * Z
    layers, layer = 2, 1

    def normal(*shape: int, dtype: Any = np.float32) -> Any:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    q_len, kv_len = np.array([*case.seqs, *[(0, 0)] * (B - len(case.seqs))], np.int32).T
    slots = B + 4  # null, the snapshot and two of nobody
    own, snapshot = np.split(rng.permutation(np.arange(1, B + 2, dtype=np.int32)), [B])
    write_slot_B = np.where(np.arange(B) < len(case.seqs), own, 0)
    read_slot_B = np.where(np.isin(np.arange(B), case.forks), snapshot, write_slot_B)
    fresh_B = (q_len == kv_len) & (kv_len > 0)
    assert not set(write_slot_B[q_len > 0]) & set(read_slot_B[read_slot_B != write_slot_B])
    conv: Any = np.full((layers, slots, W - 1, C), np.nan, dtype)
    rec: Any = np.full((layers, slots, U, Y, Z), np.nan, jnp.dtype(case.rec_dtype))
    for slot in set(read_slot_B[kv_len > q_len]):
        conv[layer, slot] = normal(W - 1, C, dtype=dtype)
        rec[layer, slot] = 0.3 * normal(U, Y, Z)
    qkv, b, a = normal(T, C, dtype=dtype), normal(T, U), normal(T, U)
    if case.extreme:
        a[:], b[:] = rng.choice([-30, 0, 30], (2, T, U))
        qkv[::5] = 0
    valid_T = kv_len > 0 if case.one_token else np.arange(T) < q_len.sum()
    for rows in (qkv, b, a):
        rows[~valid_T] = np.nan
    batch: dict[str, Any] = {
        "tokens_T": np.zeros(T, np.int32),
        "q_start_B": np.cumsum([0, *q_len], dtype=np.int32),
        "kv_len_B": kv_len,
        "pages_BP": np.zeros((B, 1), np.int32),
        "read_slot_B": read_slot_B,
        "write_slot_B": write_slot_B,
        "fresh_B": fresh_B,
        "emit_B": np.zeros(B, np.bool_),
        "sampling": None,
    }
    weights: dict[str, Any] = {
        "conv_w_WC": 0.5 * normal(W, C),
        "a_log_U": np.log(rng.uniform(1, 16, U)).astype(np.float32),
        "dt_bias_U": np.log(np.expm1(rng.uniform(1e-3, 1e-1, U))).astype(np.float32),
    }
    weights["conv_w_WC"] = weights["conv_w_WC"].astype(dtype)
    x: dict[str, Any] = {"layer": np.int32(layer), "batch": Batch(**batch), "one_token": case.one_token}
    return Inputs(qkv_TC=qkv, b_TU=b, a_TU=a, conv=conv, rec=rec, **weights, **x)


# Programs are compiled for shapes: small cases share the default ones.
_LENGTHS = (1, 2, 3, 4, 5, 31, 63, 64, 65, 66, 127, 128, 129, 191, 192, 193, 194)
_MIXED = ((1, 33), (1, 1), (1, 2), (70, 70), (50, 130), (3, 19), (2, 2))
_BUCKET_OF_8 = ((0, 0), (1, 5), (0, 0), (1, 1), (1, 2), (0, 0), (1, 17), (1, 1))
_397B: dict[str, Any] = {"key_heads": 16, "value_heads": 64, "key_dim": 128, "value_dim": 128}
_FULL: dict[str, Any] = {**_397B, "dtype": "bfloat16", "full": True}

CASES = (
    *(Case(f"{n} tokens", ((n, n),)) for n in _LENGTHS),
    *(Case(f"{n} tokens after a prefix", ((n, n + 3),)) for n in (1, 2, 3, 4, 64, 65, 194)),
    Case("chunk edges", ((63, 63), (64, 64), (65, 66))),
    Case("decode rows", ((1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 100), (1, 1), (1, 9))),
    Case("mixed", _MIXED),
    Case("mixed, bfloat16", _MIXED, dtype="bfloat16"),
    Case("mixed, bfloat16 state", _MIXED, dtype="bfloat16", rec_dtype="bfloat16"),
    Case("chunks before decode rows", ((70, 70), (1, 40), (60, 61), (1, 1)), notes="speculation mixes orders"),
    Case("empty in the middle", ((0, 0), (1, 5), (0, 20), (7, 7), (0, 0), (1, 6), (0, 0), (40, 50)), forks=(2,)),
    Case("no padding", ((1, 8), (1, 1), (2, 9), (66, 67), (64, 64), (34, 34), (20, 40), (20, 20))),
    Case("only padding", ()),
    Case("a batch of 3", ((70, 70), (1, 9), (5, 8)), rows=80, batch=3),
    Case("extreme gates", ((1, 2), (1, 1), (130, 130), (60, 70)), extreme=True),
    Case("fork of a snapshot", ((1, 9), (5, 12), (3, 3)), forks=(0,)),
    Case("forks of one snapshot", ((1, 9), (130, 150), (2, 10), (1, 9), (3, 3)), forks=(0, 1, 2, 3)),
    *(
        Case(f"bucket of 8, {live} live", _BUCKET_OF_8[:n], one_token=True)
        for live, n in ((1, 2), (2, 4), (3, 5), (5, 8))
    ),
    Case("bucket of 8, none live", (), one_token=True),
    Case("bucket of 8, forks", _BUCKET_OF_8, forks=(1, 6), one_token=True),
    Case("bucket of 8, extreme gates", _BUCKET_OF_8, extreme=True, one_token=True),
    Case("bucket of 8, bfloat16", _BUCKET_OF_8, dtype="bfloat16", one_token=True),
    Case("bucket of 8, bfloat16 state", _BUCKET_OF_8, dtype="bfloat16", rec_dtype="bfloat16", one_token=True),
    Case("Qwen3.5 16/64 heads", _MIXED, key_heads=4, value_heads=16, key_dim=16, value_dim=16, notes="397B, 122B"),
    Case("Qwen3.5 16/48 heads", _MIXED, key_heads=2, value_heads=6, key_dim=16, value_dim=16, notes="27B"),
    Case("Qwen3.5 16/16 heads", _MIXED, key_heads=2, value_heads=2, key_dim=16, value_dim=16, notes="2B, 0.8B"),
    Case("heads of 128", ((1, 3), (70, 70)), key_heads=1, value_heads=1, key_dim=128, value_dim=128, rows=72, batch=2),
    Case("Qwen3.5 decode, 1", ((1, 9),), batch=8, one_token=True, **_FULL),
    Case("Qwen3.5 decode, 64", ((1, 9),) * 64, batch=64, one_token=True, **_FULL),
    Case("Qwen3.5 decode, 64, bfloat16 state", ((1, 9),) * 64, batch=64, one_token=True, rec_dtype="bfloat16", **_FULL),
    Case("Qwen3.5 prefill", ((2048, 2048), (2048, 4096)), rows=4096, **_FULL),
    Case("Qwen3.5 short prefills", ((64, 64),) * 16, rows=1024, batch=16, **_FULL),
    Case("Qwen3.5 mixed", ((1, 9),) * 60 + ((960, 8192),), rows=1024, batch=64, **_FULL),
    Case("Qwen3.5 verify 4", ((4, 100),) * 32, rows=128, batch=32, notes="speculation", **_FULL),
)
