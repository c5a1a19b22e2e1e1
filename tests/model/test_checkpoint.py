# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: layouts against the raw files, every refusal, every form and prefix, round trips, placement."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from qwen_spmd import checkpoint
from qwen_spmd import params as params_lib
from qwen_spmd.checkpoint import pieces
from qwen_spmd.config import load_config
from qwen_spmd.mesh.axes import make_mesh
from qwen_spmd.mesh.rules import layout
from qwen_spmd.params import abstract, num_bytes

ORACLES = ["qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"]
FLOAT32 = ("A_log", "dt_bias", "linear_attn.norm.weight")
NESTED = "model.language_model."
INDEX = "model.safetensors.index.json"


def load(folder, cfg, dtype="bfloat16", **more):
    return checkpoint.load(folder, cfg, dtype=dtype, progress=False, **more)


def read(folder) -> dict[str, np.ndarray]:
    """All tensors of a folder, as they are on disk."""
    out = {}
    for file in sorted(folder.glob("*.safetensors")):
        out |= load_file(file)
    return out


def write(folder, *shards: dict[str, np.ndarray]):
    """A folder with the shards and their index; one shard needs none."""
    folder.mkdir(exist_ok=True)
    names = [f"model-{i}.safetensors" for i in range(len(shards))] if len(shards) > 1 else ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        save_file({k: np.ascontiguousarray(v) for k, v in shard.items()}, folder / name)
    if len(shards) > 1:
        weight_map = {k: name for name, shard in zip(names, shards, strict=True) for k in shard}
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def same(a, b):
    """Two Params bit by bit, dtypes too."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype, path
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=jax.tree_util.keystr(path))


def random(cfg, dtype):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32).astype(x.dtype), abstract(cfg, dtype))


def refusal(folder, cfg, **more) -> str:
    with pytest.raises(ValueError) as e:
        load(folder, cfg, **more)
    assert str(folder) in str(e.value)
    return str(e.value)


@pytest.fixture
def moe(oracle, tmp_path):
    """(folder to write to, cfg, tensors of the Qwen3.5 MoE oracle)."""
    folder, cfg, _ = oracle("qwen3_5_moe")
    return tmp_path / "ckpt", cfg, read(folder)


def unfuse(tensors, only=lambda name: True):
    out = {}
    for name, x in tensors.items():
        if name.endswith("experts.gate_up_proj") and only(name):
            for e, (gate, up) in enumerate(x.reshape(x.shape[0], 2, -1, x.shape[2])):
                out[name.replace("gate_up_proj", f"{e}.gate_proj.weight")] = gate
                out[name.replace("gate_up_proj", f"{e}.up_proj.weight")] = up
        elif name.endswith("experts.down_proj") and only(name):
            out |= {name.replace("down_proj", f"{e}.down_proj.weight"): down for e, down in enumerate(x)}
        else:
            out[name] = x
    return out


# ---------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_shapes_and_dtypes(oracle, name, dtype):
    folder, cfg, _ = oracle(name)
    params = load(folder, cfg, dtype)
    want = abstract(cfg, dtype)
    assert jax.tree.structure(params) == jax.tree.structure(want)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), want)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_query_and_gate_alternate_by_head(oracle, name):
    folder, cfg, _ = oracle(name)
    params, disk, H = load(folder, cfg), read(folder), cfg.head_dim
    for i, layer in enumerate((3, 7)):  # the second run of the pattern
        rows = disk[f"{NESTED}layers.{layer}.self_attn.q_proj.weight"]
        mixer = params.blocks[1].mixer
        for n in range(cfg.num_heads):
            np.testing.assert_array_equal(mixer.w_q[i, :, n], rows[2 * n * H : (2 * n + 1) * H].T)
            np.testing.assert_array_equal(mixer.w_gate[i, :, n], rows[(2 * n + 1) * H : 2 * (n + 1) * H].T)
        k, o = (disk[f"{NESTED}layers.{layer}.self_attn.{x}_proj.weight"] for x in "ko")
        np.testing.assert_array_equal(mixer.w_k[i, :, 1], k[H:].T)
        np.testing.assert_array_equal(mixer.w_o[i, 2], o[:, 2 * H : 3 * H].T)


def test_query_without_gate(oracle):
    folder, cfg, _ = oracle("qwen3")
    params, disk = load(folder, cfg), read(folder)
    assert params.blocks[0].mixer.w_gate is None
    for layer in range(4):
        rows = disk[f"model.layers.{layer}.self_attn.q_proj.weight"].reshape(8, 32, 64)
        np.testing.assert_array_equal(params.blocks[0].mixer.w_q[layer], rows.transpose(2, 0, 1))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_channels_are_grouped_by_key_head(oracle, name):
    folder, cfg, _ = oracle(name)
    params, disk, gdn = load(folder, cfg), read(folder), cfg.gated_delta
    J, U, Y, Z = gdn.key_heads, gdn.value_heads, gdn.key_dim, gdn.value_dim
    mixer = params.blocks[0].mixer
    for i, layer in enumerate((0, 1, 2, 4, 5, 6)):  # the first run of the pattern, both periods
        qkv = disk[f"{NESTED}layers.{layer}.linear_attn.in_proj_qkv.weight"]
        conv = disk[f"{NESTED}layers.{layer}.linear_attn.conv1d.weight"]
        for rows, ours in ((qkv, mixer.w_qkv[i]), (conv[:, 0], mixer.conv[i])):
            q, k, v = np.split(rows, [J * Y, 2 * J * Y])
            groups = []
            for j in range(J):  # the query and the key of a head, then its value heads
                groups += [q[j * Y : (j + 1) * Y], k[j * Y : (j + 1) * Y]]
                groups += [v[u * Z : (u + 1) * Z] for u in range(U) if u // (U // J) == j]
            np.testing.assert_array_equal(ours, np.concatenate(groups).T)
        z = disk[f"{NESTED}layers.{layer}.linear_attn.in_proj_z.weight"]
        out = disk[f"{NESTED}layers.{layer}.linear_attn.out_proj.weight"]
        np.testing.assert_array_equal(mixer.w_z[i, :, 3], z[3 * Z : 4 * Z].T)
        np.testing.assert_array_equal(mixer.w_o[i, 3], out[:, 3 * Z : 4 * Z].T)
        np.testing.assert_array_equal(mixer.a_log[i], disk[f"{NESTED}layers.{layer}.linear_attn.A_log"])


def test_experts_and_mtp(moe):
    folder, cfg, disk = moe
    params = load(write(folder, disk), cfg)
    M, D, e = cfg.moe.width, cfg.hidden_size, 5
    gate_up, down = (disk[f"{NESTED}layers.6.mlp.experts.{x}_proj"] for x in ("gate_up", "down"))
    ffn = params.blocks[0].ffn  # of layers 0, 1, 2, 4, 5, 6
    np.testing.assert_array_equal(ffn.w_gate[5, e], gate_up[e, :M].T)
    np.testing.assert_array_equal(ffn.w_up[5, e], gate_up[e, M:].T)
    np.testing.assert_array_equal(ffn.w_down[5, e], down[e].T)
    np.testing.assert_array_equal(ffn.w_router[5], disk[f"{NESTED}layers.6.mlp.gate.weight"].T)
    np.testing.assert_array_equal(ffn.w_shared_gate[5], disk[f"{NESTED}layers.6.mlp.shared_expert_gate.weight"][0])
    np.testing.assert_array_equal(ffn.shared.w_down[5], disk[f"{NESTED}layers.6.mlp.shared_expert.down_proj.weight"].T)
    np.testing.assert_array_equal(params.mtp.w_embedding, disk["mtp.fc.weight"][:, :D].T)
    np.testing.assert_array_equal(params.mtp.w_hidden, disk["mtp.fc.weight"][:, D:].T)
    np.testing.assert_array_equal(params.mtp.norm, disk["mtp.norm.weight"])
    np.testing.assert_array_equal(
        params.mtp.block.ffn.w_up[0, e], disk[f"mtp.layers.0.mlp.experts.{e}.up_proj.weight"].T
    )
    np.testing.assert_array_equal(params.norm, disk[f"{NESTED}norm.weight"])


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_decays_stay_float32(moe, stored):
    """A_log, dt_bias and the norm after Gated DeltaNet, whatever is asked and whatever is in the file."""
    folder, cfg, disk = moe
    if stored == "float32":  # a value that bfloat16 cannot hold
        disk = {k: v.astype(np.float32) + np.float32(2**-20) if k.endswith(FLOAT32) else v for k, v in disk.items()}
    else:
        disk = {k: v.astype(ml_dtypes.bfloat16) if k.endswith(FLOAT32) else v for k, v in disk.items()}
    mixer = load(write(folder, disk), cfg, "bfloat16").blocks[0].mixer
    assert mixer.w_qkv.dtype == jnp.bfloat16
    for ours, theirs in zip((mixer.a_log, mixer.dt_bias, mixer.norm), FLOAT32, strict=True):
        name = next(k for k in disk if k.startswith(f"{NESTED}layers.5.") and k.endswith(theirs))
        assert ours.dtype == jnp.float32
        np.testing.assert_array_equal(ours[4], disk[name].astype(np.float32))


def test_float16_files(oracle, tmp_path):
    folder, cfg, _ = oracle("qwen3")
    disk = {k: v.astype(np.float16) for k, v in read(folder).items()}
    params = load(write(tmp_path / "f16", disk), cfg, "float32")
    np.testing.assert_array_equal(params.embed, disk["model.embed_tokens.weight"].astype(np.float32))


# ------------------------------------------------------------------------------------------------- forms and prefixes


@pytest.mark.parametrize("prefix", ["model.", "language_model.model."])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_prefixes(oracle, tmp_path, name, prefix):
    folder, cfg, _ = oracle(name)
    disk = {k.replace(NESTED, prefix): v for k, v in read(folder).items()}
    same(load(write(tmp_path / "ckpt", disk), cfg), load(folder, cfg))
    if name == "qwen3_5_moe" and prefix == "language_model.model.":
        disk["language_model.lm_head.weight"] = disk.pop("lm_head.weight")
        same(load(write(tmp_path / "head", disk), cfg), load(folder, cfg))


def test_vision_is_skipped(moe):
    folder, cfg, disk = moe
    assert any(k.startswith("model.visual.") for k in disk)
    bare = {k: v for k, v in disk.items() if not k.startswith("model.visual.")}
    same(load(write(folder, bare), cfg), load(write(folder.with_name("all"), disk), cfg))
    other = {k.removeprefix("model.") if "visual" in k else k: v for k, v in disk.items()}
    same(load(write(folder.with_name("other"), other), cfg), load(folder, cfg))


def test_expert_forms(moe):
    """Fused, one by one, and a mixture by layer are the same parameters."""
    folder, cfg, disk = moe
    fused = load(write(folder, disk), cfg)
    same(fused, load(write(folder.with_name("apart"), unfuse(disk)), cfg))
    mixed = unfuse(disk, lambda name: ".layers.2." in name)
    assert len(disk) < len(mixed) < len(unfuse(disk))
    same(fused, load(write(folder.with_name("mixed"), mixed), cfg))
    e = cfg.moe.num_experts
    expert = "mtp.layers.0.mlp.experts.{}.{}_proj.weight"
    mtp = {k: v for k, v in disk.items() if ".experts." not in k or not k.startswith("mtp.")}
    mtp["mtp.layers.0.mlp.experts.gate_up_proj"] = np.stack(
        [np.concatenate([disk[expert.format(i, "gate")], disk[expert.format(i, "up")]]) for i in range(e)]
    )
    mtp["mtp.layers.0.mlp.experts.down_proj"] = np.stack([disk[expert.format(i, "down")] for i in range(e)])
    same(fused, load(write(folder.with_name("mtp"), mtp), cfg))


def test_mtp_off(moe):
    folder, cfg, disk = moe
    write(folder, disk)
    want = load(folder, cfg).replace(mtp=None)
    same(load(folder, cfg, mtp=False), want)
    same(load(folder, dataclasses.replace(cfg, mtp=False)), want)  # tensors that the config does not know of
    bare = write(folder.with_name("bare"), {k: v for k, v in disk.items() if not k.startswith("mtp.")})
    same(load(bare, cfg, mtp=False), want)
    assert "mtp=False" in refusal(bare, cfg)


def test_tied_head(oracle, tmp_path):
    folder, cfg, _ = oracle("qwen3_5")
    assert cfg.tied_embeddings
    want, disk = load(folder, cfg), read(folder)
    assert want.lm_head is None and "lm_head.weight" not in disk
    copy = disk | {"lm_head.weight": np.zeros((3, 3), np.float32)}  # not even looked at
    same(load(write(tmp_path / "copy", copy), cfg), want)
    message = refusal(folder, dataclasses.replace(cfg, tied_embeddings=False))
    assert "1 missing: lm_head.weight" in message and "tie_word_embeddings is false" in message


# -------------------------------------------------------------------------------------------------------- refusals


def test_missing_files(oracle, tmp_path):
    folder, cfg, _ = oracle("qwen3")
    assert "neither" in refusal(tmp_path, cfg)
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "model-00002-of-00003.safetensors").unlink()
    message = refusal(broken, cfg)
    assert "lacks: model-00002-of-00003.safetensors" in message and "00001" not in message


def test_stray_files_are_not_read(oracle, tmp_path):
    """A second full copy beside the shards, even an unreadable one."""
    folder, cfg, _ = oracle("qwen3")
    shutil.copytree(folder, tmp_path / "ckpt")
    write(tmp_path / "ckpt", read(folder))
    (tmp_path / "ckpt" / "model-00004-of-00004.safetensors").write_bytes(b"not safetensors")
    same(load(tmp_path / "ckpt", cfg), load(folder, cfg))


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_broken_index(oracle, tmp_path, content):
    (tmp_path / INDEX).write_text(content)
    assert INDEX in refusal(tmp_path, oracle("qwen3").cfg)


def test_broken_file(oracle, tmp_path):
    folder, cfg, _ = oracle("qwen3")
    file = write(tmp_path / "ckpt", read(folder)) / "model.safetensors"
    whole = file.read_bytes()
    for content in (whole[:-1], whole[:100], b"version https://git-lfs.github.com/spec/v1\n"):
        file.write_bytes(content)
        assert "model.safetensors: not a whole safetensors file" in refusal(file.parent, cfg)


def test_all_problems_at_once(moe):
    folder, cfg, disk = moe
    for layer in (0, 1):
        del disk[f"{NESTED}layers.{layer}.linear_attn.A_log"]
    disk[f"{NESTED}layers.0.linear_attn.in_proj_ba.weight"] = np.zeros((2, 2), np.float32)
    disk[f"{NESTED}norm.weight"] = np.zeros((63,), np.float32)
    disk["model.embed_tokens.weight"] = disk[f"{NESTED}embed_tokens.weight"]
    message = refusal(write(folder, disk), cfg)
    assert "2 missing: model.layers.0.linear_attn.A_log, model.layers.1.linear_attn.A_log" in message
    assert f"1 unexpected: {NESTED}layers.0.linear_attn.in_proj_ba.weight" in message
    assert "1 of wrong shape: model.norm.weight [63] (expected [64])" in message
    assert "2 duplicate: " in message and f"{NESTED}embed_tokens.weight in model.safetensors" in message


def test_long_lists_are_cut(moe):
    folder, cfg, disk = moe
    lost = {k: v for k, v in disk.items() if ".self_attn." not in k and ".linear_attn." not in k}
    message = refusal(write(folder, lost | {f"x{i:02}": np.zeros(1, np.float32) for i in range(12)}), cfg)
    assert f"{len(disk) - len(lost)} missing: " in message
    assert "12 unexpected: x00, x01, x02, x03, x04, x05, x06, x07, x08, x09 and 2 more" in message


def test_same_tensor_in_two_files(moe):
    folder, cfg, disk = moe
    shard = {"mtp.norm.weight": disk["mtp.norm.weight"]}
    message = refusal(write(folder, disk, shard), cfg)
    assert "2 duplicate: mtp.norm.weight in model-0.safetensors, mtp.norm.weight in model-1.safetensors" in message


def test_both_forms_of_experts(moe):
    folder, cfg, disk = moe
    expert = f"{NESTED}layers.4.mlp.experts.3.gate_proj.weight"
    message = refusal(write(folder, disk | {expert: unfuse(disk)[expert]}), cfg)
    assert f"1 duplicate: {expert} in" in message and "missing" not in message and "unexpected" not in message


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("layers.0.linear_attn.conv1d.weight", (384, 4)),
        ("layers.0.mlp.experts.gate_up_proj", (16, 64, 32)),  # as if [E, D, 2M]
        ("layers.3.self_attn.q_proj.weight", (512, 64)),  # no gate
        ("layers.3.self_attn.o_proj.weight", (512, 64)),  # transposed
        ("layers.0.mlp.shared_expert_gate.weight", (64,)),
        ("mtp.fc.weight", (128, 64)),
    ],
)
def test_wrong_shapes(moe, name, shape):
    folder, cfg, disk = moe
    full = name if name.startswith("mtp.") else NESTED + name
    assert full in disk
    message = refusal(write(folder, disk | {full: np.zeros(shape, np.float32)}), cfg)
    assert f"1 of wrong shape: {name if full == name else 'model.' + name} {list(shape)} (expected " in message


@pytest.mark.parametrize(
    ("added", "kind"),
    [
        (["weight_scale_inv"], "FP8 with block scales"),
        (["weight_packed", "weight_scale", "weight_global_scale"], "compressed-tensors"),
        (["weight_scale", "weight_scale_2", "input_scale"], "NVFP4"),
        (["weight_scale"], "FP8, MXFP8 or MXFP4"),
        (["qweight", "qzeros", "scales", "g_idx"], "GPTQ or AWQ"),
        (["scales", "biases"], "MLX"),
    ],
)
def test_quantised(moe, added, kind):
    folder, cfg, disk = moe
    module = "layers.3.self_attn.q_proj"
    disk |= {f"{NESTED}{module}.{suffix}": np.zeros((4, 4), np.uint8) for suffix in added}
    message = refusal(write(folder, disk), cfg)
    assert f"quantised, {kind} (model.{module}." in message and "BF16, F16, F32" in message


def test_unknown_dtypes(moe):
    folder, cfg, disk = moe
    name = "layers.3.self_attn.q_proj.weight"
    message = refusal(write(folder, disk | {NESTED + name: np.zeros((1024, 64), np.uint8)}), cfg)
    assert f"1 of a dtype other than BF16, F16, F32: model.{name} U8" in message


# ------------------------------------------------------------------------------------------------- saving, placing


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("shard", [10**9, 3 * 10**5])
def test_save_gives_back_the_files(oracle, tmp_path, name, shard):
    folder, cfg, _ = oracle(name)
    hf = json.loads((folder / "config.json").read_text())
    params, new = load(folder, cfg), tmp_path / "new"
    checkpoint.save(params, cfg, hf, new, max_shard_bytes=shard, progress=False)
    same(load(new, cfg), params)
    assert load_config(new) == cfg and json.loads((new / "config.json").read_text()) == hf

    want = {k: v for k, v in read(folder).items() if not k.startswith("model.visual.")}
    got = read(new)
    assert got.keys() == want.keys()  # the published form of the experts, main layers and MTP
    for key, x in want.items():
        np.testing.assert_array_equal(got[key].astype(np.float32), x.astype(np.float32), err_msg=key)
        assert got[key].dtype == (np.float32 if key.endswith(FLOAT32) else x.dtype)

    files = sorted(f.name for f in new.glob("*.safetensors"))
    assert (len(files) > 1) == (shard < 10**9) == (new / INDEX).exists()
    with safe_open(new / files[0], "numpy") as f:
        assert f.metadata() == {"format": "pt"}
    if len(files) > 1:
        index = json.loads((new / INDEX).read_text())
        assert sorted(set(index["weight_map"].values())) == files and index["weight_map"].keys() == got.keys()
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in got.values())
        shards = [[x.nbytes for x in load_file(new / file).values()] for file in files]
        assert all(len(one) == 1 or sum(one) <= shard for one in shards)
        assert all(sum(a) + sum(b) > shard for a, b in itertools.pairwise(shards))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_load_of_save(oracle, tmp_path, name, dtype):
    _, cfg, _ = oracle(name)
    params = random(cfg, dtype)
    checkpoint.save(params, cfg, {}, tmp_path / "new", progress=False)  # no text_config: the text-only names
    heads = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.", "mtp.")
    assert all(name.startswith(heads) for name in read(tmp_path / "new"))
    same(load(tmp_path / "new", cfg, dtype), params)


def test_mixed_pattern(oracle, tmp_path):
    """Dense layers among sparse ones: a block for each position of the pattern."""
    _, cfg, _ = oracle("qwen3_moe")
    cfg = dataclasses.replace(cfg, pattern=(("attention", "mlp"), ("attention", "moe")), mlp_width=96)
    params = random(cfg, "bfloat16")
    checkpoint.save(params, cfg, {}, tmp_path / "new", progress=False)
    disk, (mlp, moe) = read(tmp_path / "new"), (block.ffn for block in params.blocks)
    np.testing.assert_array_equal(mlp.w_gate[1], disk["model.layers.2.mlp.gate_proj.weight"].T)
    np.testing.assert_array_equal(moe.w_gate[1, 4], disk["model.layers.3.mlp.experts.4.gate_proj.weight"].T)
    same(load(tmp_path / "new", cfg), params)


def test_save_refuses(oracle, tmp_path):
    folder, cfg, _ = oracle("qwen3_5")
    params = load(folder, cfg)
    with pytest.raises(ValueError, match=r"params: .*: mtp\..* None \(expected .* and 7 more"):
        checkpoint.save(params.replace(mtp=None), cfg, {}, tmp_path, progress=False)
    with pytest.raises(ValueError, match=r"params: .*: norm \(63,\) \(expected \(64,\)\)"):
        checkpoint.save(params.replace(norm=params.norm[1:]), cfg, {}, tmp_path, progress=False)
    assert not list(tmp_path.iterdir())
    (tmp_path / INDEX).touch()
    with pytest.raises(ValueError, match="another folder"):
        checkpoint.save(params, cfg, {}, tmp_path, progress=False)


# (name, axes of the mesh): fewer KV heads than tp, null experts, replicas, all at once.
LAYOUTS = [
    ("qwen3", {}),
    ("qwen3", {"dp": 2, "tp": 4}),
    ("qwen3_moe", {"ep": 8}),
    ("qwen3_moe", {"ep": 3}),
    ("qwen3_5", {"tp": 2}),
    ("qwen3_5_moe", {"tp": 4}),
    ("qwen3_5_moe", {"ep": 4, "tp": 2}),
    ("qwen3_5_moe", {"dp": 2, "ep": 2, "tp": 2}),
    ("qwen3_5_moe", {"ep": 3, "tp": 2}),
]


@pytest.mark.parametrize("piece", [None, 9000], ids=["whole", "pieces"])
@pytest.mark.parametrize(("name", "axes"), LAYOUTS, ids=lambda x: str(x))
def test_layouts(oracle, monkeypatch, same_shards, name, axes, piece):
    """Each device has what it would get of the whole arrays, however small the pieces they are made of."""
    folder, cfg, _ = oracle(name)
    want = params_lib.place(load(folder, cfg), cfg, make_mesh(**axes), layout(cfg.dims(), **axes))
    if piece:
        monkeypatch.setattr(pieces, "PIECE_BYTES", piece)
    same_shards(load(folder, cfg, mesh=make_mesh(**axes), layout=layout(cfg.dims(), **axes)), want)


def test_places(oracle):
    """Null experts are zeros; the table has expert e in place e, in all its entries."""
    folder, cfg, _ = oracle("qwen3_moe")
    on_three = layout(cfg.dims(), ep=3, redundant_experts=2)
    assert (on_three.places, on_three.copies) == (18, 3)
    ffn = load(folder, cfg, mesh=make_mesh(ep=3), layout=on_three).blocks[0].ffn
    whole = load(folder, cfg).blocks[0].ffn
    assert ffn.w_gate.addressable_shards[0].data.shape == (4, 6, *whole.w_gate.shape[2:])
    np.testing.assert_array_equal(np.asarray(ffn.w_gate)[:, :16], whole.w_gate)
    assert not np.asarray(ffn.w_gate)[:, 16:].any() and not np.asarray(ffn.w_down)[:, 16:].any()
    assert ffn.places.shape == (4, 16, 3) and ffn.places.dtype == np.int32
    np.testing.assert_array_equal(ffn.places, np.broadcast_to(np.arange(16)[:, None], (4, 16, 3)))
    assert whole.places is None


def test_mesh_of_another_size(oracle):
    folder, cfg, _ = oracle("qwen3_moe")
    for mesh in (None, make_mesh(ep=4)):
        with pytest.raises(ValueError, match=r"mesh is {'dp': 1, 'ep': \d, 'tp': 1}, the layout needs .*'ep': 2"):
            load(folder, cfg, mesh=mesh, layout=layout(cfg.dims(), ep=2))


def test_layout_without_mtp(oracle):
    folder, cfg, _ = oracle("qwen3_5")
    params = load(folder, cfg, mesh=make_mesh(tp=2), layout=layout(cfg.dims(), tp=2), mtp=False)
    assert params.mtp is None
    same(params, load(folder, cfg, mtp=False))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_save_of_shards(oracle, tmp_path, name):
    folder, cfg, _ = oracle(name)
    params = load(folder, cfg, mesh=make_mesh(dp=2, tp=4), layout=layout(cfg.dims(), dp=2, tp=4))
    checkpoint.save(params, cfg, json.loads((folder / "config.json").read_text()), tmp_path / "new", progress=False)
    same(load(tmp_path / "new", cfg), params)


@pytest.mark.parametrize("axes", [{}, {"dp": 2, "ep": 2, "tp": 2}], ids=["single", "mixed"])
def test_progress_counts_bytes(oracle, monkeypatch, axes):
    """Shards of the same content are read once: what ranks of dp share, and experts that are on one rank each."""
    folder, cfg, _ = oracle("qwen3_5_moe")
    bars = []

    class Bar(pieces.tqdm):
        def __init__(self, **options):
            bars.append((self, options))
            super().__init__(**options)
            self.count = 0

        def update(self, n=1):
            self.count += n

    monkeypatch.setattr(pieces, "tqdm", Bar)
    for progress in (True, False):
        placed = {"mesh": make_mesh(**axes), "layout": layout(cfg.dims(), **axes)} if axes else {}
        params = checkpoint.load(folder, cfg, dtype="bfloat16", progress=progress, **placed)
        bar, options = bars.pop()
        assert bar.count == options["total"] == num_bytes(params)
        assert options["unit"] == "B" and options["disable"] is (None if progress else True)


@pytest.mark.parametrize(
    ("shape", "unit"), [((7,), (1,)), ((5, 6, 7), (1, 4, 7)), ((3, 8), (1, 1)), ((2, 9, 4), (1, 2, 1))]
)
@pytest.mark.parametrize("room", [1, 3, 8, 50, 1000])
def test_cut(monkeypatch, shape, unit, room):
    """Windows cover an array once, start at multiples of the unit, and fit unless one unit does not."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 2 * room)
    seen = np.zeros(shape, int)
    for window in pieces.cut(shape, 2, unit):
        seen[window] += 1
        assert all(w.start % u == 0 and w.start < w.stop <= n for w, u, n in zip(window, unit, shape, strict=True))
        sizes = [w.stop - w.start for w in window]
        assert np.prod(sizes) <= room or all(n <= u for n, u in zip(sizes, unit, strict=True))
    assert (seen == 1).all()
    assert room < 1000 or len(list(pieces.cut(shape, 2, unit))) == 1
