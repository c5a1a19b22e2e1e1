# SPDX-License-Identifier: Apache-2.0
"""Dense and routed feed-forward: the router's choice and weights, padding, experts without tokens, shared expert; the
routes between devices, all against one formula."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from qwen_spmd.config import Moe as Config
from qwen_spmd.layers import moe_routes
from qwen_spmd.layers.mlp import mlp
from qwen_spmd.layers.moe import Route, moe, moe_sequences, project, router
from qwen_spmd.layers.moe_routes import route_on
from qwen_spmd.mesh import placement
from qwen_spmd.mesh.axes import RANKS, make_mesh
from qwen_spmd.mesh.rules import SINGLE
from qwen_spmd.pallas.add_norm.reference import add
from qwen_spmd.params import Mlp, Moe

FEW_ROWS = moe_routes.FEW_ROWS["reference"]
CFG = Config(num_experts=8, experts_per_token=3, width=24, norm_topk_prob=True, shared_width=40)
D, L, LAYER = 32, 2, jnp.int32(1)
WEIGHTS = ("w_gate", "w_up", "w_down")


def weights(cfg=CFG, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    E, M, F = cfg.num_experts, cfg.width, cfg.shared_width

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape) * shape[-2] ** -0.5, dtype)

    p = Moe(normal(L, D, E), normal(L, E, D, M), normal(L, E, D, M), normal(L, E, M, D), None, None)
    if F is None:
        return p
    shared = Mlp(normal(L, D, F), normal(L, D, F), normal(L, F, D))
    return p.replace(w_shared_gate=normal(L, D), shared=shared)


def rows(n, dtype=jnp.float32, seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((n, D)), dtype)


def specs(p):
    """PartitionSpecs of the parameters, by their declarations."""

    def of(tree):
        fields = [f for f in dataclasses.fields(tree) if getattr(tree, f.name) is not None]
        letters = {f.name: f.metadata["dims"] for f in fields if "dims" in f.metadata}
        children = {f.name: of(getattr(tree, f.name)) for f in fields if f.name not in letters}
        return tree.replace(**{name: SINGLE.spec(dims) for name, dims in letters.items()}, **children)

    return of(p)


@functools.cache
def program(mesh, cfg, route, declared):
    def body(p, x, valid):
        terms, routing, load = moe(p, LAYER, x, valid, cfg=cfg, impl="reference", route=route)
        return add(jnp.zeros_like(x), terms), routing, load

    spec = jax.tree.unflatten(*declared)
    out_specs = (P(RANKS), P(RANKS), P((*RANKS, "tp")))
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(spec, P(RANKS), P(RANKS)), out_specs=out_specs))


def arguments(mesh, p, x, valid):
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))  # noqa: E731
    return jax.tree.map(put, p, specs(p)), put(x, P(RANKS)), put(np.asarray(valid), P(RANKS))


def compiled(mesh, cfg, route, p):
    leaves, tree = jax.tree.flatten(specs(p))
    return program(mesh, cfg, route, (tree, tuple(leaves)))


def run(p, x, valid, cfg=CFG, mesh=None, route=Route()):  # noqa: B008
    """Outputs as numpy; the load of each place summed over `dp`."""
    mesh = mesh or make_mesh()
    y, routing, load = jax.tree.map(np.asarray, compiled(mesh, cfg, route, p)(*arguments(mesh, p, x, valid)))
    return y, routing, load.reshape(mesh.shape["dp"], -1).sum(0)


def silu(x):
    return x / (1 + np.exp(-x))


def swiglu(x, gate, up, down):
    return (silu(x @ gate) * (x @ up)) @ down


def expected(p, x, cfg):
    """Row by row, in float64."""
    p, x = jax.tree.map(lambda a: np.asarray(a[LAYER], np.float64), p), np.asarray(x, np.float64)
    y = np.zeros_like(x)
    for t, row in enumerate(x):
        logits = row @ p.w_router
        prob = np.exp(logits - logits.max())
        prob /= prob.sum()
        best = np.argsort(-prob, kind="stable")[: cfg.experts_per_token]
        gates = prob[best] / (prob[best].sum() if cfg.norm_topk_prob else 1)
        for e, gate in zip(best, gates, strict=True):
            y[t] += gate * swiglu(row, p.w_gate[e], p.w_up[e], p.w_down[e])
        if p.shared is not None:
            shared = swiglu(row, p.shared.w_gate, p.shared.w_up, p.shared.w_down)
            y[t] += shared / (1 + np.exp(-row @ p.w_shared_gate))
    return y


def test_mlp():
    p, x = weights().shared, rows(7)
    want = swiglu(*(np.asarray(a, np.float64) for a in (x, p.w_gate[1], p.w_up[1], p.w_down[1])))
    np.testing.assert_allclose(mlp(p, LAYER, x)[0], want, atol=1e-5)
    np.testing.assert_allclose(mlp(p, LAYER, x.reshape(7, 1, D))[0, :, 0], want, atol=1e-5)


VARIANTS = {
    "Qwen3.5": CFG,
    "Qwen3": dataclasses.replace(CFG, shared_width=None),
    "not renormalised": dataclasses.replace(CFG, norm_topk_prob=False, shared_width=None),
    "all experts": dataclasses.replace(CFG, experts_per_token=8),
}


@pytest.mark.parametrize("n", [FEW_ROWS, 16])
@pytest.mark.parametrize("cfg", VARIANTS.values(), ids=VARIANTS)
def test_moe(cfg, n):
    p, x = weights(cfg), rows(n)
    want = expected(p, x, cfg)
    got, routing, load = run(p, x, np.ones(n, bool), cfg)
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_array_equal(load, np.bincount(routing.experts_TX.reshape(-1), minlength=8))
    if n == 16:  # what training runs
        got, trained = jax.jit(lambda p, x: moe_sequences(p, LAYER, x, cfg=cfg))(p, x[None])
        np.testing.assert_allclose(got[0], want, atol=1e-5)
        np.testing.assert_array_equal(trained.experts_TX[0], routing.experts_TX)


def routing_of(p, x):
    return router(project(p, LAYER, x, "reference")[0], jnp.ones(len(x), bool), CFG, "reference")


def test_router():
    """float32 logits from bfloat16 rows, renormalised weights, largest first."""
    p, x = weights(dtype=jnp.bfloat16), rows(16, jnp.bfloat16)
    r = routing_of(p, x)
    assert (r.logits_TE.dtype, r.gates_TX.dtype, r.experts_TX.dtype) == (jnp.float32, jnp.float32, jnp.int32)
    want = np.asarray(x, np.float64) @ np.asarray(p.w_router[1], np.float64)
    np.testing.assert_allclose(r.logits_TE, want, atol=1e-5)  # not rounded to bfloat16 on the way
    np.testing.assert_allclose(r.gates_TX.sum(-1), 1, atol=1e-6)
    assert np.all(np.diff(r.gates_TX, axis=-1) <= 0)
    top = np.sort(np.exp(want), -1)[:, ::-1][:, :3]
    np.testing.assert_allclose(r.gates_TX, top / top.sum(-1, keepdims=True), atol=1e-5)


def test_ties_go_to_the_lower_index():
    p = weights()
    p = p.replace(w_router=jnp.zeros_like(p.w_router))
    r = routing_of(p, rows(4))
    np.testing.assert_array_equal(r.experts_TX, [[0, 1, 2]] * 4)
    np.testing.assert_allclose(r.gates_TX, 1 / 3, atol=1e-6)
    twins = p.replace(w_router=p.w_router.at[..., 5].set(rows(1)[0]).at[..., 2].set(rows(1)[0]))
    r = routing_of(twins, rows(1))
    np.testing.assert_array_equal(r.experts_TX, [[2, 5, 0]])


@pytest.mark.parametrize("cfg", [VARIANTS["Qwen3.5"], VARIANTS["Qwen3"]], ids=["Qwen3.5", "Qwen3"])
@pytest.mark.parametrize("fill", [np.nan, np.inf, 0.0, 1e30])
def test_padding_is_zero_and_harmless(cfg, fill):
    """Padding rows, in the middle too, return zeros; the others' bits do not depend on what padding holds."""
    p, x = weights(cfg), rows(16)
    valid = np.ones(16, bool)
    valid[[2, 3, 11, 12, 13, 14, 15]] = False
    clean, _, _ = run(p, x, valid, cfg)
    got, _, _ = run(p, jnp.where(valid[:, None], x, fill), valid, cfg)
    np.testing.assert_array_equal(got[~valid], 0)
    np.testing.assert_array_equal(got[valid], clean[valid])
    np.testing.assert_allclose(got[valid], expected(p, x, cfg)[valid], atol=1e-5)


