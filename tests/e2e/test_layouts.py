# SPDX-License-Identifier: Apache-2.0
"""Mesh invariance: every layout and route gives the tokens of one device, in float32.

A layout here serves a mixed load through the engine: prompts of one token and of several chunks, more requests than
run at once, then one alone, so that ranks are uneven and some have nothing. The pools start full of NaN: nothing may
be read before it is written, and what padding computes may reach nobody.
"""

import dataclasses
import functools
import queue

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_spmd.mesh.axes import make_mesh
from qwen_spmd.mesh.topology import axis_order
from qwen_spmd.serve.engine import Engine
from qwen_spmd.serve.request import Request, SamplingParams
from qwen_spmd.serve.sizes import EngineConfig
from qwen_spmd.serve.start import make_route

SIZES = {"max_num_batched_tokens": 64, "block_size": 16, "max_model_len": 96, "decode_window": 4}
LENGTHS = (1, 3, 40, 17, 2, 33, 5, 64, 9, 21, 12)

DENSE = {"tp=2": {"tp": 2}, "tp=4": {"tp": 4}, "dp=8": {"dp": 8}, "dp=2 tp=4": {"dp": 2, "tp": 4}}
MOE = {
    "ep=8": {"ep": 8},
    "ep=3, null experts": {"ep": 3},
    "tp=4": {"tp": 4},
    "ep=4 tp=2": {"ep": 4, "tp": 2},
    "dp=2 ep=2 tp=2": {"dp": 2, "ep": 2, "tp": 2},
    "ep=8, all_to_all": {"ep": 8, "moe_route": "all_to_all"},
}
ROUTES = {"hierarchical": {"moe_reduce": "hierarchical"}, "chunks": {"moe_chunks": 3}}
CASES = [(model, name, sizes) for model in ("qwen3", "qwen3_5") for name, sizes in DENSE.items()]
CASES += [(model, name, sizes) for model in ("qwen3_moe", "qwen3_5_moe") for name, sizes in MOE.items()]
BY_DEFAULT = {
    "qwen3 tp=4",
    "qwen3_5 dp=2 tp=4",
    "qwen3_moe ep=8",
    "qwen3_moe ep=8, all_to_all",
    "qwen3_5_moe ep=3, null experts",
    "qwen3_5_moe ep=4 tp=2",
    "qwen3_5_moe dp=2 ep=2 tp=2",
}
"""The others only with `-m slow`: each takes several compilations."""


def case(model, name, sizes):
    id = f"{model} {name}"
    return pytest.param(model, sizes, id=id, marks=[] if id in BY_DEFAULT else [pytest.mark.slow])


class Served:
    """An engine over an oracle, its pools full of NaN, and what it answers."""

    def __init__(self, folder, **options):
        config = EngineConfig(dtype="float32", compilation_cache=None, progress=False, **(SIZES | options))
        self.engine = Engine.load(folder, config)
        poison(self.engine)
        self.compiles = self.engine.stats().compiles
        self.outputs = queue.SimpleQueue()
        self.engine.deliver = self.outputs.put

    def run(self, requests):
        for request in requests:
            self.engine.submit(request)
        running, tokens = {r.id for r in requests}, {r.id: [] for r in requests}
        while running:
            for output in self.outputs.get(timeout=120):
                tokens[output.request.id] += output.tokens
                if output.finish_reason is not None:
                    assert output.finish_reason == "length", output.finish_reason
                    running.discard(output.request.id)
        return tokens

    def close(self):
        self.engine.stop()


def poison(engine):
    """NaN wherever a float of the state is."""

    state = engine._steps.state
    for name in ("kv", "conv", "rec"):
        x = getattr(state, name)
        if x is None:
            continue
        nan = jax.jit(lambda x=x: jnp.full_like(x, jnp.nan), out_shardings=x.sharding)()
        state = dataclasses.replace(state, **{name: nan})
    engine._steps.state = state


def check_load(engine):
    """Each MoE layer has counted every computed token once for each of its experts, none for padding."""
    load, moe = engine._steps.state.load, engine.cfg.moe
    if moe is None:
        assert load is None
    else:
        of_layers = np.asarray(load).sum((0, 2))
        assert of_layers.tolist() == [engine.stats().scheduled_tokens * moe.experts_per_token] * engine.cfg.num_layers


def requests(vocabulary):
    rng = np.random.default_rng(0)
    out = []
    for i, length in enumerate(LENGTHS):
        prompt = [int(t) for t in rng.integers(0, vocabulary, length)]
        params = SamplingParams(temperature=0.0 if i % 3 else 0.9, max_tokens=5 + i)
        out.append(Request(id=str(i), prompt=prompt, params=params, seed=i, max_len=length + 5 + i))
    return out


