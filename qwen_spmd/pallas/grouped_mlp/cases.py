# SPDX-License-Identifier: Apache-2.0
"""Named cases of the grouped SwiGLU, for the parity test and the benchmark: Qwen's shapes and ugly ones.

Everything that the contract says has no influence is NaN: rows beyond the last expert's, weights of experts without
rows and of other layers.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.grouped_mlp import grouped_mlp


@dataclasses.dataclass(frozen=True)
class Case:
    """`used` of the `rows` are spread over the experts by `load`; None: all. `full`: too big for a CPU test.

    uniform  each row's expert is drawn evenly, as a trained router spreads large batches
    zipf     the n-th busiest expert has 1/n of the busiest one's rows, in random order
    even     as equal as can be
    one      one expert has all
    ends     only the first and the last have any
    """

    name: str
    rows: int
    load: Literal["uniform", "zipf", "even", "one", "ends"]
    used: int | None = None
    experts: int = 16
    hidden: int = 64
    width: int = 32
    layers: int = 2
    dtype: str = "float32"
    full: bool = False
    notes: str = ""


@struct.dataclass
class Inputs:
    """Arguments of the op."""

    x_TD: jax.Array
    sizes_E: jax.Array
    w_gate: jax.Array
    w_up: jax.Array
    w_down: jax.Array
    layer: jax.Array


def run(x: Inputs, impl: Impl) -> jax.Array:
    return grouped_mlp(x.x_TD, x.sizes_E, x.w_gate, x.w_up, x.w_down, x.layer, impl=impl)


def inputs(case: Case, seed: int = 0) -> Inputs:
    """numpy arrays of unit size; matrices scaled so that results are, too."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(case.dtype)
    E, D, M, layer = case.experts, case.hidden, case.width, case.layers - 1
    used = case.rows if case.used is None else case.used
    sizes_E = _sizes(case, used, rng)

    def weights(fan_in: int, fan_out: int) -> Any:
        w: Any = np.full((case.layers, E, fan_in, fan_out), np.nan, dtype)
        for e in np.flatnonzero(sizes_E):
            w[layer, e] = rng.standard_normal((fan_in, fan_out), np.float32) * fan_in**-0.5
        return w

    x: Any = rng.standard_normal((case.rows, D), np.float32).astype(dtype)
    x[used:] = np.nan
    index: Any = np.int32(layer)
    return Inputs(x, sizes_E, weights(D, M), weights(D, M), weights(M, D), index)


def _sizes(case: Case, used: int, rng: np.random.Generator) -> Any:
    E = case.experts
    match case.load:
        case "one":
            experts = np.full(used, E // 2)
        case "ends":
            experts = np.arange(used) % 2 * (E - 1)
        case "even":
            experts = np.arange(used) % E
        case "uniform":
            experts = rng.integers(0, E, used)
        case "zipf":
            share = 1 / rng.permutation(np.arange(1, E + 1))
            experts = rng.choice(E, used, p=share / share.sum())
    return np.bincount(experts, minlength=E).astype(np.int32)


_397B: dict[str, Any] = {"experts": 64, "hidden": 4096, "width": 1024, "layers": 1, "dtype": "bfloat16", "full": True}
_235B: dict[str, Any] = {"experts": 16, "hidden": 4096, "width": 1536, "layers": 1, "dtype": "bfloat16", "full": True}

CASES = (
    Case("1 row", 1, "one"),
    Case("3 rows", 3, "uniform"),
    *(Case(f"16 rows, {load}", 16, load) for load in ("uniform", "zipf", "even", "one", "ends")),
    *(Case(f"640 rows, {load}", 640, load) for load in ("uniform", "zipf", "even", "one", "ends")),
    Case("no rows", 16, "uniform", used=0),
    Case("rows beyond the sum", 16, "zipf", used=5),
    Case("many rows beyond the sum", 640, "uniform", used=130),
    Case("one row of many", 640, "one", used=1),
    Case("a row short", 640, "zipf", used=639),
    Case("16 rows, bfloat16", 16, "zipf", used=13, dtype="bfloat16"),
    Case("640 rows, bfloat16", 640, "zipf", used=600, dtype="bfloat16"),
    Case("one expert of all", 16, "one", experts=1, notes="a rank with a single expert"),
    Case("three layers", 16, "zipf", layers=3),
    Case("Qwen3 width", 48, "uniform", experts=8, hidden=64, width=24, notes="4096 x 1536, no multiple of 1024"),
    *(
        Case(f"Qwen3.5, EP=8, {rows} rows, {load}", rows, load, **_397B)
        for rows in (64, 512, 5120)
        for load in ("uniform", "zipf")
    ),
    Case("Qwen3.5, EP=8, 640 rows, one expert", 640, "one", **_397B),
    Case("Qwen3.5, EP=8, 80 of 5120 rows", 5120, "uniform", used=80, notes="room for the worst case", **_397B),
    *(Case(f"Qwen3, EP=8, {rows} rows, uniform", rows, "uniform", **_235B) for rows in (64, 1024)),
)