def test_rows_do_not_depend_on_the_batch():
    """A row alone among padding gives what it gives in a full batch."""
    p, x = weights(), rows(16)
    together, _, _ = run(p, x, np.ones(16, bool))
    alone, _, _ = run(p, x, np.arange(16) == 9)
    np.testing.assert_allclose(alone[9], together[9], atol=1e-6)


@pytest.mark.parametrize("n", [FEW_ROWS, 16])
def test_experts_without_tokens(n):
    """A router that sends everything to three of eight experts, the others' weights full of NaN."""
    p, x = weights(), rows(n)
    x = jnp.abs(x) * jnp.sign(x[0])
    w_router = p.w_router.at[..., jnp.array([1, 4, 7])].add(jnp.sign(x[0])[:, None])
    unused = jnp.array([0, 2, 3, 5, 6])
    p = p.replace(w_router=w_router)
    want = expected(p, x, CFG)
    p = p.replace(**{name: getattr(p, name).at[:, unused].set(jnp.nan) for name in WEIGHTS})
    got, routing, load = run(p, x, np.ones(n, bool))
    assert set(np.unique(routing.experts_TX)) == {1, 4, 7}
    np.testing.assert_array_equal(load, [0, n, 0, 0, n, 0, 0, n])
    np.testing.assert_allclose(got, want, atol=1e-5)


