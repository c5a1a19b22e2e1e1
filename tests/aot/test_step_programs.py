# SPDX-License-Identifier: Apache-2.0
"""The compiled step programs: state updated in place, nothing of the host inside, and they compile for a TPU, too.

Run as a script, this file does the compilation for a TPU, in a process of its own: libtpu wants its own environment.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from qwen_spmd import params
from qwen_spmd.config import load_config
from qwen_spmd.mesh.axes import AXES, make_mesh
from qwen_spmd.mesh.rules import layout
from qwen_spmd.serve.sizes import Shapes
from qwen_spmd.serve.step import Steps

FOLDER = Path(__file__).parents[1] / "oracles" / "qwen3_5_moe"
RAGGED, WINDOW = (32, 8), 8
# A pool far bigger than what a step of 32 tokens needs besides.
SHAPES = Shapes(page_size=64, pages=1000, slots=65, pages_per_seq=8, window=4, ragged=(RAGGED,), windows=(WINDOW,))
TPU = "tpu7x:2x2x1"


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
def test_compiles_for_tpu():
    env = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_LOG_DIR": "disabled"}
    env |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300)
    assert out.returncode == 0, out.stderr[-4000:]
    for program in json.loads(out.stdout.splitlines()[-1]):
        # The arrays are padded to the tiles of the memory there.
        assert program["alias"] >= program["state"]
        assert program["temporary"] < program["state"] / 4, "a pool is copied"


if __name__ == "__main__":
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=TPU).devices
    programs = []
    for sizes in ((1, 1, 1), (1, 8, 1), (1, 4, 2)):
        tpu_steps = make_steps(make_mesh(*sizes, devices=devices))
        state_bytes = params.num_bytes(share(tpu_steps))
        for key in (RAGGED, WINDOW):
            memory = tpu_steps.lower(key).compile().memory_analysis()
            temporary = memory.temp_size_in_bytes
            programs.append({"alias": memory.alias_size_in_bytes, "state": state_bytes, "temporary": temporary})
    print(json.dumps(programs))