def answers(folder, vocabulary, **options):
    """Tokens of all requests at once; one of them alone must get the same."""
    served = Served(folder, **options)
    try:
        together = served.run(requests(vocabulary))
        alone = served.run([dataclasses.replace(requests(vocabulary)[2], id="alone")])
        stats = served.engine.stats()
        assert stats.compiles == served.compiles
        assert (stats.kv_usage, stats.slot_usage, stats.running) == (0, 0, 0)
        for blocks in served.engine._scheduler.blocks:
            blocks.check([])
        check_load(served.engine)
    finally:
        served.close()
    assert alone["alone"] == together["2"]
    return together


@pytest.fixture(scope="module")
def single(oracle):
    """Answers on one device, other chunks and windows than those of the layouts."""

    @functools.cache
    def get(name):
        o = oracle(name)
        return answers(o.folder, o.cfg.vocab_size, max_num_seqs=4, max_num_batched_tokens=32)

    return get


@pytest.mark.parametrize(("model", "sizes"), [case(*c) for c in CASES])
def test_every_layout_gives_the_tokens_of_one_device(oracle, single, model, sizes):
    o = oracle(model)
    limits = {"max_num_seqs": 9, "max_num_batched_tokens": 63} if sizes.get("ep") == 3 else {"max_num_seqs": 8}
    assert answers(o.folder, o.cfg.vocab_size, **limits, **sizes) == single(model)


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_every_route_gives_the_tokens_of_one_device(oracle, single, route):
    o = oracle("qwen3_moe")
    assert answers(o.folder, o.cfg.vocab_size, max_num_seqs=8, ep=8, **route) == single("qwen3_moe")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "sizes"),
    [("qwen3", {"tp": 2}), ("qwen3_5", {"tp": 2}), ("qwen3_moe", {"ep": 2}), ("qwen3_5_moe", {"ep": 2})],
    ids=["qwen3 tp=2", "qwen3_5 tp=2", "qwen3_moe ep=2", "qwen3_5_moe ep=2"],
)
def test_two_devices_give_the_tokens_of_transformers(oracle, model, sizes):
    """On whatever platform there is: on GPUs `pytest -m slow -k two_devices` goes through NCCL."""
    o = oracle(model)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 128, "max_model_len": 320, "block_size": 64}
    served = Served(o.folder, **(limits | sizes))
    try:
        asked = []
        for length in (5, 65, 257):
            prompt = [int(t) for t in o.npz[f"p{length}/input_ids"].ravel()]
            params = SamplingParams(temperature=0.0, max_tokens=32)
            asked.append(Request(id=str(length), prompt=prompt, params=params, max_len=length + 32))
        tokens = served.run(asked)
    finally:
        served.close()
    assert tokens == {str(length): o.npz[f"p{length}/greedy_ids"].tolist() for length in (5, 65, 257)}


@pytest.mark.parametrize(
    ("options", "route"),
    [
        ({"moe_route": "all_to_all"}, {"kind": "all_to_all"}),
        ({"moe_wire": "fp8", "moe_chunks": 2}, {"wire": "float8_e4m3fn", "chunks": 2}),
        ({"moe_reduce": "hierarchical"}, {"reduce": "hierarchical", "micro_batches": 2, "cube": axis_order(8)}),
    ],
    ids=["all_to_all", "fp8 in chunks", "hierarchical"],
)
def test_programs_take_the_route_that_is_asked_for(options, route):
    got = make_route(make_mesh(1, 8, 1), EngineConfig(ep=8, **options))
    assert {name: getattr(got, name) for name in route} == route


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ep": 8, "max_num_seqs": 12}, "max_num_seqs is 12, it must be a multiple of the 8 ranks, such as 8 or 16"),
        ({"ep": 8, "num_pages": 4}, "num_pages is 4, it must be a multiple of the 8 ranks, such as 8"),
        (
            {"ep": 8, "max_num_seqs": 16, "max_num_batched_tokens": 8},
            "max_num_batched_tokens is 8, .*max_num_seqs .16",
        ),
        ({"ep": 2, "num_pages": 4, "max_model_len": 256}, "max_model_len is 256, .* lower it, or raise num_pages .4"),
        ({"ep": 16, "tp": 2}, "ep . tp is 32, it must be at most the 16 experts"),
        ({"ep": 8, "tp": 3}, "tp is 3, .*; valid sizes are 1, 2$"),
        ({"dp": 9}, "mesh: dp=9 ep=1 tp=1 needs 9 devices, there are 8"),
        ({"tp": 2, "moe_route": "all_to_all"}, "moe_route is 'all_to_all', with ep=1 nothing travels"),
    ],
)
def test_what_does_not_fit_is_refused(oracle, options, said):
    o = oracle("qwen3_5_moe")
    config = EngineConfig(dtype="float32", compilation_cache=None, progress=False, block_size=16, **options)
    with pytest.raises(ValueError, match=said):
        Engine.load(o.folder, config)