LAYOUTS = {
    "one device": (1, 1, 1),
    "tp=4": (1, 1, 4),
    "ep=8": (1, 8, 1),
    "ep=4 tp=2": (1, 4, 2),
    "dp=2 ep=2 tp=2": (2, 2, 2),
}
ROUTES = {
    "gather_scatter": Route(kind="gather_scatter"),
    "3 chunks": Route(kind="gather_scatter", chunks=3),  # of 7 rows
    "hierarchical": Route(kind="gather_scatter", reduce="hierarchical", micro_batches=3),
    "all_to_all": Route(kind="all_to_all"),
}
ROUTED = [
    pytest.param(make_mesh(*sizes), route, id=f"{layout}, {name}")
    for layout, sizes in LAYOUTS.items()
    for name, route in ROUTES.items()
    if sizes[1] > 1 or name == "gather_scatter"  # there is only one without ep
]


def data(ranks, T, seed=2):
    """{name: (rows, which are valid)} of `ranks` times T rows; padding is NaN."""
    n = ranks * T
    x, rank, t = rows(n, seed=seed), np.arange(n) // T, np.arange(n) % T
    cases = {
        "uniform": (x, t >= 0),
        "one expert": (x[:1] * (1 + t[:, None] / T), t >= 0),  # all rows the same three
        "uneven": (x, t < rank),
        "one row": (x, np.arange(n) == n - 1),
        "no row": (x, t < 0),
    }
    return {name: (jnp.where(valid[:, None], x, jnp.nan), valid) for name, (x, valid) in cases.items()}


def check(p, x, valid, mesh, route, cfg=CFG, whole=None, atol=1e-5):
    y, routing, load = run(p, x, valid, cfg, mesh, route)
    want = np.where(valid[:, None], expected(whole or p, jnp.where(valid[:, None], x, 0), cfg), 0)
    np.testing.assert_allclose(y, want, atol=atol)
    return routing.experts_TX[valid], load


def check_all(mesh, route, T):
    p = weights()
    for x, valid in data(mesh.shape["dp"] * mesh.shape["ep"], T).values():
        experts, load = check(p, x, valid, mesh, route)
        np.testing.assert_array_equal(load, np.bincount(experts.reshape(-1), minlength=8))


@pytest.mark.parametrize(("mesh", "route"), ROUTED)
def test_routes(mesh, route):
    check_all(mesh, route, 7)


