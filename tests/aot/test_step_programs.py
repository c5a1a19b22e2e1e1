# SPDX-License-Identifier: Apache-2.0
"""The compiled step programs: state updated in place, nothing of the host inside, and they compile for a TPU, too."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from qwen_spmd import params
from qwen_spmd.config import load_config
from qwen_spmd.mesh.axes import AXES, make_mesh
from qwen_spmd.mesh.rules import layout
from qwen_spmd.plan.compile import Target, compile_steps
from qwen_spmd.plan.presets import MODELS_DIR
from qwen_spmd.serve.sizes import Shapes
from qwen_spmd.serve.step import Steps

FOLDER = Path(__file__).parents[1] / "oracles" / "qwen3_5_moe"
RAGGED, WINDOW = (32, 8), 8
# A pool far bigger than what a step of 32 tokens needs besides.
SHAPES = Shapes(page_size=64, pages=1000, slots=65, pages_per_seq=8, window=4, ragged=(RAGGED,), windows=(WINDOW,))


def make_steps(mesh) -> Steps:
    """Steps without any array, so that the mesh may be of devices that are not there."""
    cfg, sizes = load_config(FOLDER), dict(mesh.shape)
    plan = layout(cfg.dims(), **sizes)
    put = lambda s, spec: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, spec))  # noqa: E731
    weights = jax.tree.map(put, params.abstract(cfg, jnp.bfloat16, plan), params.specs(cfg, plan))
    return Steps(cfg, weights, mesh, plan, SHAPES, jnp.bfloat16, jnp.float32)


def share(steps: Steps):
    """One device's part of the state."""
    local = lambda s: jax.ShapeDtypeStruct(s.sharding.shard_shape(s.shape), s.dtype)  # noqa: E731
    return jax.tree.map(local, steps.abstract_state)


@pytest.fixture(scope="module", params=[(1, 1, 1), (1, 4, 2)], ids=["one device", "ep=4 tp=2"])
def steps(request):
    return make_steps(make_mesh(*request.param))


@pytest.fixture(scope="module", params=[RAGGED, WINDOW], ids=["ragged", "window"])
def lowered(request, steps):
    return steps.lower(request.param)


@pytest.fixture(scope="module")
def compiled(lowered):
    return lowered.compile()


def test_state_is_updated_in_place(compiled, steps):
    """Every array of the state is an output in its own memory, and nothing as big as a pool is made besides."""
    state = share(steps)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.alias_size_in_bytes == params.num_bytes(state)
    aliases = re.search(r"input_output_alias=\{(.*?) \}, entry", text)
    assert aliases and aliases[1].count("alias)") == len(jax.tree.leaves(state))
    assert memory.temp_size_in_bytes < params.num_bytes((state.kv, state.rec)) / 10
    for pool in (state.kv, state.conv, state.rec):
        shape = {"bfloat16": "bf16", "float32": "f32"}[pool.dtype.name] + str(list(pool.shape)).replace(" ", "")
        assert shape in text
        assert not re.search(rf"= {re.escape(shape)}\S* copy\(", text)


def test_one_program_that_needs_no_host(compiled):
    text = compiled.as_text()
    assert len(re.findall(r"^ENTRY ", text, re.M)) == 1
    assert not re.findall(r" (infeed|outfeed|send|recv)\(", text)
    assert not re.findall(r'custom_call_target="\w*(?:callback|[Hh]ost)\w*"', text)


def test_all_mesh_axes_exist(lowered, steps):
    assert steps.mesh.axis_names == AXES == ("dp", "ep", "tp")
    sizes = ", ".join(f'"{axis}"={size}' for axis, size in steps.mesh.shape.items())
    assert f"[{sizes}]" in lowered.as_text()


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("sizes", [{"ep": 8}, {"ep": 4, "tp": 2}], ids=["ep=8", "ep=4 tp=2"])
def test_real_sizes_compile_for_a_tpu_without_copies(tmp_path, sizes):
    """Qwen3.5-35B-A3B with four of its layers: its matrices and pools have the tiles of the memory there."""
    config = json.loads((MODELS_DIR / "qwen3.5-35b-a3b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    target = Target(
        model=str(tmp_path),
        topology="tpu7x:2x2x1",
        **{"dp": 1, "ep": 1, "tp": 1} | sizes,
        dtype="bfloat16",
        weight_dtype="bfloat16",
        state_dtype="float32",
        page_size=256,
        pages=257,
        slots=33,
        pages_per_seq=32,
        window=8,
        keys=(8, (256, 8)),
    )
    window, ragged = compile_steps(target)
    assert window.problems == []
    # One layer's queries may be laid out anew where there are many rows. Small arrays are taken for one another.
    assert [c for c in ragged.copies if c.bytes > 4e6 and not c.of.startswith("a layer of ")] == []
    for program in (window, ragged):
        assert program.aliased >= program.state
