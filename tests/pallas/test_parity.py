# SPDX-License-Identifier: Apache-2.0
"""Every implementation of every op against a naive float64 oracle, over the op's named cases.

The oracles go token by token through the contracts' equations. State that an op must not touch is compared bit by bit;
inputs that must not matter are NaN (see `cases.py` of each op).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_spmd.pallas import impl_for
from qwen_spmd.pallas.gated_delta import cases as gated_delta
from qwen_spmd.pallas.grouped_mlp import cases as grouped_mlp
from qwen_spmd.pallas.paged_attention import cases as paged_attention

IMPLS = sorted({"reference", impl_for(jax.devices()[0])})


def f64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def close(got, want, factor, reduction):
    """Within factor * eps * sqrt(reduction), eps of got's dtype; `reduction` is the length of the op's longest sum."""
    tolerance = factor * float(jnp.finfo(got.dtype).eps) * reduction**0.5
    np.testing.assert_allclose(f64(got), want, rtol=0, atol=tolerance)


def same_bits(got, want):
    got, want = (np.ascontiguousarray(x).view(np.uint8) for x in (got, want))
    np.testing.assert_array_equal(got, want)


def sequences(batch, one_token):
    """(b, its rows) of each sequence that is not empty."""
    if one_token:
        return [(b, range(b, b + 1)) for b, n in enumerate(batch.kv_len_B) if n > 0]
    q_start = batch.q_start_B
    return [(b, range(q_start[b], q_start[b + 1])) for b in range(len(q_start) - 1) if q_start[b + 1] > q_start[b]]


def silu(x):
    return x / (1 + np.exp(-x))


def check_paged_attention(x: paged_attention.Inputs, got):
    T, N, H = x.q_TNH.shape
    K, S = x.k_TKH.shape[1], x.page_size
    kv, o_TNH = x.kv.copy(), np.zeros((T, N, H))
    for b, rows in sequences(x.batch, x.one_token):
        pages, end = x.batch.pages_BP[b], x.batch.kv_len_B[b]
        for t, pos in zip(rows, range(end - len(rows), end), strict=True):
            kv[x.layer, pages[pos // S], :, 0, pos % S] = x.k_TKH[t]
            kv[x.layer, pages[pos // S], :, 1, pos % S] = x.v_TKH[t]
        context = f64(kv[x.layer, pages[: -(-end // S)]])
        k, v = (context[:, :, i].swapaxes(1, 2).reshape(-1, K, H)[:end] for i in (0, 1))
        for t, n in zip(rows, range(end - len(rows) + 1, end + 1), strict=True):
            q = f64(x.q_TNH[t]).reshape(K, N // K, H)
            scores = np.einsum("kgh,skh->kgs", q, k[:n]) * H**-0.5
            p = np.exp(scores - scores.max(-1, keepdims=True))
            o_TNH[t] = np.einsum("kgs,skh->kgh", p / p.sum(-1, keepdims=True), v[:n]).reshape(N, H)
    got_o, got_kv = got
    assert got_o.dtype == x.q_TNH.dtype
    close(got_o, o_TNH, 2, H)
    got_kv[x.layer, 0] = kv[x.layer, 0]  # the null page may hold anything
    same_bits(got_kv, kv)


def delta_rule(q, k, v, g, beta, S):
    """One token: q, k [U, Y], v [U, Z], g, beta [U], S [U, Y, Z] -> (o, S)."""
    S = np.exp(g)[:, None, None] * S
    d = beta[:, None] * (v - np.einsum("uyz,uy->uz", S, k))
    S = S + k[:, :, None] * d[:, None, :]
    return np.einsum("uyz,uy->uz", S, q), S


def gates(b, a, a_log, dt_bias):
    return -np.exp(f64(a_log)) * np.logaddexp(0, f64(a) + f64(dt_bias)), 1 / (1 + np.exp(-f64(b)))


def heads(u, U, Y, Z):
    """Channels [C] -> (q, k, v) for each value head, normalised."""
    J = (len(u) - U * Z) // (2 * Y)
    q, k, v = np.split(u.reshape(J, -1), [Y, 2 * Y], axis=1)
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (x[np.arange(U) // (U // J)] for x in (q, k))
    return q * Y**-0.5, k, v.reshape(U, Z)


def check_gated_delta(x: gated_delta.Inputs, got):
    (_, _, U, Y, Z), W, l = x.rec.shape, len(x.conv_w_WC), x.layer
    o_TUZ, conv, rec = np.zeros((len(x.qkv_TC), U, Z)), x.conv.copy(), {}
    for b, rows in sequences(x.batch, x.one_token):
        read, write = x.batch.read_slot_B[b], x.batch.write_slot_B[b]
        tail = np.zeros_like(x.conv[l, 0]) if x.batch.fresh_B[b] else x.conv[l, read]
        S = np.zeros((U, Y, Z)) if x.batch.fresh_B[b] else f64(x.rec[l, read])
        for t in rows:
            window = np.concatenate([tail, x.qkv_TC[t][None]])
            tail = window[1:]
            u = silu((f64(window) * f64(x.conv_w_WC)).sum(0))
            o_TUZ[t], S = delta_rule(*heads(u, U, Y, Z), *gates(x.b_TU[t], x.a_TU[t], x.a_log_U, x.dt_bias_U), S)
        conv[l, write], rec[write] = tail, S
    assert W == 1 + conv.shape[2]
    got_o, got_conv, got_rec = got
    assert (got_o.dtype, got_rec.dtype) == (x.qkv_TC.dtype, x.rec.dtype)
    close(got_o, o_TUZ, 2, Y)
    got_conv[l, 0] = conv[l, 0]
    same_bits(got_conv, conv)
    for slot, S in rec.items():
        close(got_rec[l, slot], S, 2, Y)
    touched = [0, *rec]
    got_rec[l, touched] = x.rec[l, touched]
    same_bits(got_rec, x.rec)


def check_grouped_mlp(x: grouped_mlp.Inputs, got):
    want, l = np.zeros(x.x_TD.shape), x.layer
    for t, e in enumerate(np.repeat(np.arange(len(x.sizes_E)), x.sizes_E)):
        row = f64(x.x_TD[t])
        h = silu(row @ f64(x.w_gate[l, e])) * (row @ f64(x.w_up[l, e]))
        want[t] = h @ f64(x.w_down[l, e])
    assert got.dtype == x.x_TD.dtype
    close(got, want, 2, x.x_TD.shape[1])
    assert not np.any(got[x.sizes_E.sum() :])


class Op(NamedTuple):
    cases: Any
    check: Callable
    perturbations: tuple[str, ...]
    """Inputs whose change by one per cent must fail the comparison, whatever the op does with the rest."""


OPS = {
    "paged_attention": Op(paged_attention, check_paged_attention, ("q_TNH", "v_TKH", "kv")),
    "gated_delta": Op(gated_delta, check_gated_delta, ("qkv_TC", "b_TU", "a_TU", "conv", "rec")),
    "grouped_mlp": Op(grouped_mlp, check_grouped_mlp, ("x_TD", "w_gate", "w_up", "w_down")),
}
CASES = [
    pytest.param(op, case, id=f"{name}: {case.name}")
    for name, op in OPS.items()
    for case in op.cases.CASES
    if not case.full
]


@functools.cache
def program(op: Op, impl):
    return jax.jit(lambda x: op.cases.run(x, impl))


def run(op: Op, impl, x):
    return jax.tree.map(np.array, program(op, impl)(x))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("op", "case"), CASES)
def test_parity(op, case, impl):
    x = op.cases.inputs(case)
    op.check(x, run(op, impl, x))
