# SPDX-License-Identifier: Apache-2.0
"""Folders of safetensors files: checked against the config and read by leaf, written by tensor.

Lives here: `open_source`, which finds all that is wrong with a folder before anything is read; `Files`, which writes
tensors one at a time; `save` of Params. Not here: names and layouts (table.py), config.json (config.py), quantised
formats, the vision tower.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from qwen_spmd import params as P
from qwen_spmd.checkpoint.manifest import Piece
from qwen_spmd.checkpoint.pieces import Source, Tensor, Window, bar, cut, some
from qwen_spmd.checkpoint.table import QUANTISED, VISION, Part, canonical, copy, form, parts
from qwen_spmd.config import ModelConfig

DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Stored(NamedTuple):
    """A tensor in a file, as the file's header describes it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def map(self) -> np.ndarray:
        """The tensor, its bytes read when they are touched."""
        return np.memmap(self.file, DTYPES[self.dtype], "r", self.offset, self.shape)


def open_source(folder: Path, cfg: ModelConfig, dtype: Any) -> Source:
    """A folder open for reading by leaf. ValueError with all that is wrong, by name."""
    found, left_out = _found(folder, cfg)
    sources = _match(folder, cfg, dtype, found)
    leaves = dict(P.leaves_with_path(P.declare(cfg, dtype)))

    def read(path: str, window: Window) -> np.ndarray:
        """Filled from its parts by threads, because transposing takes longer than reading."""
        out = np.empty([w.stop - w.start for w in window], leaves[path].dtype)

        def fill(part: Part, stored: Stored) -> None:
            place = out[tuple(i - w.start for i, w in zip(part.index, window))]
            copy(part.to_ours(stored.map())[window[len(part.index) :]], place)

        held = sources[path]
        with ThreadPoolExecutor() as pool:
            jobs = []
            for depth in {len(index) for index in held}:
                indices = itertools.product(*(range(w.start, w.stop) for w in window[:depth]))
                jobs += [pool.submit(fill, *held[index]) for index in indices if index in held]
            for job in jobs:
                job.result()
        return out

    used = {name: stored[0] for name, stored in found.items()}
    tensors = {name: Tensor(s.name, s.dtype, s.shape, s.file.name) for name, s in used.items()}
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    return Source(shapes, read, tensors, left_out, functools.partial(identity, folder))


def headers(folder: Path) -> Iterator[Stored]:
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
        raise ValueError(f"{index}: names files that the folder lacks: {some(lost)}")
    return files


