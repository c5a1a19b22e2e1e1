# SPDX-License-Identifier: Apache-2.0
"""Converting: bit-identical there and back, restored in every layout, stopped and resumed, corrupted, refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from safetensors.numpy import load_file, save_file

from qwen_spmd import checkpoint
from qwen_spmd.checkpoint import conversion, huggingface, orbax, pieces
from qwen_spmd.checkpoint.manifest import JOURNAL, MANIFEST
from qwen_spmd.config import load_config
from qwen_spmd.demo import MODEL_DIR
from qwen_spmd.mesh.axes import make_mesh
from qwen_spmd.mesh.rules import layout
from qwen_spmd.params import Leaf, abstract, declare, leaves_with_path

ORACLES = ["qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"]
SCRIPT = Path(__file__).parents[2] / "scripts" / "convert.py"
INDEX = "model.safetensors.index.json"
NESTED = "model.language_model."


def convert(source, folder, to="orbax", **more):
    return checkpoint.convert(source, folder, to=to, progress=False, **more)


def load(folder, dtype="bfloat16", **more):
    return checkpoint.load(folder, load_config(folder), dtype=dtype, progress=False, **more)


def tensors(folder):
    """(dtype, shape, bytes, file) of each tensor."""
    out = {}
    for file in sorted(folder.glob("*.safetensors")):
        out |= {name: (x.dtype, x.shape, x.tobytes(), file.name) for name, x in load_file(file).items()}
    return out


def text_tensors(folder):
    return {name: x for name, x in tensors(folder).items() if not name.startswith("model.visual.")}


def refusal(call, *args, **more) -> str:
    with pytest.raises(ValueError) as e:
        call(*args, **more)
    return str(e.value)


@pytest.fixture
def small(monkeypatch):
    """Pieces and chunks so small that the oracles' leaves have many."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 40_000)
    monkeypatch.setattr(orbax, "SMALL", 2_000)
    monkeypatch.setattr(orbax, "LARGE", 10_000)


@pytest.fixture(scope="module")
def converted(oracle, tmp_path_factory):
    """`converted(name)`: an oracle as Orbax, or as Hugging Face's files from there. Not to be changed."""
    root = tmp_path_factory.mktemp("converted")

    def get(name, to="orbax"):
        folder = root / f"{name}-{to}"
        if not folder.exists():
            convert(oracle(name).folder if to == "orbax" else get(name), folder, to)
        return folder

    return get


# ------------------------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("name", [*ORACLES, "demo"])
def test_there_and_back(oracle, tmp_path, small, name, same_shards):
    source = MODEL_DIR if name == "demo" else oracle(name).folder
    there, back = tmp_path / "there", tmp_path / "back"
    report = convert(source, there)
    assert not list(there.glob("*.safetensors*")) and report.rounded == [] and report.reused == 0
    assert report.pieces > 1.5 * len(leaves_with_path(declare(load_config(source), "bfloat16")))
    convert(there, back, "huggingface")
    want = text_tensors(source)
    assert tensors(back) == want
    stored = sorted(huggingface.headers(back), key=lambda t: (t.file, t.offset))
    widths = [(t.file, -huggingface.DTYPES[t.dtype].itemsize) for t in stored]
    assert widths == sorted(widths)  # so that every tensor is aligned
    dropped = len(tensors(source)) - len(want)
    assert report.left_out == ([f"{dropped} tensors of the vision tower"] if dropped else [])
    for folder in (there, back):
        assert load_config(folder) == load_config(source)
        for file in source.glob("*.json"):
            assert file.name == INDEX or (folder / file.name).read_bytes() == file.read_bytes()
        for file in source.glob("*.jinja"):
            assert (folder / file.name).read_bytes() == file.read_bytes()
    if (source / INDEX).exists():
        index, old = (json.loads((folder / INDEX).read_text())["weight_map"] for folder in (back, source))
        assert index == {name: file for name, file in old.items() if name in want}
    same_shards(load(back), load(source))