@pytest.mark.parametrize("kind", ["gather_scatter", "all_to_all"])
@pytest.mark.parametrize("sizes", [(1, 1, 4), (1, 4, 2), (2, 2, 2)], ids=["tp=4", "ep=4 tp=2", "dp=2 ep=2 tp=2"])
def test_few_rows(sizes, kind):
    """So few on all ranks together that nothing is sorted."""
    if sizes[1] > 1 or kind == "gather_scatter":
        check_all(make_mesh(*sizes), Route(kind=kind), FEW_ROWS // sizes[1])


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_a_row_that_overflows_harms_no_other(route):
    """Every device has rows of every rank at hand; what is infinite in one must not meet the others."""
    mesh, p, (x, valid) = make_mesh(ep=4), weights(), data(4, 7)["uniform"]
    clean, _, _ = run(p, x, valid, mesh=mesh, route=route)
    got, _, _ = run(p, x.at[0].set(jnp.inf), valid, mesh=mesh, route=route)
    assert np.all(np.isnan(got[0]))
    np.testing.assert_array_equal(got[1:], clean[1:])


def in_places(p, placed, copies):
    """Whole weights, expert e in place e, in another placement; null places hold NaN."""
    at = placed.experts_LQ
    null = (at == placement.NULL)[..., None, None]
    put = lambda w: jnp.where(null, jnp.nan, w[np.arange(L)[:, None], at])  # noqa: E731
    return p.replace(places=jnp.asarray(placed.table(copies)), **{n: put(getattr(p, n)) for n in WEIGHTS})


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_null_experts(route):
    """16 experts over three ranks: six places each, two of the 18 null; not for recursive halving."""
    cfg = dataclasses.replace(CFG, num_experts=16)
    mesh, p = make_mesh(ep=3), weights(cfg)
    x, valid = data(3, 7)["uneven"]
    if route.reduce == "hierarchical":
        with pytest.raises(ValueError, match="axis has 3 devices, a hypercube needs a power of two"):
            run(in_places(p, placement.identity(L, 16, 18), 1), x, valid, cfg, mesh, route)
        return
    experts, load = check(in_places(p, placement.identity(L, 16, 18), 1), x, valid, mesh, route, cfg, whole=p)
    np.testing.assert_array_equal(load, np.bincount(experts.reshape(-1), minlength=18))


@pytest.mark.parametrize("sizes", [(1, 8, 1), (1, 4, 2)], ids=["ep=8", "ep=4 tp=2"])
def test_permuted_and_copied_experts(sizes):
    """Experts anywhere, some several times, give what they give in order; their rows take turns over the copies."""
    mesh, p, (x, valid) = make_mesh(*sizes), weights(), data(sizes[1], 7)["uneven"]
    count_E = np.bincount(routing_of(p, x[valid]).experts_TX.reshape(-1), minlength=8)
    hot = int(np.argmax(count_E))
    shuffled = np.random.default_rng(0).permutation([*range(8), hot, hot, (hot + 1) % 8, *[placement.NULL] * 5])
    placed = placement.Placement(np.stack([np.roll(shuffled, 3), shuffled]))
    for route in (ROUTES["gather_scatter"], ROUTES["all_to_all"]):
        _, load = check(in_places(p, placed, 3), x, valid, mesh, route, whole=p)
        np.testing.assert_array_equal(placed.load_LE(np.stack([load, load]))[1], count_E)
        assert np.all(load[shuffled == hot] > 0) and np.all(load[shuffled == placement.NULL] == 0)


@pytest.mark.parametrize("sizes", [(1, 8, 1), (1, 4, 2), (2, 2, 2)], ids=["ep=8", "ep=4 tp=2", "dp=2 ep=2 tp=2"])
def test_rearranged_experts(sizes):
    """Weights moved on the devices are those put there at first, bit by bit, and so are the outputs."""
    mesh, p = make_mesh(*sizes), weights()
    load_LE = np.array([[90, 1, 2, 3, 40, 5, 0, 0], [0, 0, 0, 7, 0, 0, 100, 1]])  # some get nothing
    old = placement.identity(L, 8, 16)
    new = placement.balance(load_LE, mesh.shape["ep"] * mesh.shape["tp"], 16, 3)
    assert np.any(old.experts_LQ[:, :8] != new.experts_LQ[:, :8])
    x, valid = data(mesh.shape["dp"] * mesh.shape["ep"], 7)["uneven"]
    on_mesh, _, _ = arguments(mesh, in_places(p, old, 3), x, valid)
    moved = placement.rearrange(on_mesh, old, new, mesh)
    assert all(getattr(on_mesh, name).is_deleted() for name in WEIGHTS)
    assert jax.tree.map(jax.typeof, moved) == jax.tree.map(jax.typeof, on_mesh)
    want, held = in_places(p, new, 3), new.experts_LQ != placement.NULL
    for name in WEIGHTS:
        np.testing.assert_array_equal(np.asarray(getattr(moved, name))[held], np.asarray(getattr(want, name))[held])
    got = compiled(mesh, CFG, ROUTES["gather_scatter"], moved)(moved, *arguments(mesh, p, x, valid)[1:])[0]
    np.testing.assert_array_equal(got, run(want, x, valid, mesh=mesh, route=ROUTES["gather_scatter"])[0])
    check(want, x, valid, mesh, ROUTES["gather_scatter"], whole=p)


@pytest.mark.parametrize("n", [FEW_ROWS, 24])
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float32])
def test_weights_of_another_dtype(dtype, n):
    """They are cast to that of the rows where they are used."""
    cfg, x = VARIANTS["Qwen3"], rows(n, jnp.bfloat16)
    p = weights(cfg)
    stored = p.replace(**{name: getattr(p, name).astype(dtype) for name in WEIGHTS})
    cast = stored.replace(**{name: getattr(stored, name).astype(jnp.bfloat16) for name in WEIGHTS})
    got, want = (run(p, x, np.ones(n, bool), cfg)[0] for p in (stored, cast))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS)
