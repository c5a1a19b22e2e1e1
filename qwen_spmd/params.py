# SPDX-License-Identifier: Apache-2.0
"""Params: the parameter pytrees. Each leaf is declared once, by its dims.

`w_gate: jax.Array = dims("LEDM")` is the only place that knows a parameter's shape. Abstract shapes, sharding specs,
initial values and the checkpoint's shape checks all derive from that line, the config's letter table and the layout.

Layers of one kind are stacked over a leading L. A model is a tuple of stacks, one for each run of equal layers in the
repeating pattern (Qwen3: one; Qwen3.5: Gated DeltaNet and attention); `ModelConfig.place` finds a layer in them.

Weights are [in, out]: contraction first. Not here: forward code, file formats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding

from qwen_spmd.config import ModelConfig
from qwen_spmd.mesh.rules import SINGLE, Layout

Init = Literal["normal", "zeros", "ones", "decay_rate", "decay_bias", "places"]


def dims(letters: str, *, dtype: Any = None, init: Init = "normal") -> Any:
    """Declare an array field: one letter for each axis; `dtype` None means the model's."""
    return struct.field(metadata={"dims": letters, "dtype": dtype, "init": init})


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A declared array before it exists: what `dims` said, with the letters resolved."""

    dims: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    init: Init


@struct.dataclass
class Attention:
    """Grouped-query attention. Query head n reads KV head n // (N / K). `w_gate` only with an output gate."""

    w_q: jax.Array = dims("LDNH")
    w_gate: jax.Array | None = dims("LDNH")
    w_k: jax.Array = dims("LDKH")
    w_v: jax.Array = dims("LDKH")
    w_o: jax.Array = dims("LNHD")
    q_norm: jax.Array = dims("LH", init="ones")
    k_norm: jax.Array = dims("LH", init="ones")


@struct.dataclass
class GatedDelta:
    """Gated DeltaNet. Value head u uses key head u // (U / J).

    The C channels are grouped by key head: its query (Y), its key (Y), its U / J values (Z each). A contiguous range
    of C is therefore whole heads, and sharding C over `tp` needs nothing special.
    """

    w_qkv: jax.Array = dims("LDC")
    w_z: jax.Array = dims("LDUZ")
    w_b: jax.Array = dims("LDU")
    w_a: jax.Array = dims("LDU")
    conv: jax.Array = dims("LWC")
    a_log: jax.Array = dims("LU", dtype=jnp.float32, init="decay_rate")
    dt_bias: jax.Array = dims("LU", dtype=jnp.float32, init="decay_bias")
    norm: jax.Array = dims("LZ", dtype=jnp.float32, init="ones")
    w_o: jax.Array = dims("LUZD")


@struct.dataclass
class Mlp:
    """Dense SwiGLU of width F."""

    w_gate: jax.Array = dims("LDF")
    w_up: jax.Array = dims("LDF")
    w_down: jax.Array = dims("LFD")


@struct.dataclass
class Moe:
    """E routed SwiGLU experts of width M and, in Qwen3.5, a shared one of width F behind a sigmoid gate.

    The weights are in Q places: one for each expert, then copies and null experts, as `mesh/placement.py` has it.
    places[l, e] are the A places of expert e in layer l; one with fewer copies is listed again. None: e is in place e.
    """

    w_router: jax.Array = dims("LDE")
    w_gate: jax.Array = dims("LQDM")
    w_up: jax.Array = dims("LQDM")
    w_down: jax.Array = dims("LQMD")
    places: jax.Array | None = dims("LEA", dtype=jnp.int32, init="places")
    w_shared_gate: jax.Array | None = dims("LD")
    shared: Mlp | None = None


@struct.dataclass
class Block:
    """Pre-norm residual block: a mixer, then a feed-forward."""

    mixer_norm: jax.Array = dims("LD", init="ones")
    ffn_norm: jax.Array = dims("LD", init="ones")
    mixer: Attention | GatedDelta = None  # type: ignore[assignment]
    ffn: Mlp | Moe = None  # type: ignore[assignment]


@struct.dataclass
class Mtp:
    """The multi-token-prediction layer: an attention block over [next token's embedding, last hidden state]."""

    embedding_norm: jax.Array = dims("D", init="ones")
    hidden_norm: jax.Array = dims("D", init="ones")
    w_embedding: jax.Array = dims("DD")
    w_hidden: jax.Array = dims("DD")
    norm: jax.Array = dims("D", init="ones")
    block: Block = None  # type: ignore[assignment]


@struct.dataclass
class Params:
    """Everything that a checkpoint holds. `lm_head` is None when it is tied to `embed`."""

    embed: jax.Array = dims("VD")
    norm: jax.Array = dims("D", init="ones")
    lm_head: jax.Array | None = dims("VD")
    blocks: tuple[Block, ...] = ()
    mtp: Mtp | None = None