def test_other_forms(oracle, tmp_path):
    """Other prefixes, experts one by one in one layer, decays in bfloat16, a copied head: all as they were."""
    disk, out = load_file_all(oracle("qwen3_5_moe").folder), {}
    for name, x in disk.items():
        name = name.replace(NESTED, "language_model.model.").replace("lm_head.", "language_model.lm_head.")
        if name.endswith("layers.2.mlp.experts.gate_up_proj"):
            for e, (gate, up) in enumerate(x.reshape(x.shape[0], 2, -1, x.shape[2])):
                out[name.replace("gate_up_proj", f"{e}.gate_proj.weight")] = gate
                out[name.replace("gate_up_proj", f"{e}.up_proj.weight")] = up
        elif name.endswith("layers.2.mlp.experts.down_proj"):
            out |= {name.replace("down_proj", f"{e}.down_proj.weight"): down for e, down in enumerate(x)}
        elif not name.startswith("model.visual."):
            out[name] = x.astype(ml_dtypes.bfloat16) if name.endswith(("A_log", "dt_bias")) else x
    source = write(tmp_path / "source", out, oracle("qwen3_5_moe").folder)
    convert(source, tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "back", "huggingface")
    assert tensors(tmp_path / "back") == tensors(source)
    assert tensors(source)["language_model.model.layers.0.linear_attn.A_log"][0] == "bfloat16"


def load_file_all(folder):
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


def write(folder, disk, beside):
    folder.mkdir()
    save_file({name: np.ascontiguousarray(x) for name, x in disk.items()}, folder / "model.safetensors")
    shutil.copy(beside / "config.json", folder)
    return folder


def test_copied_head_and_unknown_mtp(oracle, tmp_path):
    """What the model does not use is left out, and said."""
    folder = oracle("qwen3_5").folder
    disk = load_file_all(folder)
    source = write(tmp_path / "source", disk | {"lm_head.weight": disk[f"{NESTED}embed_tokens.weight"]}, folder)
    hf = json.loads((folder / "config.json").read_text())
    hf["text_config"]["mtp_num_hidden_layers"] = 0
    (source / "config.json").write_text(json.dumps(hf))
    report = convert(source, tmp_path / "there")
    mtp = sum(name.startswith("mtp.") for name in disk)
    assert "1 tensors of a head that is the same as the embedding" in report.left_out
    assert f"{mtp} tensors of an MTP layer that is not asked for" in report.left_out and mtp > 0
    convert(tmp_path / "there", tmp_path / "back", "huggingface")
    assert tensors(tmp_path / "back").keys() == {n for n in disk if not n.startswith(("mtp.", "model.visual."))}


def test_rounding_is_said(oracle, tmp_path, same_shards):
    """float32 and float16 tensors of a bfloat16 model come back in its dtype, with the values that loading gives."""
    folder = oracle("qwen3").folder
    disk = load_file_all(folder)
    disk["model.norm.weight"] = np.full(64, 1.001, np.float32)
    disk["model.layers.0.self_attn.q_norm.weight"] = np.full(32, 1.001, np.float16)
    source = write(tmp_path / "source", disk, folder)
    report = convert(source, tmp_path / "there")
    assert sorted(report.rounded) == ["model.layers.0.self_attn.q_norm.weight", "model.norm.weight"]
    convert(tmp_path / "there", tmp_path / "back", "huggingface")
    back = load_file_all(tmp_path / "back")
    assert back["model.norm.weight"].dtype == "bfloat16"
    np.testing.assert_array_equal(back["model.norm.weight"], disk["model.norm.weight"].astype(ml_dtypes.bfloat16))
    same_shards(load(tmp_path / "there"), load(source))


@pytest.mark.parametrize("to", ["orbax", "huggingface"])
def test_dtype(oracle, tmp_path, to, same_shards):
    """In float32, and config.json says so; also from a format to the same one."""
    folder = oracle("qwen3_5_moe").folder
    report = convert(folder, tmp_path / "new", to, dtype="float32")
    assert load_config(tmp_path / "new").dtype == "float32" and report.rounded == []
    hf = json.loads((tmp_path / "new" / "config.json").read_text())
    assert hf["text_config"]["dtype"] == "float32" and "torch_dtype" not in hf
    same_shards(load(tmp_path / "new", "float32"), load(folder, "float32"))
    if to == "huggingface":
        assert {x[0] for x in tensors(tmp_path / "new").values()} == {np.dtype(np.float32)}
    convert(tmp_path / "new", tmp_path / "back", "orbax", dtype="bfloat16")
    same_shards(load(tmp_path / "back"), load(folder))


