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
import zlib

import numpy as np
import pytest

pytestmark = pytest.mark.slow  # it writes 9 GB, which takes a minute

CONFIG = {
    "model_type": "qwen3_5_moe_text",
    "dtype": "bfloat16",
    "vocab_size": 32768,
    "hidden_size": 1024,
    "num_hidden_layers": 30,
    "layer_types": ["full_attention"] * 30,  # one stack: its leaves are fifteen times larger than any tensor
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 32,
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
    """The shape of each tensor, by name."""
    c = CONFIG
    D, E, M, H, V = (c[k] for k in ("hidden_size", "num_experts", "moe_intermediate_size", "head_dim", "vocab_size"))
    N, K = c["num_attention_heads"], c["num_key_value_heads"]
    layer = {
        "input_layernorm.weight": (D,),
        "post_attention_layernorm.weight": (D,),
        "self_attn.q_proj.weight": (2 * N * H, D),
        "self_attn.k_proj.weight": (K * H, D),
        "self_attn.v_proj.weight": (K * H, D),
        "self_attn.o_proj.weight": (D, N * H),
        "self_attn.q_norm.weight": (H,),
        "self_attn.k_norm.weight": (H,),
        "mlp.gate.weight": (E, D),
        "mlp.shared_expert_gate.weight": (1, D),
        "mlp.shared_expert.gate_proj.weight": (M, D),
        "mlp.shared_expert.up_proj.weight": (M, D),
        "mlp.shared_expert.down_proj.weight": (D, M),
        "mlp.experts.gate_up_proj": (E, 2 * M, D),
        "mlp.experts.down_proj": (E, D, M),
    }
    out = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}
    for i in range(c["num_hidden_layers"]):
        out |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return out


def write(folder):
    """Random bytes as bfloat16, in files of half a gigabyte. The bytes of the largest tensor, and of all."""
    folder.mkdir()
    noise = np.random.default_rng(0).bytes(2**27)
    sizes = {name: 2 * math.prod(shape) for name, shape in tensors().items()}
    files, room = [[]], 5 * 10**8
    for name, shape in tensors().items():
        if room < sizes[name]:
            files.append([])
            room = 5 * 10**8
        files[-1].append((name, shape))
        room -= sizes[name]
    weight_map = {}
    for i, listed in enumerate(files):
        file, header, end = f"model-{i:05d}.safetensors", {}, 0
        for name, shape in listed:
            start, end = end, end + sizes[name]
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            for name, _ in listed:
                at = zlib.crc32(name.encode()) % (len(noise) - sizes[name])
                f.write(memoryview(noise)[at : at + sizes[name]])
        weight_map |= dict.fromkeys(header, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return max(sizes.values()), sum(sizes.values())


def digests(folder):
    """A digest of each tensor."""
    out = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = np.memmap(file, np.uint8, "r")
        size = int.from_bytes(data[:8], "little")
        header = json.loads(bytes(data[8 : 8 + size]))
        header.pop("__metadata__", None)
        for name, t in header.items():
            start, end = (8 + size + at for at in t["data_offsets"])
            out[name] = t["shape"], zlib.crc32(data[start:end])
    assert out.keys() == tensors().keys()
    return out


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
        assert digests(back) == digests(source)
        print(f"\n{total / 1e9:.2f} GB, largest tensor {largest / 2**20:.0f} MiB, bound {bound / 2**20:.0f} MiB")
        for name, run in runs.items():
            held = ", ".join(f"{what} {run[what] / 2**20:.0f} MiB" for what in ("all", "anonymous", "baseline"))
            print(f"{name}: {held}, {run['seconds']:.1f} s")
        for name, run in runs.items():
            assert max(run["all"], run["anonymous"]) < bound, name
    finally:
        for folder in (source, orbax, back):
            shutil.rmtree(folder, ignore_errors=True)