def declare(cfg: ModelConfig, dtype: Any, layout: Layout = SINGLE) -> Params:
    """The Params tree with a `Leaf` in the place of each array."""
    sizes, dtype = cfg.dims(), jnp.dtype(dtype)
    sizes |= {"Q": layout.places or sizes.get("E", 0), "A": layout.copies}

    def tree(cls: Callable[..., Any], L: int, **children: Any) -> Any:
        fields = {}
        for f in dataclasses.fields(cls):  # type: ignore[arg-type]
            if f.name in children:
                fields[f.name] = children[f.name]
            elif "dims" in f.metadata:
                m = f.metadata
                init = "zeros" if m["init"] == "ones" and m["dtype"] is None and cfg.zero_centred_norms else m["init"]
                shape = tuple((sizes | {"L": L})[letter] for letter in m["dims"])
                fields[f.name] = Leaf(m["dims"], shape, jnp.dtype(m["dtype"] or dtype), init)
        return cls(**fields)

    def block(mixer_kind: str, ffn_kind: str, L: int) -> Block:
        if mixer_kind == "attention":
            mixer = tree(Attention, L, **({} if cfg.output_gate else {"w_gate": None}))
        else:
            mixer = tree(GatedDelta, L)
        if ffn_kind == "mlp":
            ffn = tree(Mlp, L)
        else:
            assert cfg.moe is not None
            shared = {"shared": tree(Mlp, L)} if cfg.moe.shared_width is not None else {"w_shared_gate": None}
            ffn = tree(Moe, L, **shared, **({} if layout.copies else {"places": None}))
        return tree(Block, L, mixer=mixer, ffn=ffn)

    return tree(
        Params,
        0,
        blocks=tuple(block(run.mixer, run.ffn, cfg.periods * run.count) for run in cfg.runs),
        mtp=tree(Mtp, 0, block=block("attention", cfg.pattern[-1][1], 1)) if cfg.mtp else None,
        **({"lm_head": None} if cfg.tied_embeddings else {}),
    )


def abstract(cfg: ModelConfig, dtype: Any, layout: Layout = SINGLE) -> Params:
    """Params as `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), declare(cfg, dtype, layout))


def abstract_like(params: Params) -> Params:
    """Shapes, dtypes and shardings of existing parameters."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)


def specs(cfg: ModelConfig, layout: Layout) -> Params:
    """Params of `PartitionSpec`s: each leaf's letters looked up in the layout."""
    return jax.tree.map(lambda leaf: layout.spec(leaf.dims), declare(cfg, jnp.float32, layout))


def init(cfg: ModelConfig, dtype: Any, key: jax.Array, layout: Layout = SINGLE) -> Params:
    """Random parameters: matrices normal with standard deviation fan_in**-0.5 (embeddings 0.02), norms neutral."""
    leaves, tree = jax.tree.flatten(declare(cfg, dtype, layout))
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(tree, [_init_leaf(leaf, k) for leaf, k in zip(leaves, keys, strict=True)])


def _init_leaf(leaf: Leaf, key: jax.Array) -> jax.Array:
    match leaf.init:
        case "zeros":
            return jnp.zeros(leaf.shape, leaf.dtype)
        case "ones":
            return jnp.ones(leaf.shape, leaf.dtype)
        case "places":  # expert e in place e
            return jnp.broadcast_to(jnp.arange(leaf.shape[1], dtype=leaf.dtype)[:, None], leaf.shape)
        case "decay_rate":  # A in [1, 16], as Mamba-2 starts
            return jnp.log(jax.random.uniform(key, leaf.shape, leaf.dtype, 1.0, 16.0))
        case "decay_bias":  # softplus(dt_bias) log-uniform in [1e-3, 1e-1]
            dt = jnp.exp(jax.random.uniform(key, leaf.shape, leaf.dtype, np.log(1e-3), np.log(1e-1)))
            return dt + jnp.log(-jnp.expm1(-dt))
        case "normal":
            scale = 0.02 if leaf.dims == "VD" else _fan_in(leaf) ** -0.5
            return (jax.random.normal(key, leaf.shape, jnp.float32) * scale).astype(leaf.dtype)


def _fan_in(leaf: Leaf) -> int:
    """Size of the axes that a matrix contracts: D going in; otherwise all but the leading L, Q and the last D."""
    kept = leaf.dims.lstrip("LQ")
    contracted = "D" if kept[0] == "D" else "W" if kept[0] == "W" else kept[:-1]
    return int(np.prod([leaf.shape[leaf.dims.index(c)] for c in contracted]))


def leaves_with_path(params: Params) -> list[tuple[str, Any]]:
    """("blocks.0.mixer.w_q", array) of every leaf."""
    leaves, _ = jax.tree.flatten_with_path(params)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def place(whole: Params, cfg: ModelConfig, mesh: Mesh, layout: Layout) -> Params:
    """Whole parameters (SINGLE's shapes) in a layout on a mesh, expert e in place e. They pass through the host."""

    arrays = dict(leaves_with_path(whole))

    def put(path: str, leaf: Leaf) -> jax.Array:
        x = np.asarray(arrays[path] if path in arrays else _init_leaf(leaf, jax.random.key(0)))
        null = [(0, n - held) for n, held in zip(leaf.shape, x.shape, strict=True)]
        return jax.device_put(np.pad(x, null), NamedSharding(mesh, layout.spec(leaf.dims)))

    declared = declare(cfg, whole.embed.dtype, layout)
    placed = [put(path, leaf) for path, leaf in leaves_with_path(declared)]
    return jax.tree.unflatten(jax.tree.structure(declared), placed)


def num_params(params: Params) -> int:
    """Number of parameters, from arrays or abstract shapes."""
    return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params))


def device_bytes(params: Params) -> int:
    """Bytes that one device holds, from arrays or abstract shapes with their shardings."""
    return sum(
        int(np.prod(x.sharding.shard_shape(x.shape))) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(params)
    )


def num_bytes(tree: Any) -> int:
    """Bytes of all arrays in a pytree, from arrays or abstract shapes."""
    return sum(int(np.prod(x.shape)) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