# ------------------------------------------------------------------------------------------------------- restoring


LAYOUTS = [{}, {"ep": 8}, {"ep": 3}, {"tp": 4}, {"ep": 4, "tp": 2}, {"dp": 2, "ep": 2, "tp": 2}]


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
@pytest.mark.parametrize("small_pieces", [False, True], ids=["whole", "pieces"])
def test_layouts(oracle, converted, monkeypatch, axes, small_pieces, same_shards):
    """From Orbax as from Hugging Face, shard by shard; the oracle has 16 experts and 2 KV heads."""
    folder, cfg, _ = oracle("qwen3_5_moe")
    placed = {"mesh": make_mesh(**axes), "layout": layout(cfg.dims(), **axes)}
    want = load(folder, **placed)
    if small_pieces:
        monkeypatch.setattr(pieces, "PIECE_BYTES", 20_000)
    same_shards(load(converted("qwen3_5_moe"), **placed), want)


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_single(oracle, converted, name, dtype, same_shards):
    same_shards(load(converted(name), dtype), load(oracle(name).folder, dtype))
    if name.startswith("qwen3_5"):
        assert load(converted(name), mtp=False).mtp is None


@pytest.mark.parametrize("checkpointer", [ocp.StandardCheckpointer, ocp.PyTreeCheckpointer])
def test_orbax_restores_it(oracle, tmp_path, small, checkpointer, same_shards):
    """Orbax itself, onto a mesh and without one."""
    folder, cfg, _ = oracle("qwen3_5")
    convert(folder, tmp_path / "there")
    mesh, two = make_mesh(tp=2), layout(cfg.dims(), tp=2)
    target = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, two.spec(leaf.dims))),
        declare(cfg, "bfloat16", two),
    )
    with checkpointer() as c:
        if checkpointer is ocp.StandardCheckpointer:
            same_shards(c.restore(tmp_path / "there" / "params", target), load(folder, mesh=mesh, layout=two))
        tree = c.restore(tmp_path / "there" / "params")
    want = dict(leaves_with_path(load(folder)))
    got = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in jax.tree.leaves_with_path(tree)}
    assert got.keys() == want.keys()
    for path, x in want.items():
        np.testing.assert_array_equal(got[path], x)


def test_reads_its_own_shards_only(converted, monkeypatch):
    """Each value that the devices hold is read once, and nothing else."""
    folder, read, real = converted("qwen3_5_moe"), [], orbax._reader

    def reader(folder):
        window_of = real(folder)
        return lambda path, window: read.append((path, window)) or window_of(path, window)

    monkeypatch.setattr(orbax, "_reader", reader)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 20_000)
    cfg = load_config(folder)
    params = load(folder, mesh=make_mesh(dp=2, ep=2, tp=2), layout=layout(cfg.dims(), dp=2, ep=2, tp=2))
    seen = {path: np.zeros(x.shape, np.int8) for path, x in leaves_with_path(params)}
    for path, window in read:
        seen[path][window] += 1
    # Whole leaves, those of few KV heads too, are the same shard on several devices.
    assert all((x == 1).all() for path, x in seen.items() if not path.endswith("places"))
    # Nor is more than a piece of it on the host at once.
    assert len(read) > 2 * len(seen)
    assert max(np.prod([w.stop - w.start for w in window]) for _, window in read) * 2 <= 20_000


