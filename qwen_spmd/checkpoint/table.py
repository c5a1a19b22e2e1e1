# SPDX-License-Identifier: Apache-2.0
"""The published tensor names and layouts <-> the leaves of Params, as a table.

Lives here: TABLE, the only place in the package with Hugging Face tensor names; `parts`, the table written out for a
config. Not here: files, shapes and dtypes (params.py declares them), quantised formats, the vision tower.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from qwen_spmd import params as P
from qwen_spmd.checkpoint.pieces import Window
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

    def to_disk(self, ours: np.ndarray, disk: np.ndarray, window: Window) -> None:
        """Write `leaf[index][window]` into its place in the tensor. Channels, our last axis, are whole in a window."""
        place = disk.reshape(self.split)[self.at].transpose(self.axes)[window]
        if self.channels is None:
            copy(ours, place)
        else:
            place[..., self.channels] = ours


def copy(source: np.ndarray, target: np.ndarray) -> None:
    """`target[...] = source`. A transpose in narrow stripes stays in the cache: two to four times faster."""
    n = source.shape[-1]
    stripe = n if source.strides[-1] == source.itemsize and target.strides[-1] == target.itemsize else 16
    for i in range(0, n, stripe):
        target[..., i : i + stripe] = source[..., i : i + stripe]


def canonical(name: str) -> str:
    """A tensor's name in a file, with the prefix that `Part.name` has."""
    prefix = next(filter(name.startswith, PREFIXES), None)
    return name if prefix is None else PREFIXES[prefix] + name.removeprefix(prefix)


def form(names: Collection[str]) -> Callable[[str], bool]:
    """`fused` for `parts`: the form of each layer's experts in a checkpoint with these names."""
    return lambda prefix: any(prefix + name in names for name, _, _ in FUSED)


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
