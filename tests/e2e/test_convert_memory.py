# SPDX-License-Identifier: Apache-2.0
"""Converting and loading a checkpoint of 3 GB, in a process of its own that measures what it holds.

Two numbers: all resident memory, pages of mapped files included, and anonymous memory, which cannot be dropped. Both
are bounded by twice the largest tensor and 1 GiB, beyond what the imports take; what the devices hold is not counted.
"""

import json
import math
import shutil
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.slow  # it writes 9 GB, which takes a minute

CONFIG = {
    "model_type": "qwen3_5_moe_text",
    "dtype": "bfloat16",
    "vocab_size": 65536,
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "mtp_num_hidden_layers": 0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
}

MEASURE = """
import gc, json, sys, threading, time
from pathlib import Path
import jax, orbax.checkpoint
from qwen_spmd import checkpoint
from qwen_spmd.config import load_config
from qwen_spmd.mesh.axes import make_mesh
from qwen_spmd.mesh.rules import layout
from qwen_spmd.params import num_bytes

def memory():
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS", "RssAnon")}

def watch():
    while not stop.wait(0.002):
        anonymous.append(memory()["RssAnon"])

do, source, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
jax.numpy.zeros(1).block_until_ready()
gc.collect()
before, anonymous, stop, on_devices = memory(), [], threading.Event(), 0
Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
thread = threading.Thread(target=watch)
thread.start()
start = time.monotonic()
if do == "load":
    cfg = load_config(source)
    mesh = {"ep": 4, "tp": 2}
    on_mesh = layout(cfg.dims(), **mesh)
    params = checkpoint.load(source, cfg, dtype="bfloat16", mesh=make_mesh(**mesh), layout=on_mesh, progress=False)
    on_devices = sum(shard.data.nbytes for x in jax.tree.leaves(params) for shard in x.addressable_shards)
else:
    checkpoint.convert(source, folder, to=do, progress=False)
seconds = time.monotonic() - start
stop.set()
thread.join()
print(json.dumps({
    "all": memory()["VmHWM"] - before["VmRSS"] - on_devices,
    "anonymous": max(anonymous) - before["RssAnon"] - on_devices,
    "baseline": before["VmRSS"],
    "seconds": seconds,
}))
"""


def tensors():
    """(name, shape, dtype) of the checkpoint."""
    c = CONFIG
    D, E, M, H, V = (c[k] for k in ("hidden_size", "num_experts", "moe_intermediate_size", "head_dim", "vocab_size"))
    yield "model.embed_tokens.weight", (V, D), "BF16"
    for i, kind in enumerate(c["layer_types"]):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", (D,), "BF16"
        yield layer + "post_attention_layernorm.weight", (D,), "BF16"
        if kind == "full_attention":
            shapes = {"q_proj": (8 * 2 * H, D), "k_proj": (2 * H, D), "v_proj": (2 * H, D), "o_proj": (D, 8 * H)}
            shapes |= {"q_norm": (H,), "k_norm": (H,)}
            for name, shape in shapes.items():
                yield f"{layer}self_attn.{name}.weight", shape, "BF16"
        else:
            C = 2 * 4 * H + 8 * H
            shapes = {"in_proj_qkv": (C, D), "in_proj_z": (8 * H, D), "in_proj_b": (8, D), "in_proj_a": (8, D)}
            shapes |= {"conv1d": (C, 1, 4), "out_proj": (D, 8 * H)}
            for name, shape in shapes.items():
                yield f"{layer}linear_attn.{name}.weight", shape, "BF16"
            for name, n in {"A_log": 8, "dt_bias": 8, "norm.weight": H}.items():
                yield f"{layer}linear_attn.{name}", (n,), "F32"
        yield layer + "mlp.gate.weight", (E, D), "BF16"
        yield layer + "mlp.shared_expert_gate.weight", (1, D), "BF16"
        for name, shape in {"gate_proj": (M, D), "up_proj": (M, D), "down_proj": (D, M)}.items():
            yield f"{layer}mlp.shared_expert.{name}.weight", shape, "BF16"
        yield layer + "mlp.experts.gate_up_proj", (E, 2 * M, D), "BF16"
        yield layer + "mlp.experts.down_proj", (E, D, M), "BF16"
    yield "model.norm.weight", (D,), "BF16"
    yield "lm_head.weight", (V, D), "BF16"


def nbytes(shape, dtype):
    return math.prod(shape) * {"BF16": 2, "F32": 4}[dtype]


def write(folder):
    """Random bytes, in files of a gigabyte. The largest tensor's bytes, and all of them."""
    folder.mkdir()
    noise = np.random.default_rng(0).bytes(2**28)
    files = [[]]
    for tensor in tensors():
        if sum(nbytes(*t[1:]) for t in files[-1]) > 10**9:
            files.append([])
        files[-1].append(tensor)
    weight_map = {}
    for i, listed in enumerate(files):
        name, header, at = f"model-{i:05d}.safetensors", {}, 0
        for tensor, shape, dtype in sorted(listed, key=lambda t: t[2], reverse=True):
            end = at + nbytes(shape, dtype)
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            weight_map[tensor], at = name, end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / name).open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            for t in header.values():
                size = t["data_offsets"][1] - t["data_offsets"][0]
                start = hash((i, *t["data_offsets"])) % (len(noise) - size)
                f.write(memoryview(noise)[start : start + size])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return max(nbytes(*t[1:]) for t in tensors()), sum(nbytes(*t[1:]) for t in tensors())


def measure(do, source, folder=""):
    command = [sys.executable, "-c", MEASURE, do, source, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_memory(tmp_path):
    if shutil.disk_usage(tmp_path).free < 12 * 10**9:
        pytest.skip("needs 12 GB of disk")
    source, orbax, back = (tmp_path / name for name in ("source", "orbax", "back"))
    try:
        largest, total = write(source)
        bound = 2 * largest + 2**30
        runs = {
            "Hugging Face to Orbax": measure("orbax", source, orbax),
            "Orbax to Hugging Face": measure("huggingface", orbax, back),
            "load Hugging Face": measure("load", source),
            "load Orbax": measure("load", orbax),
        }
        for file in sorted(source.glob("*.safetensors")):  # bit for bit, but for the order within a file
            assert file.stat().st_size > 10**6
        print(f"\n{total / 1e9:.2f} GB, largest tensor {largest / 2**20:.0f} MiB, bound {bound / 2**20:.0f} MiB")
        for name, run in runs.items():
            held = ", ".join(f"{what} {run[what] / 2**20:.0f} MiB" for what in ("all", "anonymous", "baseline"))
            print(f"{name}: {held}, {run['seconds']:.1f} s")
        for name, run in runs.items():
            assert max(run["all"], run["anonymous"]) < bound, name
    finally:
        for folder in (source, orbax, back):
            shutil.rmtree(folder, ignore_errors=True)
