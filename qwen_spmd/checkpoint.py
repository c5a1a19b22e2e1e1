# SPDX-License-Identifier: Apache-2.0
"""Hugging Face checkpoints: the published tensor names and layouts <-> Params, streamed.

Lives here: TABLE, the only place in the package with Hugging Face tensor names; `parts`, the table written out for a
config; `load` and `save` of safetensors folders. Not here: shapes and dtypes (params.py declares them), config.json
(config.py), quantised formats, the vision tower.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from qwen_spmd import params as P
from qwen_spmd.config import ModelConfig

# (name on disk, its axes, the leaves it holds). Axes are separated by commas and letters within one are merged, so
# "NH,D" is a matrix of N*H rows; `*` is an axis over the leaves of the row, in their order; `d` is D as an output.
# Leaves have the axes that params.py declares, and everything else (transposes, splits, disk shapes) follows.
TABLE: dict[type, list[tuple[str, str, str]]] = {
    P.Params: [
        ("model.embed_tokens.weight", "V,D", "embed"),
        ("model.norm.weight", "D", "norm"),
        ("lm_head.weight", "V,D", "lm_head"),
    ],
    P.Block: [
        ("input_layernorm.weight", "D", "mixer_norm"),
        ("post_attention_layernorm.weight", "D", "ffn_norm"),
    ],
    P.Attention: [
        ("self_attn.q_proj.weight", "N*H,D", "w_q w_gate"),
        ("self_attn.k_proj.weight", "KH,D", "w_k"),
        ("self_attn.v_proj.weight", "KH,D", "w_v"),
        ("self_attn.o_proj.weight", "D,NH", "w_o"),
        ("self_attn.q_norm.weight", "H", "q_norm"),
        ("self_attn.k_norm.weight", "H", "k_norm"),
    ],
    P.GatedDelta: [
        ("linear_attn.in_proj_qkv.weight", "C,D", "w_qkv"),
        ("linear_attn.in_proj_z.weight", "UZ,D", "w_z"),
        ("linear_attn.in_proj_b.weight", "U,D", "w_b"),
        ("linear_attn.in_proj_a.weight", "U,D", "w_a"),
        ("linear_attn.conv1d.weight", "C,*,W", "conv"),
        ("linear_attn.A_log", "U", "a_log"),
        ("linear_attn.dt_bias", "U", "dt_bias"),
        ("linear_attn.norm.weight", "Z", "norm"),
        ("linear_attn.out_proj.weight", "D,UZ", "w_o"),
    ],
    P.Mlp: [
        ("gate_proj.weight", "F,D", "w_gate"),
        ("up_proj.weight", "F,D", "w_up"),
        ("down_proj.weight", "D,F", "w_down"),
    ],
    P.Moe: [
        ("gate.weight", "E,D", "w_router"),
        ("shared_expert_gate.weight", "*,D", "w_shared_gate"),
    ],
    P.Mtp: [
        ("fc.weight", "d,*D", "w_embedding w_hidden"),
        ("pre_fc_norm_embedding.weight", "D", "embedding_norm"),
        ("pre_fc_norm_hidden.weight", "D", "hidden_norm"),
        ("norm.weight", "D", "norm"),
    ],
}
# Routed experts come in two forms, and layers of one checkpoint may differ.
FUSED = [("experts.gate_up_proj", "Q,*M,D", "w_gate w_up"), ("experts.down_proj", "Q,D,M", "w_down")]
PER_EXPERT = [
    ("experts.{}.gate_proj.weight", "M,D", "w_gate"),
    ("experts.{}.up_proj.weight", "M,D", "w_up"),
    ("experts.{}.down_proj.weight", "D,M", "w_down"),
]
CHILDREN = {"mixer": "", "ffn": "mlp.", "shared": "shared_expert."}
PREFIXES = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
VISION = ("model.visual.", "visual.")
QUANTISED = {
    ".weight_scale_inv": "FP8 with block scales",
    ".weight_packed": "compressed-tensors",
    ".weight_scale_2": "NVFP4",
    ".weight_scale": "FP8, MXFP8 or MXFP4",
    ".qweight": "GPTQ or AWQ",
    ".scales": "MLX",
}
DTYPES: dict[str, Any] = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Where `leaf[index]` is on disk: `disk[channels].reshape(split)[at].transpose(axes)` of the tensor `name`.

    `path` names the leaf ("blocks.0.mixer.w_q"); `index` is () when it is not stacked, (layer,) or (layer, expert),
    where layer counts within the stack. `name` begins with "model.", "mtp." or "lm_head.", whatever prefix the files
    have; `shape` is the tensor's.
    """

    name: str
    shape: tuple[int, ...]
    path: str
    index: tuple[int, ...]
    split: tuple[int, ...]
    at: tuple[Any, ...]
    axes: tuple[int, ...]
    channels: np.ndarray | None

    def to_ours(self, disk: np.ndarray) -> np.ndarray:
        """`leaf[index]` out of the tensor: a view, unless channels are reordered."""
        disk = disk if self.channels is None else disk[self.channels]
        return disk.reshape(self.split)[self.at].transpose(self.axes)

    def to_disk(self, ours: np.ndarray, disk: np.ndarray) -> None:
        """Write `leaf[index]` into its place in the tensor."""
        place = disk.reshape(self.split)[self.at]
        place[... if self.channels is None else self.channels] = ours.transpose(np.argsort(self.axes))


