# SPDX-License-Identifier: Apache-2.0
"""ModelState, what a model remembers between steps, and Batch, one step's inputs.

Both are pytrees of arrays. The state lives on the device, is donated to every step and updated in place; who owns
which page and slot is decided on the host (`serve/blocks.py`). Not here: allocation, padding, sampling rules.

Page 0 and slot 0 are null: padding reads and writes there, and nobody reads what it left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from qwen_spmd.config import ModelConfig
from qwen_spmd.limits import FROM_SLOT as FROM_SLOT
from qwen_spmd.limits import MAX_STOP_IDS as MAX_STOP_IDS
from qwen_spmd.mesh.rules import SINGLE, Layout
from qwen_spmd.params import dims


@struct.dataclass
class ModelState:
    """KV pages and recurrent slots of all layers of a kind, stacked over L in layer order.

    kv       [L, P, K, 2, S, H] model dtype; [.., 0, ..] keys after norm and rope, [.., 1, ..] values
    conv     [L, R, W-1, C]     model dtype; the last W-1 inputs of the causal convolution, oldest first
    rec      [L, R, U, Y, Z]    float32 or bfloat16; the recurrent matrices
    token    [R]                int32; the token last sampled in each slot
    stopped  [R]                bool; its sequence has sampled a stop token or reached its length limit
    load     [I, L, Q]          int32, wraps; rows that each place for experts has computed since the start, by the
                                independent groups of `dp`

    None: the model has no layer of that kind. P and R count the pages and slots of all ranks, each of which numbers its
    own from 0 and has a null one. K is at least one for each rank of `tp`.
    """

    kv: jax.Array = dims("LPK2SH")
    conv: jax.Array | None = dims("LRWC")
    rec: jax.Array | None = dims("LRUYZ")
    token: jax.Array = dims("R", dtype=jnp.int32)
    stopped: jax.Array = dims("R", dtype=jnp.bool_)
    load: jax.Array | None = dims("ILQ", dtype=jnp.int32)


@struct.dataclass
class Sampling:
    """How each of B sequences picks its next token. All combine in the order that `layers/sample.py` gives.

    temperature_B  float32, 0 is greedy      top_k_B     int32, 0 is off
    top_p_B        float32, 1 is off         min_p_B     float32, 0 is off
    seed_B         uint32; with the position, the only source of randomness
    stop_ids_B     int32 [B, MAX_STOP_IDS], unused places -1
    min_len_B      int32; stop ids cannot be sampled while the sequence is shorter (prompt + min_tokens)
    max_len_B      int32; the sequence ends when it is this long (prompt + max_tokens)
    """

    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array
    min_p_B: jax.Array
    seed_B: jax.Array
    stop_ids_B: jax.Array
    min_len_B: jax.Array
    max_len_B: jax.Array


@struct.dataclass
class Batch:
    """One step: T tokens of B sequences, flat and ragged, one-token (decode) sequences first. int32, except as noted.

    tokens_T      ids, or FROM_SLOT; after the last sequence's tokens, padding (any id)
    q_start_B     [B+1]; sequence b's tokens are rows q_start[b] to q_start[b+1]; padding sequences are empty
    kv_len_B      context length after this step: tokens before it plus the sequence's tokens in it
    pages_BP      the sequence's pages in order; unused places 0
    read_slot_B   where its recurrent state is read
    write_slot_B  where it is written; equal for plain decode
    fresh_B       bool; it has no state yet: start from zeros, whatever the slot holds
    emit_B        bool; its last token here is the last that is known: sample the next. False within a chunked prefill
    """

    tokens_T: jax.Array
    q_start_B: jax.Array
    kv_len_B: jax.Array
    pages_BP: jax.Array
    read_slot_B: jax.Array
    write_slot_B: jax.Array
    fresh_B: jax.Array
    emit_B: jax.Array
    sampling: Sampling


@struct.dataclass
class Ragged:
    """What every layer needs to know about the rows of a Batch, computed once a step.

    seq_T, pos_T    each row's sequence and position in it; valid_T is False for padding
    page_T, slot_T  where its key and value are written: page 0 for padding
    q_start_B, kv_len_B, pages_BP, read_slot_B, write_slot_B, fresh_B  as in Batch
    one_token       static; sequence b is row b or empty, as in a decode window
    """

    seq_T: jax.Array
    pos_T: jax.Array
    valid_T: jax.Array
    page_T: jax.Array
    slot_T: jax.Array
    q_start_B: jax.Array
    kv_len_B: jax.Array
    pages_BP: jax.Array
    read_slot_B: jax.Array
    write_slot_B: jax.Array
    fresh_B: jax.Array
    one_token: bool = struct.field(pytree_node=False)

    @property
    def q_len_B(self) -> jax.Array:
        if self.one_token:
            return self.valid_T.astype(jnp.int32)
        return self.q_start_B[1:] - self.q_start_B[:-1]


def ragged(batch: Batch, page_size: int, *, one_token: bool = False) -> Ragged:
    """Derive the per-row indices of a batch. With `one_token`, T = B and a sequence with kv_len 0 is empty."""
    T, B = batch.tokens_T.shape[0], batch.kv_len_B.shape[0]
    row_T = jnp.arange(T, dtype=jnp.int32)
    if one_token:
        q_start_B, seq_T, valid_T = jnp.arange(B + 1, dtype=jnp.int32), row_T, batch.kv_len_B > 0
    else:
        q_start_B, valid_T = batch.q_start_B, row_T < batch.q_start_B[-1]
        seq_T = jnp.searchsorted(q_start_B[1:], row_T, side="right").astype(jnp.int32)
        seq_T = jnp.where(valid_T, seq_T, B - 1)
    pos_T = jnp.where(valid_T, batch.kv_len_B[seq_T] - q_start_B[seq_T + 1] + row_T, 0)
    return Ragged(
        seq_T=seq_T,
        pos_T=pos_T,
        valid_T=valid_T,
        page_T=jnp.where(valid_T, batch.pages_BP[seq_T, pos_T // page_size], 0),
        slot_T=pos_T % page_size,
        q_start_B=q_start_B,
        kv_len_B=batch.kv_len_B,
        pages_BP=batch.pages_BP,
        read_slot_B=batch.read_slot_B,
        write_slot_B=batch.write_slot_B,
        fresh_B=batch.fresh_B,
        one_token=one_token,
    )


KINDS = {"kv": "attention", "conv": "gated_delta", "rec": "gated_delta", "load": "moe"}
"""Which layers each array is of."""


def declare(
    cfg: ModelConfig,
    dtype: Any,
    *,
    pages: int,
    page_size: int,
    slots: int,
    rec_dtype: Any = jnp.float32,
    layout: Layout = SINGLE,
) -> ModelState:
    """ModelState as `jax.ShapeDtypeStruct`s, for `pages` KV pages of `page_size` tokens and `slots` sequences a rank.

    Both counts include the null page and slot.
    """
    sizes = cfg.dims()
    sizes |= {"P": pages * layout.ranks, "S": page_size, "R": slots * layout.ranks, "2": 2, "I": layout.dp}
    sizes |= {"K": layout.kv_heads or sizes["K"], "Q": layout.places or sizes.get("E", 0), "W": sizes.get("W", 1) - 1}

    def array(name: str, letters: str, own: Any) -> jax.ShapeDtypeStruct:
        here = sizes | {"L": cfg.count(KINDS[name]) if name in KINDS else 0}  # type: ignore[arg-type]
        return jax.ShapeDtypeStruct(tuple(here[c] for c in letters), jnp.dtype(own or dtype))

    return _each(cfg, lambda name, m: array(name, m["dims"], rec_dtype if name == "rec" else m["dtype"]))


def specs(cfg: ModelConfig, layout: Layout) -> ModelState:
    """ModelState of `PartitionSpec`s."""
    return _each(cfg, lambda _, m: layout.state_spec(m["dims"]))


def _each(cfg: ModelConfig, make: Callable[[str, Any], Any]) -> ModelState:
    fields = dataclasses.fields(ModelState)  # type: ignore[arg-type]
    here = (f for f in fields if f.name not in KINDS or cfg.count(KINDS[f.name]))  # type: ignore[arg-type]
    return ModelState(**dict.fromkeys(KINDS) | {f.name: make(f.name, f.metadata) for f in here})  # type: ignore[arg-type]
