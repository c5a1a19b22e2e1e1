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
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from qwen_spmd.pallas import impl_for
from qwen_spmd.pallas.add_norm import cases as add_norm
from qwen_spmd.pallas.expert_sort import cases as expert_sort
from qwen_spmd.pallas.expert_sum import cases as expert_sum
from qwen_spmd.pallas.few_rows_mlp import cases as few_rows_mlp
from qwen_spmd.pallas.gated_delta import cases as gated_delta
from qwen_spmd.pallas.grouped_mlp import cases as grouped_mlp
from qwen_spmd.pallas.linear import cases as linear
from qwen_spmd.pallas.paged_attention import cases as paged_attention
from qwen_spmd.pallas.router import cases as router
from qwen_spmd.pallas.scaled import GROUP, OF_ROWS, Microscaled
from qwen_spmd.pallas.triton import capability, configs, interpreted

IMPLS = sorted({"reference", impl_for(jax.devices()[0])})


def f64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def close(got, want, factor, reduction, dtype=None):
    """Within factor * eps * sqrt(reduction) of values of unit size, a sum of `reduction` terms; eps of got's dtype."""
    tolerance = factor * float(jnp.finfo(dtype or got.dtype).eps) * reduction**0.5
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


def check_paged_attention(x: paged_attention.Inputs, got, factor, impl):
    T, N, H = x.q_TNH.shape
    K, S = x.k_TKH.shape[1], x.page_size
    kv, o_TNH = x.kv.copy(), np.zeros((T, N, H))
    limit = float(jnp.finfo(kv.dtype).max)
    k_TKH, v_TKH = (np.clip(y.astype(np.float32), -limit, limit).astype(kv.dtype) for y in (x.k_TKH, x.v_TKH))
    for b, rows in sequences(x.batch, x.one_token):
        pages, end = x.batch.pages_BP[b], x.batch.kv_len_B[b]
        for t, pos in zip(rows, range(end - len(rows), end), strict=True):
            kv[x.layer, pages[pos // S], :, 0, pos % S] = k_TKH[t]
            kv[x.layer, pages[pos // S], :, 1, pos % S] = v_TKH[t]
        context = f64(kv[x.layer, pages[: -(-end // S)]])
        k, v = (context[:, :, i].swapaxes(1, 2).reshape(-1, K, H)[:end] for i in (0, 1))
        for t, n in zip(rows, range(end - len(rows) + 1, end + 1), strict=True):
            q = f64(x.q_TNH[t]).reshape(K, N // K, H)
            scores = np.einsum("kgh,skh->kgs", q, k[:n]) * H**-0.5
            p = np.exp(scores - scores.max(-1, keepdims=True))
            o_TNH[t] = np.einsum("kgs,skh->kgh", p / p.sum(-1, keepdims=True), v[:n]).reshape(N, H)
    got_o, got_kv = got
    assert got_o.dtype == x.q_TNH.dtype
    close(got_o, o_TNH, factor, H)
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


def check_gated_delta(x: gated_delta.Inputs, got, factor, impl):
    (_, _, U, Y, Z), l = x.rec.shape, x.layer
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
    got_o, got_conv, got_rec = got
    assert (got_o.dtype, got_rec.dtype) == (x.qkv_TC.dtype, x.rec.dtype)
    close(got_o, o_TUZ, factor, Y)
    got_conv[l, 0] = conv[l, 0]
    same_bits(got_conv, conv)
    # On GPUs and TPUs, products of 16-bit inputs have operands of 16 bits; the reference's are float32.
    kept = x.qkv_TC.dtype if impl != "reference" else x.rec.dtype
    for slot, S in rec.items():
        close(got_rec[l, slot], S, factor, Y, max(x.rec.dtype, kept, key=lambda d: jnp.finfo(d).eps))
    touched = [0, *rec]
    got_rec[l, touched] = x.rec[l, touched]
    same_bits(got_rec, x.rec)


@functools.partial(jax.jit, static_argnums=1)
def rounded(rows, format):
    """As matrices of that format take them."""
    return Microscaled.quantise(rows[..., None], OF_ROWS[format]).astype(jnp.float32)[..., 0]


def check_grouped_mlp(x: grouped_mlp.Inputs, got, factor, impl):
    l, experts = x.layer, np.repeat(np.arange(len(x.sizes_E)), x.sizes_E)
    want = np.zeros((len(experts), x.x_TD.shape[1]))
    format = getattr(x.w_gate, "format", None)
    weights = x.w_gate, x.w_up, x.w_down
    gate, up, down = jax.tree.map(np.asarray, jax.jit(lambda ws: [w.astype(jnp.float32) for w in ws])(weights))
    x_TD, h_RM = rounded(x.x_TD, format) if format else x.x_TD, np.zeros((len(experts), down.shape[2]))
    for r, e in enumerate(experts):
        row = f64(x_TD[x.rows_R[r]])
        h_RM[r] = silu(row @ f64(gate[l, e])) * (row @ f64(up[l, e]))
    h_RM = rounded(h_RM.astype(x.x_TD.dtype), format) if format else h_RM
    for r, e in enumerate(experts):
        want[r] = f64(h_RM[r]) @ f64(down[l, e])
    assert got.dtype == x.x_TD.dtype and len(got) == len(x.rows_R)
    got = got[: len(want)]
    if format:  # few rows of h lie so close to a midpoint that sums in another order are rounded to its other side
        few = np.argsort(np.abs(f64(got) - want).max(1))[len(want) - len(want) // 16 :]
        np.testing.assert_allclose(f64(got)[few], want[few], rtol=0, atol=0.1)
        want[few] = got[few]
    close(got, want, factor, x.x_TD.shape[1])


def check_few_rows_mlp(x: few_rows_mlp.Inputs, got, factor, impl):
    want, l = np.zeros(x.x_TD.shape), x.layer
    for t, e in np.argwhere(x.own_TE):
        row = f64(x.x_TD[t])
        h = silu(row @ f64(x.w_gate[l, e])) * (row @ f64(x.w_up[l, e]))
        want[t] += f64(x.gates_TE[t, e]) * (h @ f64(x.w_down[l, e]))
    assert got.dtype == np.float32
    # What an expert gives of a row is rounded to the row's dtype.
    close(got.astype(x.x_TD.dtype), want, factor, x.x_TD.shape[1])
    assert not np.any(got[~x.own_TE.any(1)])


def check_router(x: router.Inputs, got, factor, impl):
    got_experts, got_gates = got
    assert (got_experts.dtype, got_gates.dtype) == (np.int32, np.float32)
    assert np.all((got_experts[x.valid_T] >= 0) & (got_experts[x.valid_T] < x.parts_STE.shape[2]))
    assert np.all(got_experts[~x.valid_T] == -1)
    logits_TE = functools.reduce(np.add, x.parts_STE)
    numbers = ~np.isnan(logits_TE).any(-1)
    assert np.isnan(got_gates[~numbers]).all()
    numbers &= x.valid_T
    logits_TE = logits_TE[numbers]
    logits = f64(logits_TE)
    # Which is larger is decided on float32 probabilities, where small ones may be equal.
    p32 = np.exp(logits_TE - logits_TE.max(-1, keepdims=True))
    order = np.argsort(-p32, axis=-1, kind="stable")[:, : x.chosen]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    gates = np.take_along_axis(p / p.sum(-1, keepdims=True), order, -1)
    np.testing.assert_array_equal(got_experts[numbers], order)
    close(got_gates[numbers], gates / gates.sum(-1, keepdims=True) if x.normalise else gates, factor, 1)


def check_expert_sort(x: expert_sort.Inputs, got, factor, impl):
    T, X = x.experts_TX.shape
    places = sorted((e, t, i) for (t, i), e in np.ndenumerate(x.experts_TX) if 0 <= e < x.num_experts)
    np.testing.assert_array_equal(got.sizes_E, np.bincount([e for e, _, _ in places], minlength=x.num_experts))
    assert got.rows_R.shape == (T * X,) and got.pos_TX.shape == (T, X)
    np.testing.assert_array_equal(got.rows_R[: len(places)], [t for _, t, _ in places])
    pos_TX = np.full((T, X), -1)
    for place, (_, t, i) in enumerate(places):
        pos_TX[t, i] = place
    np.testing.assert_array_equal(got.pos_TX, pos_TX)


def check_expert_sum(x: expert_sum.Inputs, got, factor, impl):
    want = np.zeros((len(x.pos_TX), x.y_RD.shape[1]))
    for t, i in np.argwhere(x.pos_TX >= 0):
        want[t] += f64(x.gates_TX[t, i]) * f64(x.y_RD[x.pos_TX[t, i]])
    assert got.dtype == np.float32
    close(got, want, factor, x.pos_TX.shape[1])


def check_linear(x: linear.Inputs, got, factor, impl):
    results, back, again = got
    dtypes = [x.x_TI.dtype, *[np.float32] * (len(x.ws) - 1)]
    for w, result, dtype in zip(x.ws, results, dtypes, strict=True):
        assert result.dtype == dtype
        close(result, np.einsum("ti,iow->tow", f64(x.x_TI), f64(w)), factor, len(w))
    for w, result in zip(x.ws, again, strict=True):
        close(result, np.einsum("ti,iow->to", f64(x.x_TI), f64(w)), factor, len(w))
    want = np.einsum("tow,owi->ti", f64(results[0]), f64(x.w_back))
    close(back, want, factor, len(x.w_back), x.x_TI.dtype)


def check_add_norm(x: add_norm.Inputs, got, factor, impl):
    total, norm = got
    assert total.dtype == norm.dtype == x.x_TD.dtype
    want = f64(x.x_TD)
    for term in x.terms:
        if isinstance(term, add_norm.Gathered):
            for t, i in np.argwhere(term.pos_TX >= 0):
                want[t] += f64(term.gates_TX[t, i]) * f64(term.y_RD[term.pos_TX[t, i]])
        else:
            want += f64(term).sum(0)
    close(total, want, factor, 1)
    y = f64(total)
    y /= np.sqrt((y * y).mean(-1, keepdims=True) + add_norm.EPS)
    w = f64(x.w_D) + x.zero_centred
    close(norm, y * w, factor * 3, 1)


class Op(NamedTuple):
    cases: Any
    check: Callable
    factor: float
    """Of the tolerance, see `close`."""
    matters: tuple[str, ...]
    """Inputs of which no element that is not NaN may change by one per cent without failing the comparison."""
    interpreted: tuple[str, ...] = ()
    """Cases for which the GPU's kernels are interpreted in every run of the tests; `slow` has the others."""


OPS = {
    "router": Op(
        router, check_router, 8, ("parts_STE",), ("parts, invalid rows", "few logits, many ties", "rows of NaN")
    ),
    "expert_sort": Op(expert_sort, check_expert_sort, 0, (), ("8 rows, 7 of padding", "many rows", "none here")),
    "expert_sum": Op(expert_sum, check_expert_sum, 3, ("y_RD", "gates_TX"), ("some here", "odd width", "bfloat16")),
    "linear": Op(linear, check_linear, 3, ("x_TI", "w_back"), ("17 rows, odd widths", "few rows, bfloat16")),
    "add_norm": Op(add_norm, check_add_norm, 3, ("x_TD", "w_D"), ("experts and parts", "many parts, bfloat16")),
    "paged_attention": Op(
        paged_attention,
        check_paged_attention,
        3,
        ("q_TNH", "k_TKH", "v_TKH", "kv"),
        interpreted=("one token", "8-bit pages, one token", "bucket of 8, 5 live, bfloat16", "one head"),
    ),
    "gated_delta": Op(
        gated_delta,
        check_gated_delta,
        3,
        ("qkv_TC", "b_TU", "a_TU", "dt_bias_U", "conv", "rec"),
        interpreted=("chunk edges", "mixed, bfloat16", "forks of one snapshot", "bucket of 8, forks"),
    ),
    "few_rows_mlp": Op(few_rows_mlp, check_few_rows_mlp, 3, ("x_TD", "gates_TE", "w_gate", "w_up", "w_down")),
    "grouped_mlp": Op(
        grouped_mlp,
        check_grouped_mlp,
        3,
        ("x_TD", "w_gate", "w_up", "w_down"),
        interpreted=(
            "no rows",
            "16 rows, ends",
            "16 rows, bfloat16",
            "8-bit weights, blocks cut short",
            "8-bit weights, blocks of 128",
            *(f"{format}, 48 rows" for format in GROUP),
        ),
    ),
}
CASES = [
    pytest.param(op, case, id=f"{name}: {case.name}")
    for name, op in OPS.items()
    for case in op.cases.CASES
    if not case.full
]


def test_names_and_sizes_of_cases():
    for op in OPS.values():
        assert len({case.name for case in op.cases.CASES}) == len(op.cases.CASES)
    for case in (*paged_attention.CASES, *gated_delta.CASES):
        q_len, kv_len = np.array([*case.seqs, (0, 0)]).T
        assert len(case.seqs) <= case.batch and np.all(q_len <= kv_len), case
        assert q_len.max() <= 1 if case.one_token else q_len.sum() <= case.rows, case
        if isinstance(case, paged_attention.Case):
            assert -(-kv_len.max() // case.page_size) <= case.pages_per_seq, case


def test_shapes_of_cases():
    for case in (case for case in grouped_mlp.CASES if not case.full):
        drawn = jax.eval_shape(lambda case=case: jax.tree.map(jnp.asarray, grouped_mlp.inputs(case)))
        assert grouped_mlp.abstract(case) == drawn, case.name


@functools.cache
def program(module, impl):
    return jax.jit(lambda x: module.run(x, impl))


def run(module, impl, x):
    return jax.tree.map(np.array, program(module, impl)(x))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("op", "case"), CASES)
def test_parity(op, case, impl):
    if impl == "gpu" and getattr(case, "capability", 90) > capability():
        pytest.skip(f"needs compute capability {case.capability}")
    x = op.cases.inputs(case)
    op.check(x, run(op.cases, impl, x), op.factor, impl)


def interpreted_cases():
    for name, op in OPS.items():
        for case in op.cases.CASES:
            if op.interpreted and not case.full:
                marks = () if case.name in op.interpreted else pytest.mark.slow
                yield pytest.param(op, case, id=f"{name}: {case.name}", marks=marks)


@pytest.mark.parametrize(("op", "case"), list(interpreted_cases()))
@pytest.mark.skipif("gpu" in IMPLS, reason="the interpreter leaves triton unable to compile")
def test_parity_of_interpreted_gpu_kernels(op, case):
    pytest.importorskip("triton")
    x = op.cases.inputs(case)
    with interpreted(getattr(case, "capability", 90)):
        got = jax.tree.map(np.array, op.cases.run(x, "gpu"))
    op.check(x, got, op.factor, "gpu")


# By op, those that every run of the tests has; `slow` has the others.
INTERPRETED_FOR_TPU = {
    "gated_delta": ("mixed, bfloat16", "bucket of 8, forks", "bucket of 8, bfloat16 state"),
    "paged_attention": ("bucket of 8, 3 live", "chunks before decode rows"),
}


def interpreted_tpu_cases():
    for name, few in INTERPRETED_FOR_TPU.items():
        for case in OPS[name].cases.CASES:
            if not case.full:
                marks = () if case.name in few else pytest.mark.slow
                yield pytest.param(OPS[name], case, id=f"{name}: {case.name}", marks=marks)


@pytest.mark.parametrize(("op", "case"), list(interpreted_tpu_cases()))
def test_parity_of_interpreted_tpu_kernels(op, case):
    """Memory that nobody has written is NaN, and copies are only done when they are waited for."""
    x = op.cases.inputs(case)
    traced = jax.jit(lambda x: op.cases.run(x, "tpu")).trace(x)
    assert "pallas_call" in str(traced.jaxpr), "the op runs something else"
    with pltpu.force_tpu_interpret_mode():
        got = jax.tree.map(np.array, jax.jit(lambda x: op.cases.run(x, "tpu"))(x))
    op.check(x, got, op.factor, "tpu")


FORCED = [
    ("gated_delta", "Qwen3.5 16/48 heads", "decode", {"split": 2, "block_z": 16}),
    ("gated_delta", "bucket of 8, forks", "decode", {"split": 4, "block_z": 16}),
    ("gated_delta", "bucket of 8, 5 live", "decode", {"split": 1, "block_z": 16, "prefetch": 0}),
    ("linear", "few rows, bfloat16", "linear", {"block_o": 32, "block_i": 32}),
    ("linear", "17 rows, odd widths", "parts", {"parts": 16}),
    ("paged_attention", "bucket of 8, 5 live, bfloat16", "decode", {"block_n": 16, "programs": 1, "pieces": 4}),
    ("grouped_mlp", "16 rows, bfloat16", "gate_up", {"swap": 0, "block_r": 64, "tma": 0}),
    ("grouped_mlp", "mxfp8, 48 rows", "down", {"block_o": 64, "block_i": 64, "tma": 0}),
]


@pytest.mark.skipif("gpu" in IMPLS, reason="the interpreter leaves triton unable to compile")
@pytest.mark.parametrize(("op", "case", "kernel", "config"), FORCED)
def test_any_config_is_right(op, case, kernel, config):
    """Tables of configs decide on speed alone."""
    pytest.importorskip("triton")
    case = next(c for c in OPS[op].cases.CASES if c.name == case)
    x = OPS[op].cases.inputs(case)
    with interpreted(getattr(case, "capability", 90)), configs.force(op, kernel, config):
        got = jax.tree.map(np.array, OPS[op].cases.run(x, "gpu"))
    OPS[op].check(x, got, OPS[op].factor, "gpu")


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("case", ["decode rows", "bucket of 8, 5 live"])
@pytest.mark.skipif("gpu" in IMPLS, reason="the interpreter leaves triton unable to compile")
def test_contexts_are_cut_anywhere(monkeypatch, case, count):
    """With few processors, a share of the contexts has some of several heads and sequences."""
    pytest.importorskip("triton")
    from qwen_spmd.pallas.paged_attention import gpu

    monkeypatch.setattr(gpu, "processors", lambda: count)
    x = paged_attention.inputs(next(c for c in paged_attention.CASES if c.name == case))
    with interpreted():
        got = jax.tree.map(np.array, paged_attention.run(x, "gpu"))
    check_paged_attention(x, got, OPS["paged_attention"].factor, "gpu")


@pytest.mark.skipif("gpu" in IMPLS, reason="the interpreter leaves triton unable to compile")
def test_results_vary_with_their_own_weights():
    """Weights that are the same on all devices and sharded ones share a launch: shard_map holds both to their types."""
    pytest.importorskip("triton")
    from qwen_spmd.pallas.linear import linear

    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    x, w = np.ones((2, 32), np.float32), np.arange(32 * 64, dtype=np.float32).reshape(32, 64)

    def both(x, whole, share):
        return linear(x, (whole, share), out_dtypes=[x.dtype] * 2, impl="gpu")

    specs = P(), P(), P(None, "tp")
    with interpreted():
        run = jax.shard_map(both, mesh=mesh, in_specs=specs, out_specs=specs[1:])
        for y in jax.jit(run)(x, w, w):
            np.testing.assert_allclose(y, x @ w)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in OPS.values() for name in op.matters])
def test_parity_can_fail(op, name):
    case = next(
        c for c in op.cases.CASES if c.name in ("mixed", "640 rows, zipf", "4 rows", "all of 8", "parts", "3 rows, two")
    )
    x = op.cases.inputs(case)
    got = run(op.cases, "reference", x)
    changed = getattr(x, name).copy()
    first = np.flatnonzero(~np.isnan(changed))[0]
    changed.flat[first] *= 1.01
    with pytest.raises(AssertionError):
        op.check(x.replace(**{name: changed}), got, op.factor, "reference")


def golden():
    """T=5, J=1, U=2, Y=Z=4, and what the equations give in float64 (computed by other code than this repository's)."""
    t, h, d = np.meshgrid(np.arange(5), np.arange(2), np.arange(4), indexing="ij")
    q, k, v = (np.sin(0.7 * t + 1.3 * h + 0.5 * d + s) for s in (0.1, 1.1, 2.1))
    t, h = t[..., 0], h[..., 0]
    want = {
        "g": {0: [-0.3132617, -0.1300672], 4: [-0.7981389, -0.3973558]},
        "beta": {0: [0.3775407, 0.4750208], 4: [0.5744425, 0.6681878]},
        "o": {
            0: [[0.1294469, 0.0773046, 0.0062354, -0.0663604], [-0.0482153, -0.1297673, -0.1795476, -0.1853685]],
            4: [[-0.2696226, -0.2520500, -0.1727668, -0.0511842], [-0.1970084, -0.0282423, 0.1474385, 0.2870212]],
        },
        "S1": [
            [-0.2752916, -0.3726519, -0.3787740, -0.2921590],
            [-0.0674632, -0.2610415, -0.3907079, -0.4247153],
            [0.1568826, -0.0855191, -0.3069828, -0.4532864],
            [0.3428181, 0.1109414, -0.1480976, -0.3708772],
        ],
    }
    return q[:, :1], k[:, :1], v, 0.3 * t - 0.5 * h, 0.2 * t + 0.4 * h - 0.5, [0, 0.5], [-1, -2], want


def test_golden_vectors_of_the_oracle():
    q, k, v, a, b, a_log, dt_bias, want = golden()
    g, beta = gates(b, a, a_log, dt_bias)
    S, o = np.zeros((2, 4, 4)), []
    for t in range(5):
        u = np.concatenate([q[t].ravel(), k[t].ravel(), v[t].ravel()])
        o_t, S = delta_rule(*heads(u, 2, 4, 4), g[t], beta[t], S)
        o.append(o_t)
    for t in (0, 4):
        np.testing.assert_allclose(g[t], want["g"][t], atol=1e-7)
        np.testing.assert_allclose(beta[t], want["beta"][t], atol=1e-7)
        np.testing.assert_allclose(o[t], want["o"][t], atol=1e-7)
    np.testing.assert_allclose(S[1], want["S1"], atol=1e-7)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("one_token", [False, True])
def test_golden_vectors(impl, one_token):
    """Through the whole op: the convolution passes the current token alone, its silu is inverted beforehand.

    Only values above -0.27 have an inverse, so everything is a quarter as big. That cancels in q and k, which are
    normalised, and the rest is linear in v.
    """
    q, k, v, a, b, a_log, dt_bias, want = golden()
    u = np.concatenate([x.reshape(5, -1) for x in (q, k, v)], 1) / 4
    low, high = np.full(u.shape, -1.27), np.ones(u.shape)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = np.where(silu(middle) < u, middle, low), np.where(silu(middle) < u, high, middle)
    f32 = np.float32
    case = gated_delta.Case("", ((5, 5),), 1, 2, 4, 4, rows=5, batch=1)
    if one_token:
        case = gated_delta.Case("", ((1, 1),), 1, 2, 4, 4, batch=1, one_token=True)
    x = gated_delta.inputs(case).replace(
        conv_w_WC=np.array([[0], [0], [0], [1]], f32) * np.ones(u.shape[1], f32),
        a_log_U=np.array(a_log, f32),
        dt_bias_U=np.array(dt_bias, f32),
    )
    if impl == "gpu":
        pytest.skip("the matrix unit takes heads of 16 at least")
    o = []
    for t in range(5) if one_token else [slice(5)]:
        rows = {"qkv_TC": low[t], "a_TU": a[t], "b_TU": b[t]}
        x = x.replace(**{name: np.atleast_2d(r).astype(f32) for name, r in rows.items()})
        o_TUZ, conv, rec = run(gated_delta, impl, x)
        x = x.replace(conv=conv, rec=rec, batch=x.batch.replace(fresh_B=np.array([False])))
        o += list(o_TUZ)
    for t in (0, 4):
        np.testing.assert_allclose(4 * o[t], want["o"][t], atol=1e-5)
    np.testing.assert_allclose(4 * rec[x.layer, x.batch.write_slot_B[0], 1], want["S1"], atol=1e-5)
