# SPDX-License-Identifier: Apache-2.0
"""The forward pass: the order of the layers, written once.

`forward` runs one step of a ragged batch on pages and slots; it is one device's part and runs inside shard_map.
`forward_sequences` runs whole sequences without any state, on whole parameters, and is differentiable; training uses
it. Not here: jit, shard_map, meshes, sampling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from qwen_spmd.config import ModelConfig, Run
from qwen_spmd.layers.attention import attention, attention_sequences
from qwen_spmd.layers.embed import embed, embed_shared, unembed, unembed_shared
from qwen_spmd.layers.gated_delta import gated_delta, gated_delta_sequences
from qwen_spmd.layers.linear import einsum, sum_over_tp
from qwen_spmd.layers.mlp import mlp
from qwen_spmd.layers.moe import Route, Routing, moe, moe_sequences
from qwen_spmd.layers.norm import rms_norm
from qwen_spmd.layers.rope import angles
from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.add_norm import Term, add_norm
from qwen_spmd.pallas.add_norm.reference import add
from qwen_spmd.params import Attention, Block, GatedDelta, Mlp, Moe, Params
from qwen_spmd.state import ModelState, Ragged
from qwen_spmd.unstacked import is_unstacked, one_layer

__all__ = ["Trace", "forward", "forward_sequences", "mtp_sequences", "unembed", "unembed_shared"]


DEFAULT_ROUTE = Route()


@struct.dataclass
class Trace:
    """What happened inside: the residual stream after each layer [L, .., D] and each MoE layer's routing [L, .., *]."""

    hidden: jax.Array
    routing: Routing | None