def identity(folder: Path) -> str:
    """A digest of config.json and of each file's size and both its ends. All of it would take as long as converting."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in _files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as f:
            digest.update(f.read(2**20))
            f.seek(max(size - 2**20, 0))
            digest.update(f.read())
    return digest.hexdigest()


def _found(folder: Path, cfg: ModelConfig) -> tuple[dict[str, list[Stored]], list[str]]:
    """The tensors by canonical name, and what is left out, in words."""
    ignored: dict[str, str] = dict.fromkeys(VISION, "the vision tower")
    if cfg.tied_embeddings:
        ignored["lm_head."] = "a head that is the same as the embedding"
    if not cfg.mtp:
        ignored["mtp."] = "an MTP layer that is not asked for"
    found: dict[str, list[Stored]] = {}
    left_out: Counter[str] = Counter()
    for stored in headers(folder):
        name = canonical(stored.name)
        if prefix := next(filter(name.startswith, ignored), None):
            left_out[ignored[prefix]] += 1
        else:
            found.setdefault(name, []).append(stored)
    return found, [f"{n} tensors of {what}" for what, n in left_out.items()]


def _match(
    folder: Path, cfg: ModelConfig, dtype: Any, found: Mapping[str, list[Stored]]
) -> dict[str, dict[tuple[int, ...], tuple[Part, Stored]]]:
    """For each leaf, its parts by index and where they are stored; ValueError with all that is wrong, by name."""
    for suffix, kind in QUANTISED.items():
        if names := [name for name in found if name.endswith(suffix)]:
            raise ValueError(f"{folder}: quantised, {kind} ({some(names)}); supported are plain {', '.join(DTYPES)}")
    fused = form(found)
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
        lines = [f"{len(names)} {what}: {some(names)}" for what, names in problems.items() if names]
        if "lm_head.weight" in problems["missing"]:
            lines.append("tie_word_embeddings is false in config.json, so lm_head.weight must be there")
        if cfg.mtp and not any(name.startswith("mtp.") for name in found):
            lines.append("config.json has an MTP layer and the files have none: load with mtp=False")
        raise ValueError("\n  ".join([f"{folder}: the tensors are not those of its config.json", *lines]))
    sources: dict[str, dict[tuple[int, ...], tuple[Part, Stored]]] = {}
    for part in parts(cfg, dtype, fused):
        sources.setdefault(part.path, {})[part.index] = part, found[part.name][0]
    return sources


class Files:
    """Published tensors in safetensors files, written one at a time: a piece is a tensor.

    A file has another name until `finish`, so that nobody takes it for a whole one.
    """

    def __init__(self, folder: Path, cfg: ModelConfig, tensors: Mapping[str, Tensor]):
        """`tensors` by canonical name, each with the file that it goes to."""
        self._folder = folder
        self._shapes = {path: leaf.shape for path, leaf in P.leaves_with_path(P.declare(cfg, cfg.dtype))}
        self._parts: dict[str, list[Part]] = {}
        self._headers: dict[str, bytes] = {}
        self._stored: dict[str, Stored] = {}
        files: dict[str, list[Tensor]] = {}
        for name, group in itertools.groupby(parts(cfg, cfg.dtype, form(tensors)), key=lambda part: part.name):
            self._parts[tensors[name].name] = list(group)
            files.setdefault(tensors[name].file, []).append(tensors[name])
        for file, listed in files.items():
            listed.sort(key=lambda t: -DTYPES[t.dtype].itemsize)  # so that each begins at a multiple of its itemsize
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers insists on the format
            end = 0
            for t in listed:
                start, end = end, end + num_bytes(t)
                header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [start, end]}
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            self._headers[file] = len(text).to_bytes(8, "little") + text
            for t in listed:
                offset = 8 + len(text) + header[t.name]["data_offsets"][0]
                self._stored[t.name] = Stored(t.name, folder / file, t.dtype, t.shape, offset)
        self.pieces = [Piece(s.name, (0,) * len(s.shape), s.shape) for s in self._stored.values()]
        self.dtypes = {s.name: DTYPES[s.dtype] for s in self._stored.values()}

    def content(self, read: Callable[[str, Window], np.ndarray], piece: Piece) -> np.ndarray:
        """The tensor, put together from windows of its leaves."""
        disk = np.empty(piece.shape, self.dtypes[piece.name])
        for part in self._parts[piece.name]:
            shape = self._shapes[part.path][len(part.index) :]
            at = tuple(slice(i, i + 1) for i in part.index)
            for window in cut(shape, disk.itemsize, (1,) * (len(shape) - 1) + shape[-1:]):
                part.to_disk(read(part.path, at + window)[(0,) * len(at)], disk, window)
        return disk

    def write(self, piece: Piece, content: np.ndarray) -> None:
        """Put a tensor in its place in its file."""
        _, file, _, _, offset = self._stored[piece.name]
        header = self._headers[file.name]
        path = file if file.is_file() else _partial(file)
        with path.open("r+b" if path.is_file() else "w+b") as f:
            if offset == len(header):
                f.write(header)
            f.seek(offset)
            f.write(content.reshape(-1).view(np.uint8))
            f.flush()
            os.fsync(f.fileno())

    def finish(self) -> None:
        """All tensors are there: the files get their names, and an index."""
        for file in {stored.file: None for stored in self._stored.values()}:
            if not file.is_file():
                _partial(file).rename(file)
        weight_map = {name: stored.file.name for name, stored in self._stored.items()}
        if {*weight_map.values()} != {SINGLE}:
            total = sum(map(num_bytes, self._stored.values()))
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _partial(file: Path) -> Path:
    return file.with_name(f"{file.name}.partial")


def num_bytes(tensor: Tensor | Stored) -> int:
    return math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize


def stored(folder: Path) -> Callable[[Piece], np.ndarray]:
    """What a finished folder holds for a piece."""
    tensors = {s.name: s for s in headers(folder)}

    def read(piece: Piece) -> np.ndarray:
        held = tensors.get(piece.name)
        if held is None or held.dtype not in DTYPES:
            raise ValueError(f"{folder}: holds no {piece.name} in {', '.join(DTYPES)}")
        return held.map()

    return read


def save(
    params: P.Params,
    cfg: ModelConfig,
    hf_config: dict[str, Any],
    folder: Path,
    *,
    max_shard_bytes: int = 5 * 10**9,
    progress: bool = True,
) -> None:
    """Write `params` under the published names, and `hf_config` as config.json. Tensors have their leaves' dtype.

    Beside the parameters it holds one tensor, and the leaf's layer that the tensor comes from.
    """
    leaves, declared = (dict(P.leaves_with_path(tree)) for tree in (params, P.declare(cfg, cfg.dtype)))
    shapes, expected = ({path: x.shape for path, x in t.items()} for t in (leaves, declared))
    if odd := sorted({path for path, _ in shapes.items() ^ expected.items()}):
        names = [f"{path} {shapes.get(path)} (expected {expected.get(path)})" for path in odd]
        raise ValueError(f"params: shapes are not those of the config: {some(names)}")
    if any(folder.glob("*.safetensors*")):
        raise ValueError(f"{folder}: holds safetensors already, give another folder")

    @functools.lru_cache(maxsize=2)  # the two leaves of one tensor, or one layer for all its experts
    def host(path: str, *layer: int) -> np.ndarray:
        return np.asarray(leaves[path][layer])

    def read(path: str, window: Window) -> np.ndarray:
        if declared[path].dims[0] != "L":
            return host(path)[window]
        return host(path, window[0].start)[window[1:]][None]

    published = parts(cfg, cfg.dtype, lambda prefix: cfg.family == "qwen3_5_moe" and not prefix.startswith("mtp."))
    outer = "model.language_model." if "text_config" in hf_config else "model."
    shards: list[list[Tensor]] = [[]]
    size = 0
    for name, group in itertools.groupby(published, key=lambda part: part.name):
        first, *others = group
        dtype = NAMES[jnp.result_type(*(leaves[part.path] for part in (first, *others)))]
        full = outer + name.removeprefix("model.") if name.startswith("model.") else name
        tensor = Tensor(full, dtype, first.shape, "")
        if shards[-1] and size + num_bytes(tensor) > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += num_bytes(tensor)
    file = SINGLE if len(shards) == 1 else f"model-{{:05d}}-of-{len(shards):05d}.safetensors"
    tensors = {canonical(t.name): t._replace(file=file.format(i)) for i, shard in enumerate(shards, 1) for t in shard}

    folder.mkdir(parents=True, exist_ok=True)
    files = Files(folder, cfg, tensors)
    with bar(f"save {folder.name}", sum(map(num_bytes, tensors.values())), progress) as shown:
        for piece in files.pieces:
            content = files.content(read, piece)
            files.write(piece, content)
            shown.update(content.nbytes)
    files.finish()
    (folder / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