def test_bfloat16_sums_experts_in_float32(sizes):
    p, x = weights(dtype=jnp.bfloat16), rows(16, jnp.bfloat16)
    got, _, _ = run(p, x, np.ones(16, bool), mesh=make_mesh(*sizes))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(np.float32), expected(p, x, CFG), atol=0.02)


@pytest.mark.parametrize("kind", ["gather_scatter", "all_to_all"])
def test_float8_wire(kind):
    """Three bits of mantissa: a value is at most a sixteenth off, the product of gate and up an eighth."""
    mesh, route = make_mesh(ep=8), Route(kind=kind, wire="float8_e4m3fn")
    cfg = VARIANTS["Qwen3"]
    p, (x, valid) = weights(cfg), data(8, 7)["uneven"]
    x = x.at[jnp.array([7, 14, 15])].multiply(jnp.array([[0], [1e-3], [10]]))
    assert np.all(valid[[7, 14, 15]])
    got, _, _ = run(p, x, valid, cfg, mesh, route)
    want = expected(p, jnp.where(valid[:, None], x, 0), cfg)
    valid[7] = False  # a row of zeros, which gives zeros
    np.testing.assert_array_equal(got[~valid], 0)
    off = np.linalg.norm(got - want, axis=1)[valid] / np.linalg.norm(want, axis=1)[valid]
    assert off.max() < 1 / 8 and 0.005 < off.mean() < 1 / 16


def collectives(hlo):
    """Collectives of more than one device, by name. Groups: mesh['ep'=8,'tp'=1] {'tp'}, [8,1]<=[8] or {{0},{1}}."""
    count = collections.Counter()
    for line in hlo.splitlines():
        if m := re.search(r" (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(-start)?\(", line):
            groups = re.search(r"replica_groups=(mesh\[.*?\] \{.*?\}|\[\d+,\d+\]|\{\{.*?\})", line)
            count[m[1]] += groups is None or group_size(groups[1]) > 1
    return +count


def group_size(groups):
    if groups.startswith("mesh"):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", groups))
        return np.prod([int(sizes[axis]) for axis in re.findall(r"'(\w+)'", groups.split("] ")[1])])
    return int(re.findall(r"\d+", groups)[1]) if groups.startswith("[") else len(groups.split(","))


def hlo(mesh, route, T=16):
    p = weights()
    ranks = mesh.shape["dp"] * mesh.shape["ep"]
    args = arguments(mesh, p, rows(ranks * T), np.ones(ranks * T, bool))
    return compiled(mesh, CFG, route, p).lower(*args).compile().as_text()


@pytest.mark.parametrize(
    ("sizes", "route", "want"),
    [
        ((1, 8, 1), Route(), {"all-gather": 2, "reduce-scatter": 1}),
        ((1, 8, 1), Route(wire="float8_e4m3fn"), {"all-gather": 2, "reduce-scatter": 1}),
        ((1, 8, 1), Route(chunks=4), {"all-gather": 2, "reduce-scatter": 4}),
        ((1, 8, 1), Route(reduce="hierarchical", micro_batches=2), {"all-gather": 2, "collective-permute": 6}),
        ((1, 8, 1), Route(kind="all_to_all"), {"all-to-all": 3}),
        ((1, 4, 2), Route(), {"all-gather": 2, "reduce-scatter": 1, "all-reduce": 1}),
        ((1, 1, 4), Route(), {"all-reduce": 1}),
        ((1, 1, 1), Route(), {}),
    ],
)
def test_collectives_of_the_compiled_program(sizes, route, want):
    assert collectives(hlo(make_mesh(*sizes), route)) == want


