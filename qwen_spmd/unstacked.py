# SPDX-License-Identifier: Apache-2.0
"""Params in which each layer's arrays are its own, for programs that unroll the layers.

XLA multiplies out of whole arrays. On a GPU, a matrix within a stack is first copied out of it, which triples the bytes
that a decode step reads of it. So there all stacks become tuples of L arrays, but for the experts', out of which our
own kernels read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec as P

from qwen_spmd.config import ModelConfig
from qwen_spmd.mesh.rules import Layout
from qwen_spmd.params import Block, Leaf, Params, declare


@struct.dataclass
class Own:
    """One layer's array in the place of the stack of all layers': whatever the index, this is it."""

    array: jax.Array

    def __getitem__(self, l: Any) -> jax.Array:
        return self.array


def is_unstacked(params: Params) -> bool:
    return any(isinstance(x, tuple) for x in jax.tree.leaves(params.blocks, is_leaf=_is_tuple_of_layers))


def one_layer(block: Block, l: int) -> Block:
    """Layer `l` of a block, for code that indexes stacks by l."""
    take = lambda x: Own(x[l]) if isinstance(x, tuple) else x  # noqa: E731
    return jax.tree.map(take, block, is_leaf=_is_tuple_of_layers)


def unstack(params: Params, cfg: ModelConfig, layout: Layout, *, donate: bool = False) -> Params:
    """Of arrays or abstract ones, with shardings. `donate`: arrays that are taken apart are deleted, one by one."""

    def cut(_: Leaf, x: Any) -> tuple:
        sharding = x.sharding.update(spec=P(*x.sharding.spec[1:]))
        if isinstance(x, jax.ShapeDtypeStruct):
            return (jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding),) * x.shape[0]
        take = jax.jit(lambda x, l: x[l], out_shardings=sharding)
        layers = tuple(take(x, l) for l in range(x.shape[0]))
        if donate:
            jax.block_until_ready(layers)
            x.delete()
        return layers

    return _each_alone(cut, params, cfg, layout)


def unstack_specs(specs: Params, cfg: ModelConfig, layout: Layout) -> Params:
    """The same of PartitionSpecs."""
    return _each_alone(lambda leaf, spec: (P(*spec[1:]),) * leaf.shape[0], specs, cfg, layout)


def stack(params: Params) -> Params:
    """Undo `unstack`, by copying. Params of whole stacks are returned as they are."""
    if not is_unstacked(params):
        return params
    whole = lambda x: jnp.stack(x) if isinstance(x, tuple) else x  # noqa: E731
    return params.replace(blocks=jax.tree.map(whole, params.blocks, is_leaf=_is_tuple_of_layers))  # type: ignore[attr-defined]


def _is_tuple_of_layers(x: Any) -> bool:
    """Not the tuple of blocks."""
    return isinstance(x, tuple) and not isinstance(x, P) and not (x and isinstance(x[0], Block))


def _each_alone(cut: Callable[[Leaf, Any], tuple], tree: Params, cfg: ModelConfig, layout: Layout) -> Params:
    declared: Params = declare(cfg, jnp.float32, layout)

    def alone(leaf: Leaf) -> bool:
        """All but the experts and their places, which are read where they are in the stack."""
        return "Q" not in leaf.dims and leaf.dims != "LEA"

    blocks = jax.tree.map(lambda leaf, x: cut(leaf, x) if alone(leaf) else x, declared.blocks, tree.blocks)
    return tree.replace(blocks=blocks)  # type: ignore[attr-defined]
