# SPDX-License-Identifier: Apache-2.0
"""Sampling on the device, each row by its own rules.

Order: stop ids masked below min_len, temperature, top-k, top-p, min-p (as in transformers), then the Gumbel-max
draw. The noise of a candidate is a function of (seed, position, id) alone, so a row's token depends on nothing else:
not on the batch, the step's shape, or which of the paths below ran. A batch without a sampling row pays for an argmax.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwen_spmd.state import Sampling

CANDIDATES = 64
"""Rows with top_k from 1 to this many sort only so many logits."""

GREEDY_BELOW = 1e-5
"""Temperatures below this count as 0: a quotient of that size says nothing that the argmax does not."""


def sample(logits_BV: jax.Array, s: Sampling, pos_B: jax.Array) -> jax.Array:
    """The token at position `pos_B` of each row, int32 [B]. `logits_BV` float32."""
    V = logits_BV.shape[1]
    logits_BV = _mask_stop_ids(logits_BV, s, pos_B)
    greedy_B = s.temperature_B < GREEDY_BELOW
    top_k_B = jnp.where(s.top_k_B > 0, jnp.minimum(s.top_k_B, V), V)
    k = min(CANDIDATES, V)

    def draw(width: int) -> jax.Array:
        best, ids = jax.lax.top_k(logits_BV, width)
        token_B = _draw(best, ids, top_k_B, s, pos_B)
        return jnp.where(greedy_B, ids[:, 0], token_B)

    few = jnp.all(greedy_B | (top_k_B <= k))
    return jax.lax.switch(
        jnp.where(jnp.all(greedy_B), 0, jnp.where(few, 1, 2)),
        [lambda: jnp.argmax(logits_BV, -1).astype(jnp.int32), lambda: draw(k), lambda: draw(V)],
    )


def _mask_stop_ids(logits_BV: jax.Array, s: Sampling, pos_B: jax.Array) -> jax.Array:
    def masked() -> jax.Array:
        V = logits_BV.shape[1]
        early_B = pos_B < s.min_len_B
        ids = jnp.where(early_B[:, None] & (s.stop_ids_B >= 0), s.stop_ids_B, V)
        return logits_BV.at[jnp.arange(len(pos_B))[:, None], ids].set(-jnp.inf, mode="drop")

    return jax.lax.cond(jnp.any(pos_B < s.min_len_B), masked, lambda: logits_BV)


def _draw(best: jax.Array, ids: jax.Array, top_k_B: jax.Array, s: Sampling, pos_B: jax.Array) -> jax.Array:
    """One id of each row from its candidates, `best` logits in falling order."""
    logits = best / jnp.maximum(s.temperature_B, GREEDY_BELOW)[:, None]
    logits = jnp.where(jnp.arange(best.shape[1]) < top_k_B[:, None], logits, -jnp.inf)
    p = jax.nn.softmax(logits)
    # A candidate stays while those before it hold less than top_p: the first always stays.
    before = jnp.where(s.top_p_B[:, None] < 1, jnp.cumsum(p, -1) - p, 0)  # 1 is off, whatever the sum's rounding
    keep = (before < s.top_p_B[:, None]) & (p >= s.min_p_B[:, None] * p[:, :1])
    noisy = jnp.where(keep, logits + _gumbel(s.seed_B, pos_B, ids), -jnp.inf)
    return jnp.take_along_axis(ids, jnp.argmax(noisy, -1)[:, None], 1)[:, 0]


def _gumbel(seed_B: jax.Array, pos_B: jax.Array, ids: jax.Array) -> jax.Array:
    """Standard Gumbel noise for each candidate, by counter: threefry of (seed, position) and the id."""

    def row(seed: jax.Array, pos: jax.Array, ids: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), pos)
        return jax.vmap(lambda i: jax.random.gumbel(jax.random.fold_in(key, i)))(ids)

    return jax.vmap(row)(seed_B, pos_B, ids)