PROCESS = """
import json, sys
import jax
from pathlib import Path
rank, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
from qwen_spmd import checkpoint
from qwen_spmd.checkpoint import orbax, pieces
from qwen_spmd.config import load_config
from qwen_spmd.mesh.axes import make_mesh
from qwen_spmd.mesh.rules import layout
import numpy as np, zlib
pieces.PIECE_BYTES = 20_000
read, real = [], orbax._reader
def reader(folder):
    window_of = real(folder)
    return lambda path, window: read.append((path, window)) or window_of(path, window)
orbax._reader = reader
cfg = load_config(folder)
placed = layout(cfg.dims(), ep=8)
params = checkpoint.load(folder, cfg, dtype="bfloat16", mesh=make_mesh(ep=8), layout=placed, progress=False)
x = params.blocks[0].ffn.w_gate
for shard in x.addressable_shards:
    print(rank, shard.index[1].start, zlib.crc32(np.asarray(shard.data).tobytes()))
experts = [w[1] for path, w in read if path == "blocks.0.ffn.w_gate"]
print("experts", rank, min(w.start for w in experts), max(w.stop for w in experts))
"""


def test_two_processes(oracle, converted, tmp_path):
    """Each of two processes has its shards, and has read its own half of the experts."""
    folder = converted("qwen3_moe")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(rank), str(port), str(folder)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        out = [p.communicate(timeout=120) for p in started]
    finally:
        for p in started:
            p.kill()
    assert [p.returncode for p in started] == [0, 0], out
    # The same bytes as in this process, and each process read its own half.
    cfg = load_config(folder)
    gate = load(folder, mesh=make_mesh(ep=8), layout=layout(cfg.dims(), ep=8)).blocks[0].ffn.w_gate
    crcs = {shard.index[1].start: zlib.crc32(np.asarray(shard.data).tobytes()) for shard in gate.addressable_shards}
    for rank, (text, _) in enumerate(out):
        first = rank * 8
        want = [f"{rank} {e} {crcs[e]}" for e in range(first, first + 8, 2)]
        assert text.splitlines() == [*want, f"experts {rank} {first} {first + 8}"]


# ----------------------------------------------------------------------------------------------- stopped, resumed

KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from qwen_spmd import checkpoint
from qwen_spmd.checkpoint import huggingface, orbax
to, source, folder, last = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
target = {"orbax": orbax.Arrays, "huggingface": huggingface.Files}[to]
write, calls = target.write, []
def killed(self, piece, content):
    calls.append(piece)
    if len(calls) <= last:
        return write(self, piece, content)
    write(self, piece, np.ones_like(content))  # something is there already, and wrong
    os.kill(os.getpid(), signal.SIGKILL)
