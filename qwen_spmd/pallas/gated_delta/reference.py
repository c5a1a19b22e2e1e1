# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet in plain jnp: recurrent for one-token sequences, chunked (WY form) for longer ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwen_spmd.mesh.vary import vary_like
from qwen_spmd.pallas.pieces import cut
from qwen_spmd.state import Ragged

CHUNK = 64
HIGHEST = jax.lax.Precision.HIGHEST  # reduced precision in the chunk solve is the classic source of drift


def gated_delta(
    qkv_TC: jax.Array,
    b_TU: jax.Array,
    a_TU: jax.Array,
    conv_w_WC: jax.Array,
    a_log_U: jax.Array,
    dt_bias_U: jax.Array,
    conv: jax.Array,
    rec: jax.Array,
    layer: jax.Array,
    rows: Ragged,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    u_TC, conv = _causal_conv(qkv_TC, conv_w_WC, conv, layer, rows)
    q, k, v = split_heads(u_TC, *rec.shape[2:])
    g, beta = gates(b_TU, a_TU, a_log_U, dt_bias_U)
    # Without it XLA's CPU compiler may fuse what leads here into every use and compute it many times over.
    q, k, v, g, beta = jax.lax.optimization_barrier((q, k, v, g, beta))
    o_TUZ, rec = _recurrent(q, k, v, g, beta, rec, layer, rows)
    if not rows.one_token:
        o_TUZ, rec = _chunked(q, k, v, g, beta, o_TUZ, rec, layer, rows)
    return o_TUZ.astype(qkv_TC.dtype), conv, rec


def split_heads(u: jax.Array, U: int, Y: int, Z: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Channels [.., C] -> normalised and scaled q, normalised k (both [.., J, Y]) and v [.., U, Z], float32."""
    u = u.astype(jnp.float32)
    J = (u.shape[-1] - U * Z) // (2 * Y)
    u = u.reshape(*u.shape[:-1], J, -1)
    v = u[..., 2 * Y :].reshape(*u.shape[:-2], U, Z)
    l2 = lambda x: x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)  # noqa: E731
    return l2(u[..., :Y]) * Y**-0.5, l2(u[..., Y : 2 * Y]), v


def gates(b: jax.Array, a: jax.Array, a_log_U: jax.Array, dt_bias_U: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(g, beta): log decay (at most 0) and write strength, float32."""
    g = -jnp.exp(a_log_U) * jax.nn.softplus(a.astype(jnp.float32) + dt_bias_U)
    return g, jax.nn.sigmoid(b.astype(jnp.float32))


def _convolve(x: jax.Array, w_WC: jax.Array) -> jax.Array:
    """Depthwise, float32: [.., W-1 + n, C] -> [.., n, C]; output i sees inputs i to i + W-1."""
    W = w_WC.shape[0]
    n = x.shape[-2] - (W - 1)
    x, w_WC = x.astype(jnp.float32), w_WC.astype(jnp.float32)
    return sum((x[..., w : w + n, :] * w_WC[w] for w in range(1, W)), x[..., :n, :] * w_WC[0])


def _causal_conv(
    x_TC: jax.Array, w_WC: jax.Array, conv: jax.Array, layer: jax.Array, rows: Ragged
) -> tuple[jax.Array, jax.Array]:
    """silu of the depthwise convolution, and the states with the last W-1 inputs of each sequence."""
    T, W = x_TC.shape[0], w_WC.shape[0]
    # Taps are indices, too: as a slice after indices they make XLA's TPU compiler lay out the pool anew, a copy.
    taps = jnp.arange(W - 1)
    tail_BWC = jnp.where(rows.fresh_B[:, None, None], 0, conv[layer, rows.read_slot_B[:, None], taps])
    if rows.one_token:
        u_TC = _convolve(jnp.concatenate([tail_BWC, x_TC[:, None]], 1), w_WC)[:, 0]
    else:
        # As if all rows were one sequence, and then the first W-1 of each sequence again, which see its tail.
        u_TC = _convolve(jnp.pad(x_TC, ((W - 1, 0), (0, 0))), w_WC)
        i_W = jnp.arange(W - 1)
        row_BW = rows.q_start_B[:-1, None] + i_W
        u_BWC = _convolve(jnp.concatenate([tail_BWC, x_TC[jnp.minimum(row_BW, T - 1)]], 1), w_WC)
        u_TC = u_TC.at[jnp.where(i_W < rows.q_len_B[:, None], row_BW, T)].set(u_BWC, mode="drop")

    # Input i of the last W-1, counted from the sequence's first in this step: negative ones are in the old tail.
    i_BW = rows.q_len_B[:, None] - (W - 1) + jnp.arange(W - 1)
    new = x_TC[jnp.clip(rows.q_start_B[:-1, None] + i_BW, 0, T - 1)]
    old = jnp.take_along_axis(tail_BWC, jnp.clip(i_BW + W - 1, 0, W - 2)[..., None], axis=1)
    tail_BWC = jnp.where((i_BW >= 0)[..., None], new, old).astype(conv.dtype)
    slot_B = jnp.where(rows.q_len_B > 0, rows.write_slot_B, 0)
    # The barrier keeps XLA's CPU compiler from computing the sum again for each of the uses that silu makes of it.
    return jax.nn.silu(jax.lax.optimization_barrier(u_TC)), conv.at[layer, slot_B[:, None], taps].set(tail_BWC)


def _recurrent(
    q_TJY: jax.Array,
    k_TJY: jax.Array,
    v_TUZ: jax.Array,
    g_TU: jax.Array,
    beta_TU: jax.Array,
    rec: jax.Array,
    layer: jax.Array,
    rows: Ragged,
) -> tuple[jax.Array, jax.Array]:
    """Sequences with one token, one after the other: only states of live ones move. Zeros in the other rows.

    o = S'^T q with S' = e^g S + k d^T is read from the old state: e^g S^T q + (k . q) d.
    """
    U = v_TUZ.shape[1]
    single = cut(rows.q_start_B[:-1], jnp.where(rows.q_len_B == 1, 1, 0), 1)

    def body(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        o_TUZ, rec = carry
        seq, _, t, _ = single[i]
        q, k = (jnp.repeat(x[t], U // x.shape[1], axis=0) for x in (q_TJY, k_TJY))
        S = jnp.where(rows.fresh_B[seq], 0, rec[layer, rows.read_slot_B[seq]].astype(jnp.float32))
        q, k, S = jax.lax.optimization_barrier((q, k, S))
        read = lambda x: jnp.einsum("uyz,uy->uz", S, x, precision=HIGHEST)  # noqa: E731
        decay = jnp.exp(g_TU[t])[:, None]
        d = beta_TU[t][:, None] * (v_TUZ[t] - decay * read(k))
        o = decay * read(q) + jnp.sum(k * q, -1, keepdims=True) * d
        S = decay[..., None] * S + k[..., None] * d[:, None, :]
        return o_TUZ.at[t].set(o), rec.at[layer, rows.write_slot_B[seq]].set(S.astype(rec.dtype))

    return jax.lax.fori_loop(0, single.count, body, (vary_like(jnp.zeros_like(v_TUZ), rec), rec))


def chunk(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, S: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One chunk of c tokens of one sequence: q, k [c, J, Y], v [c, U, Z], g, beta [c, U], S [U, Y, Z] -> (o, S).

    Rows with g = beta = 0 and k = 0 leave the state as it is.
    """
    c, U, _ = v.shape
    q, k = (jnp.repeat(x, U // x.shape[1], axis=1) for x in (q, k))
    q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))
    G, beta = jnp.cumsum(g, 0).T, beta.T
    decay = decays(g.T)
    dot = lambda spec, *xs: jnp.einsum(spec, *xs, precision=HIGHEST)  # noqa: E731
    A = jnp.where(jnp.tri(c, k=-1, dtype=bool), beta[..., None] * dot("uiy,ujy->uij", k, k) * decay, 0)
    inverse = unit_lower_inverse(A) * beta[:, None]
    n = dot("uij,ujz->uiz", inverse, v - dot("uiy,uyz->uiz", jnp.exp(G)[..., None] * k, S))
    o = dot("uiy,uyz->uiz", jnp.exp(G)[..., None] * q, S)
    o += dot("uij,ujz->uiz", dot("uiy,ujy->uij", q, k) * decay, n)
    S = jnp.exp(G[:, -1:])[..., None] * S + dot("uiy,uiz->uyz", decay[:, -1, :, None] * k, n)
    return o.swapaxes(0, 1), S


def decays(g: jax.Array) -> jax.Array:
    """[.., c] log decays -> [.., c, c]: exp of the sum over tokens j+1 to i, 0 where j > i.

    Sums over each segment, not differences of cumulated sums: those lose what is small beside a large decay.
    """
    c = g.shape[-1]
    after = jnp.where(jnp.tri(c, k=-1, dtype=bool), g[..., :, None], 0)
    segments = jnp.einsum("il,...lj->...ij", jnp.tri(c), after, precision=HIGHEST)
    return jnp.exp(jnp.where(jnp.tri(c, dtype=bool), segments, -jnp.inf))


def unit_lower_inverse(A: jax.Array) -> jax.Array:
    """(I + A)^-1 for strictly lower triangular A [.., c, c], c a power of two.

    By halves: with the inverses P and R of the diagonal blocks, the inverse of [[P^-1, 0], [Q, R^-1]] has -R Q P in
    Q's place.
    """
    c = A.shape[-1]
    if c == 1:
        return jnp.ones_like(A)
    top, bottom = slice(c // 2), slice(c // 2, c)
    P, R = unit_lower_inverse(jnp.stack([A[..., top, top], A[..., bottom, bottom]]))
    Q = -jnp.einsum("...ij,...jk,...kl->...il", R, A[..., bottom, top], P, precision=HIGHEST)
    return jnp.block([[P, jnp.zeros_like(P)], [Q, R]])


def _chunked(
    q_TJY: jax.Array,
    k_TJY: jax.Array,
    v_TUZ: jax.Array,
    g_TU: jax.Array,
    beta_TU: jax.Array,
    o_TUZ: jax.Array,
    rec: jax.Array,
    layer: jax.Array,
    rows: Ragged,
) -> tuple[jax.Array, jax.Array]:
    """Sequences with several tokens, chunk after chunk; a sequence's state waits in its write slot in between."""
    T = q_TJY.shape[0]
    chunks = cut(rows.q_start_B[:-1], jnp.where(rows.q_len_B > 1, rows.q_len_B, 0), CHUNK)
    padded = [jnp.pad(x, ((0, CHUNK),) + ((0, 0),) * (x.ndim - 1)) for x in (q_TJY, k_TJY, v_TUZ, g_TU, beta_TU)]

    def body(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        o_TUZ, rec = carry
        seq, part, start, length = chunks[i]
        live = jnp.arange(CHUNK) < length
        xs = [jax.lax.dynamic_slice_in_dim(x, start, CHUNK) for x in padded]
        xs = [jnp.where(live.reshape(-1, *(1,) * (x.ndim - 1)), x, 0) for x in xs]
        slot = jnp.where(part == 0, rows.read_slot_B[seq], rows.write_slot_B[seq])
        S = jnp.where((part == 0) & rows.fresh_B[seq], 0, rec[layer, slot].astype(jnp.float32))
        q, k, v, g, beta = xs
        o, S = chunk(q, k, v, g, beta, S)
        old = jax.lax.dynamic_slice_in_dim(o_TUZ, start, CHUNK)
        o = jnp.where(live[:, None, None], o, old)
        o_TUZ = jax.lax.dynamic_update_slice_in_dim(o_TUZ, o, start, 0)
        return o_TUZ, rec.at[layer, rows.write_slot_B[seq]].set(S.astype(rec.dtype))

    o_TUZ, rec = jax.lax.fori_loop(0, chunks.count, body, (jnp.pad(o_TUZ, ((0, CHUNK), (0, 0), (0, 0))), rec))
    return o_TUZ[:T], rec