def test_chunks_do_not_wait_for_each_other():
    """No reduce-scatter needs another's result, so that one travels while the next is summed."""
    needs, ops = {}, {}
    for line in hlo(make_mesh(ep=8), Route(chunks=4)).splitlines():
        if m := re.match(r"\s*(?:ROOT )?(%[\w.-]+) = .*? ([a-z][\w-]*)\((.*)", line):
            ops[m[1]], needs[m[1]] = m[2], re.findall(r"%[\w.-]+", m[3])

    def before(name):
        seen, todo = set(), [*needs[name]]
        while todo:
            if (n := todo.pop()) not in seen:
                seen.add(n)
                todo += needs.get(n, [])
        return seen

    scatters, gathers = ([n for n, op in ops.items() if op == kind] for kind in ("reduce-scatter", "all-gather"))
    assert len(scatters) == 4 and len(gathers) == 2
    assert all(set(gathers) <= before(s) for s in scatters)
    assert not any(before(s) & set(scatters) for s in scatters)


def test_ragged_exchange(monkeypatch):
    """Only filled slots are sent, a row once to a rank however many of its experts are there."""
    sent = []

    def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
        """What a TPU does, for a CPU, which cannot. Rows that are not received are NaN here."""
        jax.debug.callback(lambda s: sent.append(np.asarray(s)), send_sizes)
        me = jax.lax.axis_index(axis_name)
        gather = functools.partial(jax.lax.all_gather, axis_name=axis_name)
        operand, begin, size, at = map(gather, (operand, input_offsets, send_sizes, output_offsets))
        output = output * jnp.nan
        for source in range(jax.lax.axis_size(axis_name)):
            row = jnp.arange(len(output)) - at[source, me]
            received = (row >= 0) & (row < jnp.minimum(size[source, me], recv_sizes[source]))
            output = jnp.where(received[:, None], operand[source][begin[source, me] + row], output)
        return output

    monkeypatch.setattr(moe_routes.jax.lax, "ragged_all_to_all", ragged_all_to_all)
    mesh, p, (x, valid) = make_mesh(ep=4), weights(), data(4, 7)["uneven"]
    experts, _ = check(p, x, valid, mesh, Route(kind="all_to_all", ragged=True))
    jax.effects_barrier()
    ranks_of_rows = sum(len(set(row // 2)) for row in experts)  # two experts a rank
    assert len(sent) == 8 and np.sum(sent) == 2 * ranks_of_rows < 2 * experts.size


def test_auto_route():
    """All to all where it can exchange rows only, and a row of many reaches few of the ranks."""
    auto = Route(ragged=True)
    row = dict(experts_per_token=8, row_bytes=8192)
    assert [auto.resolve(64, ep, **row) for ep in (1, 8, 16, 32)] == [*["gather_scatter"] * 2, *["all_to_all"] * 2]
    assert auto.resolve(1, 16, **row) == "gather_scatter"
    assert Route().resolve(64, 32, **row) == "gather_scatter"
    assert Route(kind="all_to_all").resolve(1, 2, **row) == "all_to_all"
    assert Route(kind="all_to_all").resolve(1, 1, **row) == "gather_scatter"
    assert route_on(make_mesh(ep=8), chunks=2) == Route(chunks=2)
    assert route_on(make_mesh(ep=8), reduce="hierarchical").cube.corners == tuple(range(8))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"kind": "ring"}, "kind is 'ring', it must be one of auto, gather_scatter, all_to_all"),
        ({"wire": "int8"}, "wire is 'int8', it must be one of None, float8_e4m3fn"),
        ({"reduce": "tree"}, "reduce is 'tree', it must be one of xla, hierarchical"),
        ({"chunks": 0}, "chunks is 0, it must be at least 1"),
        ({"micro_batches": 0}, "micro_batches is 0, it must be at least 1"),
    ],
)
def test_refused_choices(choice, message):
    with pytest.raises(ValueError, match=message):
        Route(**choice)
