# SPDX-License-Identifier: Apache-2.0
"""What the demo's training minimises, and which tokens are right. Pure functions of float32 weights and a batch."""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from qwen_spmd import model
from qwen_spmd import params as P
from qwen_spmd.config import ModelConfig
from qwen_spmd.demo.data import Batch
from qwen_spmd.demo.export import rounded
from qwen_spmd.demo.tasks import TASKS


class Weights(Protocol):
    """Of the multi-token prediction loss and of the router's load balancing. `remat` recomputes activations."""

    @property
    def mtp(self) -> float: ...
    @property
    def balance(self) -> float: ...
    @property
    def remat(self) -> bool: ...


def loss_sums(
    params: P.Params, batch: Batch, cfg: ModelConfig, weights: Weights
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Summed over the tokens to predict: what is minimised, and the parts of `Total`.

    The parts are counts [tasks + 1, (loss, tokens, tokens right)], padding under the last task, and extra (mtp loss,
    mtp tokens right, balance, weight), all float32.
    """
    params = rounded(params, cfg)
    tokens, offset, valid = batch.tokens_BT, batch.offset_BT, batch.task_BT >= 0
    hidden, trace = model.forward_sequences(params, tokens, cfg, offset_BT=offset, remat=weights.remat)
    losses, right = _cross_entropy(params, hidden, batch, 1)
    drafts, draft_routing = model.mtp_sequences(params, hidden, _later(tokens, 1), cfg, offset_BT=offset)
    mtp, mtp_right = _cross_entropy(params, drafts, batch, 2)
    balance = _imbalance(trace.routing, valid).mean() + _imbalance(draft_routing, valid)
    weight_BT, weight2_BT = _later(batch.weight_BT, 1), _later(batch.weight_BT, 2)
    total = weight_BT.sum()
    minimised = (losses * weight_BT).sum() + weights.mtp * (mtp * weight2_BT).sum() + weights.balance * balance * total

    spoken = weight_BT > 0
    per_token = jnp.stack([losses * spoken, spoken, right & spoken], -1).astype(jnp.float32)
    one_hot = jax.nn.one_hot(jnp.where(valid, batch.task_BT, len(TASKS)), len(TASKS) + 1)
    counts = jnp.einsum("bts,btc->sc", one_hot, per_token)
    spoken2 = weight2_BT > 0
    return minimised, (counts, jnp.stack([(mtp * spoken2).sum(), (mtp_right & spoken2).sum(), balance * total, total]))


def _cross_entropy(params: P.Params, hidden: jax.Array, batch: Batch, ahead: int) -> tuple[jax.Array, jax.Array]:
    """[B, T]: the loss of each token `ahead`, and whether greedy decoding gets it right."""
    logits, target = model.unembed(params, hidden), _later(batch.tokens_BT, ahead)
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, target), jnp.argmax(logits, -1) == target


def _later(x: jax.Array, ahead: int) -> jax.Array:
    """What stands `ahead` places later; zeros at the end."""
    return jnp.pad(x[:, ahead:], ((0, 0), (0, ahead)))


def _imbalance(routing: Any, valid: jax.Array) -> jax.Array:
    """By layer, 1 if tokens are spread evenly over the experts and up to E: share of choices times mean probability."""
    E = routing.logits_TE.shape[-1]
    weight = valid / jnp.maximum(valid.sum(), 1)
    chosen = jax.nn.one_hot(routing.experts_TX, E).mean(-2)
    share = jnp.einsum("...bte,bt->...e", chosen, weight)
    probability = jnp.einsum("...bte,bt->...e", jax.nn.softmax(routing.logits_TE), weight)
    return E * (share * probability).sum(-1)


def tokens_right(params: P.Params, batch: Batch, cfg: ModelConfig) -> jax.Array:
    """bool [B, T]: the token is what greedy decoding says after all before it. The first of a row counts as wrong."""
    hidden, _ = model.forward_sequences(params, batch.tokens_BT, cfg, offset_BT=batch.offset_BT)
    best = jnp.argmax(model.unembed(params, hidden), -1)
    return jnp.pad(best[:, :-1] == batch.tokens_BT[:, 1:], ((0, 0), (1, 0)))
