# SPDX-License-Identifier: Apache-2.0
"""Named cases of the grouped SwiGLU, for the parity test and the benchmark: Qwen's shapes and ugly ones.

Everything that the contract says has no influence is NaN: rows of x that no expert takes, weights of experts without
rows and of other layers.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.grouped_mlp import Weights, grouped_mlp
from qwen_spmd.pallas.scaled import GROUP, Format, Microscaled, Scaled


@dataclasses.dataclass(frozen=True)
class Case:
    """`used` of the `rows` places are spread over the experts by `load`; None: all. `full`: too big for a CPU test.

    Each row of x has `per_row` places.

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
    per_row: int = 2
    experts: int = 16
    hidden: int = 64
    width: int = 32
    layers: int = 2
    dtype: str = "float32"
    block: int | None = None
    format: Format | None = None
    full: bool = False
    notes: str = ""

    @property
    def capability(self) -> int:
        """The least that the GPU must have."""
        return 90 if self.format is None else 100


@struct.dataclass
class Inputs:
    """Arguments of the op."""

    x_TD: jax.Array
    rows_R: jax.Array
    sizes_E: jax.Array
    w_gate: Weights
    w_up: Weights
    w_down: Weights
    layer: jax.Array
    expected: int = struct.field(pytree_node=False)


def run(x: Inputs, impl: Impl) -> jax.Array:
    weights = x.w_gate, x.w_up, x.w_down
    return grouped_mlp(x.x_TD, x.rows_R, x.sizes_E, *weights, x.layer, expected=x.expected, impl=impl)


def inputs(case: Case, seed: int = 0) -> Inputs:
    """numpy arrays of unit size; matrices scaled so that results are, too."""
    rng, dtype = np.random.default_rng(seed), jnp.dtype(case.dtype)
    E, D, M, layer = case.experts, case.hidden, case.width, case.layers - 1
    used = case.rows if case.used is None else case.used
    sizes_E = _sizes(case, used, rng)

    pool = rng.standard_normal(min(E * D * M, 1 << 22), np.float32)  # drawing all of a full case takes a minute

    def weights(fan_in: int, fan_out: int) -> Any:
        size, kind = (fan_in**-0.5, dtype) if case.block is None else (1, jnp.float8_e4m3fn)
        w: Any = np.full((case.layers, E, fan_in, fan_out), np.nan, kind)
        for e in np.flatnonzero(sizes_E):
            own = np.roll(pool, rng.integers(pool.size)) * size
            w[layer, e] = np.resize(own.astype(kind), (fan_in, fan_out))
        if case.format:
            return jax.jit(Microscaled.quantise, static_argnums=1)(w, case.format)
        if case.block is None:
            return w
        blocks = -(-fan_in // case.block), -(-fan_out // case.block)
        scales = rng.uniform(0.5, 1.5, (case.layers, E, *blocks)).astype(np.float32) * fan_in**-0.5
        scales[:, sizes_E == 0] = np.nan
        return Scaled(w, scales)

    x: Any = rng.standard_normal((-(-case.rows // case.per_row) + 1, D), np.float32).astype(dtype)
    x[-1] = np.nan  # nobody's row
    rows_R: Any = rng.permutation(np.arange(case.rows, dtype=np.int32) // case.per_row)
    rows_R[used:] = len(x) - 1
    index: Any = np.int32(layer)
    return Inputs(x, rows_R, sizes_E, weights(D, M), weights(D, M), weights(M, D), index, max(1, used))


def abstract(case: Case) -> Inputs:
    """The shapes of `inputs`, without drawing gigabytes."""
    E, D, M, dtype = case.experts, case.hidden, case.width, jnp.dtype(case.dtype)

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    def weights(fan_in: int, fan_out: int) -> Any:
        shape = case.layers, E, fan_in, fan_out
        if case.format:
            return jax.eval_shape(functools.partial(Microscaled.quantise, format=case.format), array(dtype, *shape))
        if case.block is None:
            return array(dtype, *shape)
        blocks = -(-fan_in // case.block), -(-fan_out // case.block)
        return Scaled(array(jnp.float8_e4m3fn, *shape), array(jnp.float32, case.layers, E, *blocks))

    x, used = array(dtype, -(-case.rows // case.per_row) + 1, D), case.rows if case.used is None else case.used
    index = array(jnp.int32, case.rows), array(jnp.int32, E)
    return Inputs(x, *index, weights(D, M), weights(D, M), weights(M, D), array(jnp.int32), max(1, used))


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
    Case("640 rows, 8-bit weights", 640, "zipf", used=600, block=16, dtype="bfloat16"),
    Case("8-bit weights, blocks cut short", 16, "uniform", hidden=64, width=24, block=16),
    Case("8-bit weights, blocks of 128", 48, "zipf", experts=4, hidden=256, width=256, block=128, dtype="bfloat16"),
    *(Case(f"{f}, 48 rows", 48, "zipf", used=40, experts=4, hidden=256, width=128, format=f) for f in GROUP),
    Case("mxfp4, 640 rows, bfloat16", 640, "zipf", used=600, width=96, dtype="bfloat16", format="mxfp4"),
    Case("nvfp4, no multiple of tiles", 16, "uniform", hidden=96, width=48, format="nvfp4"),
    Case("one expert of all", 16, "one", experts=1, notes="a rank with a single expert"),
    Case("three layers", 16, "zipf", layers=3),
    Case("Qwen3 width", 48, "uniform", experts=8, hidden=64, width=24, notes="4096 x 1536, no multiple of 1024"),
    *(
        Case(f"Qwen3.5, EP=8, {rows} rows, {load}", rows, load, **_397B)
        for rows in (64, 512, 5120)
        for load in ("uniform", "zipf")
    ),
    Case("Qwen3.5, EP=8, 640 rows, 8-bit weights", 640, "uniform", block=128, **_397B),
    *(Case(f"Qwen3.5, EP=8, 640 rows, {f}", 640, "uniform", format=f, **_397B) for f in GROUP),
    Case("Qwen3.5, EP=8, 640 rows, one expert", 640, "one", **_397B),
    Case("Qwen3.5, EP=8, 80 of 5120 rows", 5120, "uniform", used=80, notes="room for the worst case", **_397B),
    *(Case(f"Qwen3, EP=8, {rows} rows, uniform", rows, "uniform", **_235B) for rows in (64, 1024, 8192)),
)
