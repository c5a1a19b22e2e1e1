# SPDX-License-Identifier: Apache-2.0
"""What the demo's training minimises, and exact-match of a batch. Pure functions of float32 weights and a batch."""

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
    """Of the multi-token prediction loss and of the router's load balancing.

    A token of a row with n tokens to predict counts n ** -length_power: a short answer must not be lost among long
    ones. `remat` recomputes activations in the backward pass.
    """

    @property
    def mtp(self) -> float: ...
    @property
    def balance(self) -> float: ...
    @property
    def length_power(self) -> float: ...
    @property
    def remat(self) -> bool: ...


def loss_sums(
    params: P.Params, batch: Batch, cfg: ModelConfig, weights: Weights, pad_id: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Summed over the tokens to predict: what is minimised, and the parts of `Total`.

    The parts are counts [tasks + 1, (loss, tokens, rows all right, rows)] with empty rows under the last task, and
    extra (mtp loss, mtp tokens right, balance, weight), all float32.
    """
    params = rounded(params, cfg)
    tokens, valid = batch.tokens_BT, batch.tokens_BT != pad_id
    spoken = batch.spoken_BT.astype(jnp.float32)
    hidden, trace = model.forward_sequences(params, tokens, cfg, remat=weights.remat)
    losses, right = _cross_entropy(params, hidden, tokens, spoken, 1)
    drafts, draft_routing = model.mtp_sequences(params, hidden, _later(tokens, 1), cfg)
    mtp, mtp_right = _cross_entropy(params, drafts, tokens, spoken, 2)
    balance = _imbalance(trace.routing, valid).mean() + _imbalance(draft_routing, valid)
    weight_B = jnp.maximum(spoken.sum(1), 1) ** -weights.length_power
    total = (spoken.sum(1) * weight_B).sum()
    minimised = ((losses + weights.mtp * mtp).sum(1) * weight_B).sum() + weights.balance * balance * total
    task = jnp.where(batch.task_B < 0, len(TASKS), batch.task_B)
    per_row = jnp.stack([losses.sum(1), spoken.sum(1), right.all(1), jnp.ones_like(task)], 1).astype(jnp.float32)
    counts = jnp.zeros((len(TASKS) + 1, 4)).at[task].add(per_row)
    mtp_hits = (mtp_right & (_later(spoken, 2) > 0)).sum().astype(jnp.float32)
    return minimised, (counts, jnp.stack([mtp.sum(), mtp_hits, balance * total, total]))


def _cross_entropy(
    params: P.Params, hidden: jax.Array, tokens: jax.Array, spoken: jax.Array, ahead: int
) -> tuple[jax.Array, jax.Array]:
    """[B, T]: the loss of the spoken tokens `ahead`, zero elsewhere; and whether greedy decoding gets them right."""
    logits = model.unembed(params, hidden)
    target, wanted = _later(tokens, ahead), _later(spoken, ahead)
    loss = optax.losses.softmax_cross_entropy_with_integer_labels(logits, target)
    return loss * wanted, (jnp.argmax(logits, -1) == target) | (wanted == 0)


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


def answers_right(params: P.Params, batch: Batch, cfg: ModelConfig) -> jax.Array:
    """[B]: the reference answer is what greedy decoding gives, as each of its tokens is the most likely one."""
    hidden, _ = model.forward_sequences(params, batch.tokens_BT, cfg)
    spoken = batch.spoken_BT.astype(jnp.float32)
    return _cross_entropy(params, hidden, batch.tokens_BT, spoken, 1)[1].all(1)