def parts(cfg: ModelConfig, dtype: Any, fused: Callable[[str], bool]) -> Iterator[Part]:
    """Every part of the checkpoint of `cfg`, the parts of one tensor together.

    `fused(prefix)` says in which form the layer whose feed-forward tensors start with `prefix` keeps its experts.
    """
    tree, channels = P.declare(cfg, dtype), _channels(cfg)

    def walk(node: Any, path: str, prefix: str, index: tuple[int, ...]) -> Iterator[Part]:
        experts = (FUSED if fused(prefix) else PER_EXPERT) if isinstance(node, P.Moe) else []
        for name, dims, fields in TABLE[type(node)] + experts:
            leaves = [(path + f, leaf) for f in fields.split() if (leaf := getattr(node, f)) is not None]
            for e in [(e,) for e in range(cfg.dims()["E"])] if "{}" in name else [()]:
                for at, (full, leaf) in enumerate(leaves):
                    ours = leaf.dims.replace("DD", "Dd")
                    sizes = dict(zip(ours, leaf.shape)) | {"*": len(leaves)}
                    ours, letters = ours[len(index + e) :], dims.replace(",", "")
                    yield Part(
                        name=prefix + name.format(*e),
                        shape=tuple(math.prod(sizes[c] for c in axis) for axis in dims.split(",")),
                        path=full,
                        index=index + e,
                        split=tuple(sizes[c] for c in letters),
                        at=tuple(at if c == "*" else slice(None) for c in letters),
                        axes=tuple(letters.replace("*", "").index(c) for c in ours),
                        channels=channels if "C" in letters else None,
                    )
        for child, below in CHILDREN.items():
            if (sub := getattr(node, child, None)) is not None:
                yield from walk(sub, f"{path}{child}.", prefix + below, index)

    yield from walk(tree, "", "", ())
    for layer in range(cfg.num_layers):
        run, l = cfg.place(layer)
        yield from walk(tree.blocks[run], f"blocks.{run}.", f"model.layers.{layer}.", (l,))
    if tree.mtp is not None:
        yield from walk(tree.mtp, "mtp.", "mtp.", ())
        yield from walk(tree.mtp.block, "mtp.block.", "mtp.layers.0.", (0,))


def _channels(cfg: ModelConfig) -> np.ndarray | None:
    """Where each of our channels, grouped by key head, is on disk: all queries, all keys, all values."""
    if (gdn := cfg.gated_delta) is None:
        return None
    q = np.arange(gdn.key_heads * gdn.key_dim).reshape(gdn.key_heads, -1)
    v = 2 * q.size + np.arange(gdn.value_heads * gdn.value_dim).reshape(gdn.key_heads, -1)
    return np.concatenate([q, q + q.size, v], axis=1).ravel()


