# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet mixer: projections, the core (convolution, gates, recurrence), gated norm, output projection.

The step form works on a rank's share of the heads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwen_spmd.config import ModelConfig
from qwen_spmd.layers.linear import sum_over_tp
from qwen_spmd.layers.norm import gated_rms_norm
from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.gated_delta import gated_delta as core
from qwen_spmd.pallas.gated_delta.sequences import sequences
from qwen_spmd.pallas.linear import linear, linear_parts
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
    """One step of layer `l` of this stack, whose states are `conv[layer]` and `rec[layer]`. Returns parts [S, T, D]
    and both."""
    qkv, b, a, z = _project(p, l, x_TD, impl)
    o, conv, rec = core(qkv, b, a, p.conv[l], p.a_log[l], p.dt_bias[l], conv, rec, layer, rows, impl=impl)
    o = gated_rms_norm(o, z, p.norm[l], eps=cfg.norm_eps)
    (parts,) = linear_parts(o, (p.w_o[l],), dtype=x_TD.dtype, impl=impl)
    return sum_over_tp(parts, x_TD.dtype), conv, rec


def gated_delta_sequences(
    p: GatedDelta, l: jax.Array, x_BTD: jax.Array, offset_T: jax.Array, *, cfg: ModelConfig
) -> jax.Array:
    """The same over whole sequences, differentiable."""
    assert cfg.gated_delta is not None
    sizes = cfg.gated_delta.key_dim, cfg.gated_delta.value_dim
    qkv, b, a, z = _project(p, l, x_BTD, "reference")
    o = sequences(qkv, b, a, p.conv[l], p.a_log[l], p.dt_bias[l], offset_T, *sizes)
    o = gated_rms_norm(o, z, p.norm[l], eps=cfg.norm_eps)
    return linear_parts(o, (p.w_o[l],), dtype=o.dtype, impl="reference")[0][0]


def _project(p: GatedDelta, l: jax.Array, x: jax.Array, impl: Impl) -> tuple[jax.Array, ...]:
    """(qkv, b, a, z); b and a leave in float32, what they steer is exponential."""
    ws = p.w_qkv[l], p.w_b[l], p.w_a[l], p.w_z[l]
    return linear(x, ws, out_dtypes=(x.dtype, jnp.float32, jnp.float32, x.dtype), impl=impl)