def forward(
    params: Params,
    state: ModelState,
    tokens_T: jax.Array,
    rows: Ragged,
    *,
    cfg: ModelConfig,
    impl: Impl,
    route: Route = DEFAULT_ROUTE,
    trace: bool = False,
) -> tuple[jax.Array, ModelState, Trace | None]:
    """One step: tokens [T] -> hidden [T, D] after the last norm, the updated state, and what `trace` asked for."""
    cos_sin = angles(rows.pos_T, cfg.rope)

    def layer(block: Block, l: jax.Array, n: jax.Array, carry: tuple) -> tuple[tuple, tuple]:
        """Layer `l` of the stack `block`, the model's n-th of its kind of mixer. Returns (carry, what it leaves): the
        residual stream and, if it is MoE, its routing and the rows of each place. What a layer adds to the stream is
        still in terms at its end: the next norm adds them up."""
        x, terms, kv, conv, rec = carry
        if isinstance(block.mixer, Attention):
            with jax.named_scope("attention"):
                x, h = normed(x, terms, block.mixer_norm[l])
                y, kv = attention(block.mixer, l, h, cos_sin, kv, n, rows, cfg=cfg, impl=impl)
        else:
            with jax.named_scope("gated_delta"):
                x, h = normed(x, terms, block.mixer_norm[l])
                y, conv, rec = gated_delta(block.mixer, l, h, conv, rec, n, rows, cfg=cfg, impl=impl)
        if isinstance(block.ffn, Mlp):
            with jax.named_scope("mlp"):
                x, h = normed(x, (y,), block.ffn_norm[l])
                terms, routing, load_Q = (sum_over_tp(mlp(block.ffn, l, h, impl), h.dtype),), None, None
        else:
            with jax.named_scope("moe"):
                x, h = normed(x, (y,), block.ffn_norm[l])
                terms, routing, load_Q = moe(block.ffn, l, h, rows.valid_T, cfg=_moe(cfg), impl=impl, route=route)
        return (x, terms, kv, conv, rec), (add(x, terms) if trace else None, routing if trace else None, load_Q)

    def normed(x: jax.Array, terms: tuple[Term, ...], w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return add_norm(x, terms, w, eps=cfg.norm_eps, zero_centred=cfg.zero_centred_norms, impl=impl)

    carry = (embed_shared(params, tokens_T), (), state.kv, state.conv, state.rec)
    through = _unrolled if is_unstacked(params) else _scanned
    (x, terms, kv, conv, rec), (hidden, routing, load_LQ) = through(layer, params.blocks, carry, cfg)
    load = state.load if load_LQ is None else state.load + load_LQ[None]
    state = dataclasses.replace(state, kv=kv, conv=conv, rec=rec, load=load)
    return normed(x, terms, params.norm)[1], state, Trace(hidden, routing) if trace else None


def _scanned(
    layer: Callable[..., tuple[tuple, tuple]], blocks: tuple[Block, ...], carry: tuple, cfg: ModelConfig
) -> tuple[tuple, tuple]:
    """Loops over the periods of the pattern, and within over each run of equal layers: code for one of each kind."""

    def period(carry: tuple, i: jax.Array) -> tuple[tuple, list[tuple]]:
        left, before = [], dict.fromkeys(cfg.mixers, 0)
        for block, run in zip(blocks, cfg.runs, strict=True):

            def body(carry: tuple, j: jax.Array, block: Block = block, run: Run = run) -> tuple[tuple, tuple]:
                n = i * (cfg.count(run.mixer) // cfg.periods) + before[run.mixer] + j
                (x, terms, *pools), out = layer(block, i * run.count + j, n, carry)
                return (add(x, terms), (), *pools), out  # the next layer's terms may be others

            carry, out = jax.lax.scan(body, carry, jnp.arange(run.count))
            before[run.mixer] += run.count
            left.append(out)
        return carry, left

    carry, left = jax.lax.scan(period, carry, jnp.arange(cfg.periods))
    return carry, tuple(map(_in_order, zip(*left, strict=True)))


def _unrolled(
    layer: Callable[..., tuple[tuple, tuple]], blocks: tuple[Block, ...], carry: tuple, cfg: ModelConfig
) -> tuple[tuple, tuple]:
    """One layer after the other: code for each, and no copy of a layer's weights out of a stack."""
    layer, left, before = (
        jax.jit(layer),
        [],
        dict.fromkeys(cfg.mixers, 0),
    )  # jit: a kind is traced once, the first layer apart
    for i in range(cfg.num_layers):
        run, l = cfg.place(i)
        mixer = cfg.runs[run].mixer
        carry, out = layer(one_layer(blocks[run], l), jnp.int32(l), jnp.int32(before[mixer]), carry)
        before[mixer] += 1
        left.append(jax.tree.map(lambda x: x[None, None], out))
    return carry, tuple(map(_in_order, zip(*left, strict=True)))


def forward_sequences(
    params: Params,
    tokens_BT: jax.Array,
    cfg: ModelConfig,
    *,
    offset_BT: jax.Array | None = None,
    remat: bool = False,
) -> tuple[jax.Array, Trace]:
    """Whole sequences from position 0: [B, T] -> hidden [B, T, D] after the last norm, and the trace.

    Causal, so right padding is harmless. T must be a multiple of 64. With `offset_BT`, a row holds several sequences:
    each token's position within its own, so that a 0 starts the next. `remat` recomputes each layer in the backward
    pass.
    """
    # Attention sees differences of positions only, so packed sequences need no positions of their own.
    cos_sin, offset_T = _positions(tokens_BT, offset_BT, cfg)

    def period(x: jax.Array, i: jax.Array) -> tuple[jax.Array, Any]:
        seen = []
        for block, run in zip(params.blocks, cfg.runs, strict=True):

            def body(x: jax.Array, j: jax.Array, block: Block = block, run: Run = run) -> tuple[jax.Array, Any]:
                x, routing = _block_sequences(block, i * run.count + j, x, cos_sin, offset_T, cfg)
                return x, (x, routing)

            x, out = jax.lax.scan(jax.checkpoint(body) if remat else body, x, jnp.arange(run.count))
            seen.append(out)
        return x, seen

    x = embed(params, tokens_BT)
    x, seen = jax.lax.scan(period, x, jnp.arange(cfg.periods))
    return _norm(x, params.norm, cfg), Trace(*map(_in_order, zip(*seen, strict=True)))


def mtp_sequences(
    params: Params,
    hidden_BTD: jax.Array,
    next_tokens_BT: jax.Array,
    cfg: ModelConfig,
    *,
    offset_BT: jax.Array | None = None,
) -> tuple[jax.Array, Routing | None]:
    """The multi-token-prediction layer over whole sequences.

    Position t takes the hidden state of `forward_sequences` at t and the token at t + 1; its output, unembedded,
    predicts the token at t + 2. Rotary positions are those of the hidden state.
    """
    assert params.mtp is not None, "this model has no MTP layer"
    p = params.mtp
    x = einsum("...d,de->...e", _norm(embed(params, next_tokens_BT), p.embedding_norm, cfg), p.w_embedding)
    x += einsum("...d,de->...e", _norm(hidden_BTD, p.hidden_norm, cfg), p.w_hidden)
    cos_sin, offset_T = _positions(next_tokens_BT, offset_BT, cfg)
    x, routing = _block_sequences(p.block, jnp.int32(0), x, cos_sin, offset_T, cfg)
    return _norm(x, p.norm, cfg), routing


def _positions(
    tokens_BT: jax.Array, offset_BT: jax.Array | None, cfg: ModelConfig
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    pos_T = jnp.arange(tokens_BT.shape[1])
    return angles(pos_T, cfg.rope), pos_T if offset_BT is None else offset_BT


def _block_sequences(
    block: Block,
    l: jax.Array,
    x: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array],
    offset_T: jax.Array,
    cfg: ModelConfig,
) -> tuple[jax.Array, Routing | None]:
    h = _norm(x, block.mixer_norm[l], cfg)
    if isinstance(block.mixer, GatedDelta):
        x = x + gated_delta_sequences(block.mixer, l, h, offset_T, cfg=cfg)
    else:
        x = x + attention_sequences(block.mixer, l, h, cos_sin, offset_T, cfg=cfg)
    h = _norm(x, block.ffn_norm[l], cfg)
    if isinstance(block.ffn, Moe):
        y, routing = moe_sequences(block.ffn, l, h, cfg=_moe(cfg))
    else:
        y, routing = mlp(block.ffn, l, h)[0], None
    return x + y, routing


def _norm(x: jax.Array, w: jax.Array, cfg: ModelConfig) -> jax.Array:
    return rms_norm(x, w, eps=cfg.norm_eps, zero_centred=cfg.zero_centred_norms)


def _moe(cfg: ModelConfig) -> Any:
    assert cfg.moe is not None
    return cfg.moe


def _in_order(each_run: tuple[Any, ...]) -> Any:
    """What each run left, [periods, count, ..] -> layers in order; of those that left something."""

    def join(*xs: jax.Array) -> jax.Array:
        return jnp.concatenate(xs, 1).reshape(-1, *xs[0].shape[2:])

    some = [x for x in each_run if x is not None]
    return jax.tree.map(join, *some) if some else None
