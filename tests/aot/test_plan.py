# SPDX-License-Identifier: Apache-2.0
"""The plan's view of compiled step programs: on emulated devices, and through the TPU's compiler where that is."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from qwen_spmd.plan.__main__ import main
from qwen_spmd.plan.compile import Target, build, compile_key
from qwen_spmd.plan.hlo import Module

ORACLE = Path(__file__).parents[1] / "oracles" / "qwen3_5_moe"
RAGGED, WINDOW = (32, 4), 4
TARGET = Target(
    model=str(ORACLE),
    topology="tpu7x:2x2x1",
    dp=1,
    ep=4,
    tp=2,
    dtype="float32",  # a CPU computes bfloat16 in it, collectives too
    weight_dtype="float8_e4m3fn",
    state_dtype="float32",
    page_size=64,
    pages=64,
    slots=5,
    pages_per_seq=8,
    window=4,
    keys=(WINDOW, RAGGED),
)
LAYERS = 8
TPU = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


@pytest.fixture(scope="module")
def program():
    """The decode window over four ranks of two devices, with 8-bit weights."""
    return compile_key(build(TARGET, jax.devices()[:8]), WINDOW)


def test_collectives_of_a_decode_iteration(program):
    """Two all-gathers and one reduce-scatter of each MoE layer over the ranks; the rest is over tp or tiny."""
    row, X = 64 * 4, 4
    ranks = {(c.kind, c.result_bytes) for c in program.collectives if c.group == 4 and c.count == LAYERS}
    gathered = {("all-gather", 4 * WINDOW * row), ("all-gather", 4 * WINDOW * 2 * X * 4)}
    assert ranks == gathered | {("reduce-scatter", WINDOW * row)}
    # Each layer's mixer and feed-forward over tp, and the embedding.
    assert sum(c.count for c in program.collectives if c.kind == "all-reduce" and c.group == 2) == 2 * LAYERS + 1
    assert len([c for c in program.collectives if c.kind == "all-gather" and c.group == 2]) == 1  # logits


def test_state_is_in_place_and_counted(program):
    steps = build(TARGET, jax.devices()[:8])
    parts = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(steps.abstract_state)]
    sizes = [x.dtype.itemsize for x in jax.tree.leaves(steps.abstract_state)]
    assert program.state == sum(int(jnp.prod(jnp.array(p))) * n for p, n in zip(parts, sizes, strict=True))
    assert program.aliased == program.state and program.problems == []
    broken = dataclasses.replace(program, aliased=program.aliased - 5_000_000)
    assert broken.problems == ["5.0 MB of the state are not updated in place"]


def test_programs_have_the_route_that_is_asked_for():
    asked = dataclasses.replace(TARGET, moe_route="all_to_all", moe_wire="fp8")
    route = build(asked, jax.devices()[:8]).route
    assert (route.kind, route.wire, route.ragged) == ("all_to_all", "float8_e4m3fn", False)
    assert build(TARGET, jax.devices()[:8]).route.kind == "auto"


def test_a_copy_of_the_state_is_found():
    """Not donated: XLA has to copy the pool before it writes a row."""
    pool = jax.ShapeDtypeStruct((4, 1024, 256), jnp.float32)
    write = lambda pool: pool.at[1, 3].set(0)  # noqa: E731
    for donate, found in (((), ["state.kv"]), ((0,), [])):
        text = jax.jit(write, donate_argnums=donate).lower(pool).compile().as_text()
        assert [c.of for c in Module(text).copies({"state.kv": pool.shape})] == found


@TPU
def test_plan_compiles_for_a_tpu(tmp_path, capsys):
    """From the command line to the compiler and back."""
    file = tmp_path / "plan.json"
    argv = ["--model", str(ORACLE), "--topology", "tpu7x:2x2x1", "--isl", "384", "--osl", "128", "--concurrency", "64"]
    argv += ["--page-size", "64", "--max-num-batched-tokens", "32", "--compile", "--json", str(file)]
    assert main(argv) == 0
    plan, text = json.loads(file.read_text()), capsys.readouterr().out
    assert [p["key"] for p in plan["programs"]] == [8, [32, 8]]
    assert "COMPILED decode window of 8 sequences a rank" in text
    assert plan["memory"]["temporaries"] == max(p["temporaries"] + p["code"] for p in plan["programs"])
    for p in plan["programs"]:
        assert p["aliased"] >= p["state"] > 0
    # 32 rows of each of 8 ranks go to the experts of all, with 4 ids and 4 weights, and come back.
    found = {(c["kind"], c["result_bytes"]): c["count"] for c in plan["programs"][1]["collectives"]}
    rows, row = 8 * 32, 64 * 2
    assert found["all-gather", rows * row] == found["all-gather", rows * 8 * 4] == LAYERS
    assert found["reduce-scatter", 32 * row] == LAYERS
