# SPDX-License-Identifier: Apache-2.0
"""Paged attention in plain jnp: online softmax over pages, with work in proportion to the tokens that are there.

One-token sequences go page by page, all at once; longer ones in tiles of TILE queries.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwen_spmd.mesh.vary import vary_like
from qwen_spmd.pallas.pieces import cut
from qwen_spmd.state import Ragged

TILE = 64
MASKED = -1e30  # finite: a page that is masked as a whole must not give inf - inf


def paged_attention(
    q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, kv: jax.Array, layer: jax.Array, rows: Ragged
) -> tuple[jax.Array, jax.Array]:
    kv_TK2H = jnp.stack([k_TKH, v_TKH], axis=2)
    if kv.dtype.itemsize == 1:  # eight bits saturate
        limit = jnp.finfo(kv.dtype).max.astype(jnp.float32)
        kv_TK2H = jnp.clip(kv_TK2H.astype(jnp.float32), -limit, limit)
    kv_TK2H = kv_TK2H.astype(kv.dtype)
    # Heads are indices, too: as a slice between indices they make XLA's TPU compiler lay out the pool anew, a copy.
    head, which = jnp.arange(kv.shape[2])[:, None], jnp.arange(2)
    kv = kv.at[layer, rows.page_T[:, None, None], head, which, rows.slot_T[:, None, None]].set(kv_TK2H)
    if rows.one_token:
        return _decode(q_TNH, kv, layer, rows.pages_BP, rows.kv_len_B).astype(q_TNH.dtype), kv
    single_B = rows.q_len_B == 1
    kv_len_B = jnp.where(single_B, rows.kv_len_B, 0)
    o_BNH = _decode(q_TNH[rows.q_start_B[:-1]], kv, layer, rows.pages_BP, kv_len_B)
    o_TNH = jnp.where((single_B[rows.seq_T] & rows.valid_T)[:, None, None], o_BNH[rows.seq_T], 0)
    return _prefill(q_TNH, o_TNH, kv, layer, rows).astype(q_TNH.dtype), kv


def _accumulate(carry: tuple, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> tuple:
    """One page of online softmax: q [.., M, H], k and v [.., S, H], mask [.., M, S]; carry max, sum, output."""
    m, s, o = carry
    scores = jnp.einsum("...mh,...sh->...ms", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(mask, scores, MASKED)
    m_new = jnp.maximum(m, scores.max(-1))
    p = jnp.where(mask, jnp.exp(scores - m_new[..., None]), 0.0)
    # Zero times NaN is NaN: what unwritten places of a page hold must not reach the product.
    v = jnp.where(mask.any(-2)[..., None], v, 0)
    decay = jnp.exp(m - m_new)
    pv = jnp.einsum("...ms,...sh->...mh", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return m_new, s * decay + p.sum(-1), o * decay[..., None] + pv


def _decode(q_BNH: jax.Array, kv: jax.Array, layer: jax.Array, pages_BP: jax.Array, kv_len_B: jax.Array) -> jax.Array:
    """One query for each sequence, at its last position. float32 [B, N, H], zeros where kv_len is 0."""
    B, N, H = q_BNH.shape
    K, S = kv.shape[2], kv.shape[4]
    q = q_BNH.reshape(B, K, N // K, H)

    def page(p: jax.Array, carry: tuple) -> tuple:
        kv_BK2SH = kv[layer, pages_BP[:, p]].astype(q.dtype)
        mask = (p * S + jnp.arange(S)) < kv_len_B[:, None]
        mask = jnp.broadcast_to(mask[:, None, None], (B, K, N // K, S))
        return _accumulate(carry, q, kv_BK2SH[:, :, 0], kv_BK2SH[:, :, 1], mask)

    shape = (B, K, N // K)
    zero = vary_like((jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, H))), q, kv)
    _, s, o = jax.lax.fori_loop(0, (kv_len_B.max() + S - 1) // S, page, zero)
    return (o / jnp.where(s == 0, 1, s)[..., None]).reshape(B, N, H)


def _prefill(q_TNH: jax.Array, o_TNH: jax.Array, kv: jax.Array, layer: jax.Array, rows: Ragged) -> jax.Array:
    """Fill in the rows of sequences with several tokens."""
    T, N, H = q_TNH.shape
    K, S = kv.shape[2], kv.shape[4]
    tiles = cut(rows.q_start_B[:-1], jnp.where(rows.q_len_B > 1, rows.q_len_B, 0), TILE)
    heads = jnp.arange(K)  # indices, as where pages are written
    pad = ((0, TILE), (0, 0), (0, 0))  # a tile at the end may reach past T
    q_TNH = jnp.pad(q_TNH, pad)

    def tile(i: jax.Array, o_TNH: jax.Array) -> jax.Array:
        seq, _, start, length = tiles[i]
        q = jax.lax.dynamic_slice_in_dim(q_TNH, start, TILE)
        q = q.reshape(TILE, K, N // K, H).transpose(1, 2, 0, 3).reshape(K, -1, H)
        first = rows.kv_len_B[seq] - rows.q_start_B[seq + 1] + start
        pos = first + jnp.arange(TILE)
        live = jnp.arange(TILE) < length

        def one_page(p: jax.Array, carry: tuple) -> tuple:
            page = rows.pages_BP[seq, p]
            mask = (p * S + jnp.arange(S) <= pos[:, None]) & live[:, None]
            mask = jnp.broadcast_to(mask, (K, N // K, TILE, S)).reshape(K, -1, S)
            k, v = (kv[layer, page, heads, i].astype(q.dtype) for i in (0, 1))
            return _accumulate(carry, q, k, v, mask)

        M = N // K * TILE
        zero = vary_like((jnp.full((K, M), MASKED), jnp.zeros((K, M)), jnp.zeros((K, M, H))), q, kv)
        _, s, o = jax.lax.fori_loop(0, (first + length + S - 1) // S, one_page, zero)
        o = (o / jnp.where(s == 0, 1, s)[..., None]).reshape(K, N // K, TILE, H)
        o = o.transpose(2, 0, 1, 3).reshape(TILE, N, H)
        old = jax.lax.dynamic_slice_in_dim(o_TNH, start, TILE)
        return jax.lax.dynamic_update_slice_in_dim(o_TNH, jnp.where(live[:, None, None], o, old), start, 0)

    return jax.lax.fori_loop(0, tiles.count, tile, jnp.pad(o_TNH, pad))[:T]
