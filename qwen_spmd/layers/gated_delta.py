# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet mixer: projections, the core (convolution, gates, recurrence), gated norm, output projection.

The step form works on a rank's share of the heads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwen_spmd.config import ModelConfig
from qwen_spmd.layers.linear import einsum
from qwen_spmd.layers.norm import gated_rms_norm
from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.gated_delta import gated_delta as core
from qwen_spmd.pallas.gated_delta.sequences import sequences
from qwen_spmd.params import GatedDelta
from qwen_spmd.state import Ragged


def gated_delta(
    p: GatedDelta,
    l: jax.Array,
    x_TD: jax.Array,
    conv: jax.Array,
    rec: jax.Array,
    layer: jax.Array,
    rows: Ragged,
    *,
    cfg: ModelConfig,
    impl: Impl,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One step of layer `l` of this stack, whose states are `conv[layer]` and `rec[layer]`. Returns [T, D] and both."""
    o, conv, rec = core(*_project(p, l, x_TD), p.conv[l], p.a_log[l], p.dt_bias[l], conv, rec, layer, rows, impl=impl)
    return jax.lax.psum(_output(p, l, x_TD, o, cfg), "tp"), conv, rec


def gated_delta_sequences(
    p: GatedDelta, l: jax.Array, x_BTD: jax.Array, offset_T: jax.Array, *, cfg: ModelConfig
) -> jax.Array:
    """The same over whole sequences, differentiable."""
    assert cfg.gated_delta is not None
    sizes = cfg.gated_delta.key_dim, cfg.gated_delta.value_dim
    o = sequences(*_project(p, l, x_BTD), p.conv[l], p.a_log[l], p.dt_bias[l], offset_T, *sizes)
    return _output(p, l, x_BTD, o, cfg)


def _project(p: GatedDelta, l: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(qkv, b, a); b and a leave in float32, what they steer is exponential."""
    return (
        einsum("...d,dc->...c", x, p.w_qkv[l]),
        einsum("...d,du->...u", x, p.w_b[l], out_dtype=jnp.float32),
        einsum("...d,du->...u", x, p.w_a[l], out_dtype=jnp.float32),
    )


def _output(p: GatedDelta, l: jax.Array, x: jax.Array, o: jax.Array, cfg: ModelConfig) -> jax.Array:
    z = einsum("...d,duz->...uz", x, p.w_z[l])
    return einsum("...uz,uzd->...d", gated_rms_norm(o, z, p.norm[l], eps=cfg.norm_eps), p.w_o[l])