class Stored(NamedTuple):
    """A tensor in a file, as the file's header describes it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def _headers(folder: Path) -> Iterator[Stored]:
    """All tensors of the files that the index names (or of the only file); other files beside them are not read."""
    for file in _files(folder):
        try:
            with safe_open(file, "numpy"):  # checks the header and that the file is whole
                pass
        except SafetensorError as e:
            raise ValueError(f"{file}: not a whole safetensors file ({e})") from e
        with file.open("rb") as f:
            size = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(size))
        header.pop("__metadata__", None)
        for name, t in header.items():
            yield Stored(name, file, t["dtype"], tuple(t["shape"]), 8 + size + t["data_offsets"][0])


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise ValueError(f"{folder}: holds neither {INDEX} nor {SINGLE}")
        return [folder / SINGLE]
    try:
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{index}: not a safetensors index ({e!r})") from e
    if lost := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{index}: names files that the folder lacks: {_some(lost)}")
    return files


def _match(folder: Path, cfg: ModelConfig, dtype: Any) -> dict[str, list[tuple[Part, Stored]]]:
    """For each leaf, its parts and where they are stored; ValueError with all that is wrong, by name."""
    ignored = VISION + (("lm_head.",) if cfg.tied_embeddings else ()) + (() if cfg.mtp else ("mtp.",))
    found: dict[str, list[Stored]] = {}
    for stored in _headers(folder):
        name = stored.name
        if prefix := next(filter(name.startswith, PREFIXES), None):
            name = PREFIXES[prefix] + name.removeprefix(prefix)
        if not name.startswith(ignored):
            found.setdefault(name, []).append(stored)
    for suffix, kind in QUANTISED.items():
        if names := [name for name in found if name.endswith(suffix)]:
            raise ValueError(f"{folder}: quantised, {kind} ({_some(names)}); supported are plain {', '.join(DTYPES)}")

    def fused(prefix: str) -> bool:
        return any(prefix + name in found for name, _, _ in FUSED)

    wanted = {part.name: part.shape for part in parts(cfg, dtype, fused)}
    # The same experts in the other form.
    twins = {part.name for part in parts(cfg, dtype, lambda prefix: not fused(prefix))} - wanted.keys()
    problems = {
        "missing": [name for name in wanted if name not in found],
        "unexpected": [s.name for name, (s, *_) in found.items() if name not in wanted and name not in twins],
        "duplicate": [
            f"{s.name} in {s.file.name}" for name, same in found.items() for s in same if len(same) > 1 or name in twins
        ],
        "of wrong shape": [
            f"{name} {list(s.shape)} (expected {list(wanted[name])})"
            for name, (s, *_) in found.items()
            if wanted.get(name, s.shape) != s.shape
        ],
        f"of a dtype other than {', '.join(DTYPES)}": [
            f"{name} {s.dtype}" for name, (s, *_) in found.items() if s.dtype not in DTYPES
        ],
    }
    if any(problems.values()):
        lines = [f"{len(names)} {what}: {_some(names)}" for what, names in problems.items() if names]
        if "lm_head.weight" in problems["missing"]:
            lines.append("tie_word_embeddings is false in config.json, so lm_head.weight must be there")
        if cfg.mtp and not any(name.startswith("mtp.") for name in found):
            lines.append("config.json has an MTP layer and the files have none: load with mtp=False")
        raise ValueError("\n  ".join([f"{folder}: the tensors are not those of its config.json", *lines]))
    sources: dict[str, list[tuple[Part, Stored]]] = {}
    for part in parts(cfg, dtype, fused):
        sources.setdefault(part.path, []).append((part, found[part.name][0]))
    return sources


def _some(names: list[str], most: int = 10) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _flat(tree: Any) -> dict[str, Any]:
    """Leaves by path, such as "blocks.0.mixer.w_q"."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _bar(what: str, total: int, progress: bool) -> tqdm:
    # disable=None: shown on a terminal only
    return tqdm(desc=what, total=total, unit="B", unit_scale=True, disable=None if progress else True)