target.write = killed
checkpoint.convert(source, folder, to=to, progress=False)
"""
TARGETS = {"orbax": orbax.Arrays, "huggingface": huggingface.Files}


def run(*args):
    return subprocess.run([sys.executable, *map(str, args)], capture_output=True, text=True, timeout=120)


def arrays(folder):
    """Content and time of the files of the weights."""
    chunks = [p for p in folder.rglob("*") if p.is_file() and p.name[0].isdigit()]
    return {
        p.relative_to(folder): (p.read_bytes(), p.stat().st_mtime_ns) for p in [*chunks, *folder.glob("*.safetensors")]
    }


@pytest.mark.parametrize("to", TARGETS)
def test_killed(oracle, converted, tmp_path, to):
    """SIGKILL in the middle of a piece; the command that the refusal names goes on from there."""
    source = {"orbax": oracle("qwen3_5_moe").folder, "huggingface": converted("qwen3_5_moe")}[to]
    folder = tmp_path / "new"
    assert run("-c", KILLED, to, source, folder, 20).returncode == -signal.SIGKILL
    finished = [json.loads(line)[0] for line in (folder / JOURNAL).read_text().splitlines()[1:]]
    assert len(finished) == len(set(finished)) == 20  # each a whole leaf or tensor
    before = arrays(folder)
    message = refusal(load, folder)
    command = f"scripts/convert.py {source} {folder} --to {to} --dtype bfloat16"
    assert message == f"{folder}: an unfinished conversion; to finish it run: {command}"
    assert refusal(checkpoint.verify, folder, progress=False) == message
    if to == "orbax":
        with pytest.raises(FileNotFoundError, match="_METADATA"), ocp.StandardCheckpointer() as c:
            c.restore(folder / "params", abstract(load_config(source), "bfloat16"))

    done = run(SCRIPT, *command.split()[1:])
    assert done.returncode == 0, done.stderr
    assert "20 of them from an earlier run, written and verified" in done.stdout
    assert not (folder / JOURNAL).exists()
    convert(source, tmp_path / "whole", to)
    after = arrays(folder)
    assert {p: x[0] for p, x in after.items()} == {p: x[0] for p, x in arrays(tmp_path / "whole").items()}
    if to == "orbax":
        untouched = {p for p in before if after[p] == before[p]}
        assert untouched == {p for p in before if p.parent.name in finished} and len(before) > len(untouched)
    assert run(SCRIPT, "--verify", folder).returncode == 0


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("stop", ["first", "third", "last", "finish", "verify", "mark"])
def test_every_piece_is_written_once(oracle, tmp_path, monkeypatch, small, to, stop):
    """Stopped anywhere, even twice, only the piece that was being written is written again."""
    folder, source, written = tmp_path / "new", oracle("qwen3").folder, []
    target, write = TARGETS[to], TARGETS[to].write
    total = convert(source, tmp_path / "whole", to).pieces
    at = {"first": 0, "third": 2, "last": total - 1}.get(stop)

    def writing(self, piece, content):
        written.append(piece)
        if len(written) - 1 == at:
            raise KeyboardInterrupt
        write(self, piece, content)

    def stopping(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(target, "write", writing)
        for _ in range(2):
            with m.context() as once, pytest.raises(KeyboardInterrupt):
                once.setattr(
                    *{
                        "finish": (target, "finish", stopping),
                        "verify": (conversion, "_wrong", stopping),
                        "mark": (Path, "unlink", stopping),
                    }.get(stop, (target, "finish", stopping))
                )
                convert(source, folder, to)
            assert "unfinished" in refusal(load, folder)
        with (folder / JOURNAL).open("a") as f:
            f.write('["embed", [0')  # killed while it wrote the line
        report = convert(source, folder, to)
    assert report.reused == total and len(written) == total + (at is not None)
    assert {p: x[0] for p, x in arrays(folder).items()} == {p: x[0] for p, x in arrays(tmp_path / "whole").items()}
    made, whole = (json.loads((f / MANIFEST).read_text()) for f in (folder, tmp_path / "whole"))
    for manifest in (made, whole):
        manifest["files"].pop("params/_CHECKPOINT_METADATA", None)  # has the time
    assert made == whole


def test_lost_pieces_are_made_again(oracle, tmp_path, monkeypatch, same_shards):
    """What the journal has and the disk does not, after a power cut say, is found at the end and then redone."""
    folder, source = tmp_path / "new", oracle("qwen3").folder
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(orbax.Arrays, "finish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        convert(source, folder)
    next((folder / "params" / "embed").glob("[0-9]*")).unlink()
    message = refusal(convert, source, folder)
    assert "1 pieces are not what was written: embed[0:512, 0:64]; run again to redo them" in message
    report = convert(source, folder)
    assert report.reused == report.pieces - 1
    same_shards(load(folder), load(source))


class Killed(BaseException):
    """As if by a signal: nothing that tidies up after errors sees it."""


def kill_at(m, name):
    """A run ends between writing a file under another name and giving it its name."""
    replace = Path.replace

    def killed(self, target):
        if self.name == f"{name}.new":
            raise Killed
        return replace(self, target)

    m.setattr(Path, "replace", killed)


@pytest.mark.parametrize("to", TARGETS)
def test_killed_at_the_manifest(oracle, tmp_path, monkeypatch, to):
    """What is left of it is not taken for a file of the model."""
    folder, source = tmp_path / "new", oracle("qwen3").folder
    with monkeypatch.context() as m, pytest.raises(Killed):
        kill_at(m, MANIFEST)
        convert(source, folder, to)
    assert (folder / f"{MANIFEST}.new").exists() and not (folder / MANIFEST).exists()
    convert(source, folder, to)
    assert not any(name.endswith(".new") for name in json.loads((folder / MANIFEST).read_text())["files"])
    assert checkpoint.verify(folder, progress=False) > 10


def test_killed_before_the_first_line(oracle, tmp_path, monkeypatch):
    folder, source = tmp_path / "new", oracle("qwen3").folder
    with monkeypatch.context() as m, pytest.raises(Killed):
        kill_at(m, JOURNAL)
        convert(source, folder)
    assert {file.name for file in folder.iterdir()} == {JOURNAL, f"{JOURNAL}.new"}
    assert (folder / JOURNAL).read_bytes() == b""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / f"{JOURNAL}.new").touch()
    for left in (folder, tmp_path / "other"):
        convert(source, left)
        assert checkpoint.verify(left, progress=False) > 10


@pytest.mark.parametrize("content", ["", '{"source": "a', "{}\n", "[]\n", "?\n"])
def test_broken_journal(oracle, tmp_path, content):
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "file").touch()
    (folder / JOURNAL).write_text(content)
    for call in (load_of(oracle), lambda f: checkpoint.verify(f, progress=False), checkpoint.identity):
        assert f"{folder / JOURNAL}: does not say what was being converted" in refusal(call, folder)
    assert "does not say what was being converted" in refusal(convert, oracle("qwen3").folder, folder)
    assert (folder / JOURNAL).read_text() == content


def load_of(oracle):
    return lambda folder: checkpoint.load(folder, oracle("qwen3").cfg, dtype="bfloat16", progress=False)


def test_one_conversion_at_a_time(oracle, tmp_path, monkeypatch, same_shards):
    """Another one into the folder is refused as long as the first runs: started, resumed, and until it has finished."""
    folder, source, refused = tmp_path / "new", oracle("qwen3").folder, []

    def second(self, *args, real):
        refused.append(refusal(convert, source, folder))
        real(self, *args)
        if len(refused) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as m:
        for name in ("write", "finish"):
            real = getattr(orbax.Arrays, name)
            m.setattr(orbax.Arrays, name, lambda self, *args, real=real: second(self, *args, real=real))
        with pytest.raises(KeyboardInterrupt):
            convert(source, folder)
        report = convert(source, folder)
    assert report.reused == 1 and len(refused) == report.pieces + 2  # the piece at which it stopped was made twice
    assert set(refused) == {f"{folder}: another conversion into it is running"}
    same_shards(load(folder), load(source))
    assert "exists already" in refusal(convert, source, folder)


# ------------------------------------------------------------------------------------------------ checked, refused


@pytest.mark.parametrize(
    ("to", "file", "named"),
    [
        ("orbax", "params/blocks.0.ffn.w_gate/0.0.0.0", "blocks.0.ffn.w_gate["),
        ("orbax", "params/norm/0", "norm[0:64]"),
        ("orbax", "params/norm/.zarray", "params/norm/.zarray"),
        ("orbax", "params/_METADATA", "params/_METADATA"),
        ("orbax", "tokenizer.json", "tokenizer.json"),
        ("huggingface", "model-00002-of-00003.safetensors", "model.layers."),
        ("huggingface", "config.json", "config.json"),
        ("huggingface", INDEX, INDEX),
    ],
)
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_verify_finds(converted, tmp_path, to, file, named, how):
    folder = tmp_path / "new"
    shutil.copytree(converted("qwen3_moe", to), folder)
    assert checkpoint.verify(folder, progress=False) > 30
    path = folder / file
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(content if how == "flipped" else content[:-1])
    message = refusal(checkpoint.verify, folder, progress=False)
    # What holds the others together is refused before they are looked at.
    assert str(folder) in message and (named in message or (how != "flipped" and to == "huggingface"))


def test_verify_names_all(converted, tmp_path):
    """Also a tensor that has another name or dtype in the header, together with what else differs."""
    folder = tmp_path / "new"
    shutil.copytree(converted("qwen3", "huggingface"), folder)
    file = folder / "model-00001-of-00003.safetensors"
    content = file.read_bytes()
    for old, new in [
        (b'"model.layers.0.self_attn.q_norm', b'"model.layers.0.self_attn.x_norm'),
        (b'"BF16"', b'"I16" '),
    ]:
        assert old in content
        content = content.replace(old, new, 1)
    file.write_bytes(content)
    (folder / "config.json").write_text("{}")
    message = refusal(checkpoint.verify, folder, progress=False)
    assert f"{folder}: 3 pieces or files are not what was written: " in message
    assert "model.layers.0.self_attn.q_norm.weight[0:32]" in message and "config.json" in message


def test_array_of_another_rank(converted, tmp_path):
    folder = tmp_path / "new"
    shutil.copytree(converted("qwen3"), folder)
    meta = folder / "params" / "embed" / ".zarray"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"shape": [512], "chunks": [64]}))
    assert "params/embed/.zarray" in refusal(checkpoint.verify, folder, progress=False)
    assert "params/embed: not a whole array" in refusal(load, folder)


def test_identity(oracle, converted, tmp_path):
    """The same for the same files elsewhere, another one when a value or the config differs."""
    seen = set()
    for folder, files in [
        (oracle("qwen3").folder, ["config.json", "model-00002-of-00003.safetensors"]),
        (converted("qwen3"), []),
        (converted("qwen3", "huggingface"), ["config.json"]),
    ]:
        copy = tmp_path / str(len(seen))
        shutil.copytree(folder, copy)
        whole = checkpoint.identity(copy)
        assert whole == checkpoint.identity(folder) and len(whole) == 64 and int(whole, 16)
        seen.add(whole)
        for name in files:
            content = (copy / name).read_bytes()
            (copy / name).write_bytes(content + b"\n" if name.endswith("json") else content[:-1] + b"?")
            assert checkpoint.identity(copy) not in seen
            (copy / name).write_bytes(content)
    again, made = tmp_path / "again", json.loads((converted("qwen3") / MANIFEST).read_text())
    shutil.copytree(converted("qwen3"), again)
    for change, same in [
        ({"files": made["files"] | {"params/_CHECKPOINT_METADATA": "0" * 64}}, True),  # it has the time of writing
        ({"files": made["files"] | {"config.json": "0" * 64}}, False),
        ({"pieces": made["pieces"][1:]}, False),
    ]:
        (again / MANIFEST).write_text(json.dumps(made | change))
        assert (checkpoint.identity(again) == checkpoint.identity(converted("qwen3"))) == same


def test_missing_chunks_are_not_zeros(converted, tmp_path):
    shutil.copytree(converted("qwen3_moe"), tmp_path / "new")
    (tmp_path / "new/params/blocks.0.ffn.w_gate/0.0.0.0").unlink()
    assert "blocks.0.ffn.w_gate: not a whole array" in refusal(load, tmp_path / "new")


def test_refused(oracle, converted, tmp_path):
    source = oracle("qwen3").folder
    assert "exists already" in refusal(convert, source, converted("qwen3"))
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    assert "exists already" in refusal(convert, source, tmp_path / "used")
    assert "exists already" in refusal(convert, source, tmp_path / "used" / "file")
    assert os.listdir(tmp_path / "used") == ["file"]
    assert "to is 'onnx', it must be one of orbax, huggingface" in refusal(convert, source, tmp_path / "new", "onnx")
    assert "dtype is 'int8'" in refusal(convert, source, tmp_path / "new", dtype="int8")
    assert "no config.json" in refusal(convert, tmp_path / "used", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert "was not converted" in refusal(checkpoint.verify, source, progress=False)


@pytest.mark.parametrize(
    ("other", "what"), [({"dtype": "float32"}, "dtype"), ({"to": "huggingface"}, "to"), ({}, "identity")]
)
def test_another_conversion_is_not_resumed(oracle, tmp_path, monkeypatch, other, what):
    """Also not from a source that differs in one value and nothing else."""
    source, folder = tmp_path / "source", tmp_path / "new"
    shutil.copytree(oracle("qwen3_5_moe").folder, source)
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(orbax.Arrays, "finish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        convert(source, folder)
    if not other:
        file = source / "model-00001-of-00003.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    journal = (folder / JOURNAL).read_bytes()
    message = refusal(convert, source, folder, **other)
    assert f"an unfinished conversion of another {what}, of {source} to orbax" in message
    assert (folder / JOURNAL).read_bytes() == journal


def test_other_formats(converted, tmp_path):
    """A manifest says what each leaf is stored as, and what this package does not know is refused by name."""
    folder = tmp_path / "new"
    shutil.copytree(converted("qwen3"), folder)
    good = json.loads((folder / MANIFEST).read_text())
    bad = json.loads(json.dumps(good))
    bad["leaves"]["blocks.0.mixer.w_q"]["format"] = "mxfp8"
    for content, message in [
        (json.dumps(bad), "leaves of unknown format: blocks.0.mixer.w_q 'mxfp8'; supported: plain"),
        (json.dumps(good | {"version": 9}), "version is 9, supported is 1"),
        ("{", "not a manifest"),
        ("[]", "not a manifest"),
        ('{"version": 1}', "not a manifest of this package (missing, or of another type: to, dtype, num_bytes, leaves"),
        (json.dumps(good | {"pieces": None}), "(missing, or of another type: pieces)"),
        (json.dumps(good | {"to": "onnx"}), "to is 'onnx', it must be one of orbax, huggingface"),
    ]:
        (folder / MANIFEST).write_text(content)
        assert message in refusal(load, folder)
        if content != json.dumps(bad):
            assert message in refusal(checkpoint.verify, folder, progress=False)


def test_wrong_config(oracle, converted):
    with pytest.raises(ValueError) as e:
        checkpoint.load(converted("qwen3"), oracle("qwen3_moe").cfg, dtype="bfloat16", progress=False)
    message = str(e.value)
    assert "the leaves are not those of its config.json" in message
    assert "missing: lm_head, blocks.0.ffn.w_router" in message
    assert "of wrong shape: blocks.0.ffn.w_gate" in message


@pytest.mark.parametrize(
    ("dims", "shape", "want"),
    [
        ("LQDM", (94, 128, 4096, 1536), [1, 1, 4096, 1536]),  # an expert
        ("LQDM", (60, 512, 4096, 64), [1, 16, 4096, 64]),  # several
        ("LDNH", (94, 4096, 64, 128), [1, 4096, 8, 128]),  # heads of one of eight
        ("LDKH", (94, 4096, 4, 128), [1, 4096, 1, 128]),
        ("LDU", (45, 4096, 64), [1, 4096, 32]),
        ("LDE", (94, 4096, 128), [1, 4096, 128]),
        ("LH", (94, 128), [94, 128]),
        ("LD", (94, 4096), [32, 4096]),
        ("VD", (151936, 4096), [1020, 4096]),
        ("D", (4096,), [4096]),
        ("DD", (4096, 4096), [4096, 4096]),
    ],
)
def test_chunks(dims, shape, want):
    assert orbax.chunk(Leaf(dims, shape, np.dtype(ml_dtypes.bfloat16), "normal")) == want


def test_script(oracle, tmp_path):
    source = oracle("qwen3_5").folder
    done = run(SCRIPT, source, tmp_path / "new", "--dtype", "float32")
    assert done.returncode == 0 and done.stderr == ""
    assert "left out: 21 tensors of the vision tower" in done.stdout
    norm = tmp_path / "new" / "params" / "norm" / "0"
    norm.write_bytes(norm.read_bytes()[:-1] + b"?")
    assert "norm[0:64]" in run(SCRIPT, "--verify", tmp_path / "new").stderr
    for args, message in [
        ((source, tmp_path / "new"), "convert.py: "),
        ((source,), "give SOURCE and DEST"),
        ((tmp_path / "none", tmp_path / "x"), "no such folder"),
        ((source, "/proc/x1"), "convert.py: /proc/x1: "),
        ((source, SCRIPT / "x"), f"convert.py: {SCRIPT / 'x'}: Not a directory"),
    ]:
        done = run(SCRIPT, *args)
        assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr


def test_disk_error(oracle, tmp_path):
    """One sentence, and then the conversion goes on from there."""
    source, folder = oracle("qwen3").folder, tmp_path / "new"
    args = [sys.executable, SCRIPT, source, folder, "--to", "huggingface"]
    limited = ["bash", "-c", 'ulimit -f 200; exec "$@"', "-", *args]
    done = subprocess.run(list(map(str, limited)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr == f"convert.py: {folder}: File too large\n"
    done = run(*args[1:])
    assert done.returncode == 0 and "from an earlier run, written and verified" in done.stdout
    assert tensors(folder) == tensors(source)