def load(
    folder: Path,
    cfg: ModelConfig,
    *,
    dtype: Any,
    shardings: P.Params | None = None,
    mtp: bool = True,
    progress: bool = True,
) -> P.Params:
    """Params of a Hugging Face folder, placed by `shardings` (a Params of jax shardings) or on the default device.

    Leaves that declare a dtype (float32 decays and their norm) keep it whatever `dtype` is. Host memory holds one
    shard of one leaf at a time.
    """
    if not mtp:
        cfg = dataclasses.replace(cfg, mtp=False)
        shardings = shardings and shardings.replace(mtp=None)  # type: ignore[attr-defined]
    tree = P.declare(cfg, dtype)
    leaves, targets = _flat(tree), _flat(shardings)
    if shardings is not None and (odd := sorted(targets.keys() ^ leaves.keys())):
        raise ValueError(f"shardings: not for the leaves of this model: {_some(odd)}")
    sources = _match(folder, cfg, dtype)

    def read(path: str, window: tuple[slice, ...]) -> np.ndarray:
        """One shard, filled from its parts; by threads, because transposing takes longer than reading."""
        bounds = [s.indices(n)[:2] for s, n in zip(window, leaves[path].shape)]
        out = np.empty([stop - start for start, stop in bounds], leaves[path].dtype)

        def copy(source: tuple[Part, Stored]) -> int:
            part, stored = source
            place = out[tuple(i - start for i, (start, _) in zip(part.index, bounds))]
            disk = np.memmap(stored.file, DTYPES[stored.dtype], "r", stored.offset, stored.shape)
            new = part.to_ours(disk)[window[len(part.index) :]]
            # A transpose in narrow stripes stays in the cache: two to four times faster.
            stripe = 16 if new.strides[-1] > new.itemsize else new.shape[-1]
            for i in range(0, new.shape[-1], stripe):
                place[..., i : i + stripe] = new[..., i : i + stripe]
            return place.nbytes

        inside = [s for s in sources[path] if all(a <= i < b for i, (a, b) in zip(s[0].index, bounds))]
        for done in pool.map(copy, inside):
            bar.update(done)
        return out

    arrays = []
    with ThreadPoolExecutor() as pool, _bar(f"load {folder.name}", P.num_bytes(tree), progress) as bar:
        for path, leaf in leaves.items():
            if shardings is None:
                arrays.append(jax.device_put(read(path, (slice(None),) * len(leaf.shape))))
                continue
            holders: dict[tuple[slice, ...], list[Any]] = {}
            for device, window in targets[path].addressable_devices_indices_map(leaf.shape).items():
                holders.setdefault(window, []).append(device)
            pieces: list[jax.Array] = []
            for window, devices in holders.items():  # each shard is read once, and left before the next is read
                pieces += jax.block_until_ready(jax.device_put([read(path, window)] * len(devices), devices))
            arrays.append(jax.make_array_from_single_device_arrays(leaf.shape, targets[path], pieces))
    return jax.tree.unflatten(jax.tree.structure(tree), arrays)


def save(
    params: P.Params,
    cfg: ModelConfig,
    hf_config: dict[str, Any],
    folder: Path,
    *,
    max_shard_bytes: int = 5 * 10**9,
    progress: bool = True,
) -> None:
    """Write `params` under the published names, and `hf_config` as config.json. Tensors have their leaves' dtype."""
    leaves, declared = _flat(params), _flat(P.declare(cfg, cfg.dtype))
    shapes, expected = ({path: x.shape for path, x in t.items()} for t in (leaves, declared))
    if odd := sorted({path for path, _ in shapes.items() ^ expected.items()}):
        names = [f"{path} {shapes.get(path)} (expected {expected.get(path)})" for path in odd]
        raise ValueError(f"params: shapes are not those of the config: {_some(names)}")
    if any(folder.glob("*.safetensors*")):
        raise ValueError(f"{folder}: holds safetensors already, give another folder")

    @functools.lru_cache(maxsize=2)  # the two leaves of one tensor, or one layer for all its experts
    def host(path: str, *layer: int) -> np.ndarray:
        return np.asarray(leaves[path][layer])

    published = parts(cfg, cfg.dtype, lambda prefix: cfg.family == "qwen3_5_moe" and not prefix.startswith("mtp."))
    shards: list[list[tuple[list[Part], np.dtype]]] = [[]]
    size = total = 0
    for _, group in itertools.groupby(published, key=lambda part: part.name):
        tensor = list(group)
        dtype = jnp.result_type(*(leaves[part.path] for part in tensor))
        nbytes = math.prod(tensor[0].shape) * dtype.itemsize
        if shards[-1] and size + nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append((tensor, dtype))
        size, total = size + nbytes, total + nbytes

    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    outer = "model.language_model." if "text_config" in hf_config else "model."
    with _bar(f"save {folder.name}", total, progress) as bar:
        for i, shard in enumerate(shards, 1):
            file = SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            content: dict[str, np.ndarray] = {}
            for tensor, dtype in shard:
                disk = np.empty(tensor[0].shape, dtype)
                for part in tensor:
                    part.to_disk(host(part.path, *part.index[:1])[part.index[1:]], disk)
                name = tensor[0].name
                content[outer + name.removeprefix("model.") if name.startswith("model.") else name] = disk
                bar.update(disk.nbytes)
            save_file(content, folder / file, metadata={"format": "pt"})  # transformers insists on the format
            weight_map |= dict.fromkeys(content, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
