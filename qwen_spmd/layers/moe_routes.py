# SPDX-License-Identifier: Apache-2.0
"""How rows reach the experts that are on other devices, and how their sums come back.

Runs inside shard_map. Each rank of `ep` has T rows of its own, the same on all of `tp`; each device has Q of the places
for experts (numbered over `ep` and `tp`). What `routed` returns is summed over `ep`, and still partial over `tp`.
Not here: the router, the shared expert, the sum over `tp` (`moe.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from qwen_spmd.mesh.axes import EXPERTS
from qwen_spmd.mesh.collectives import Reduce, reduce_scatter
from qwen_spmd.mesh.topology import Hypercube, hypercube
from qwen_spmd.mesh.vary import vary_like
from qwen_spmd.pallas import Impl
from qwen_spmd.pallas.add_norm import Gathered, Term
from qwen_spmd.pallas.expert_sort import expert_sort
from qwen_spmd.pallas.expert_sum import expert_sum
from qwen_spmd.pallas.few_rows_mlp import few_rows_mlp
from qwen_spmd.pallas.grouped_mlp import grouped_mlp
from qwen_spmd.params import Moe

Kind = Literal["auto", "gather_scatter", "all_to_all"]

NOWHERE = -1
"""The place of a padding row's experts."""

FEW_ROWS: dict[Impl, int] = {"reference": 4, "gpu": 0, "tpu": 4}
"""Up to so many rows, each expert that any of them goes to visits them all, and nothing is sorted: the smallest tile of
sorted rows is as large. With 8 rows a CPU loses a sixth of its decode speed to this. A GPU sorts in one launch."""

LATENCY_BYTES = 1 << 20
"""Bytes that a link carries in the time that one more dependent exchange takes: some 10 us at 100 GB/s."""


@dataclasses.dataclass(frozen=True)
class Route:
    """How rows travel; static.

    kind           gather_scatter  every rank of `ep` gets all rows, and the sums are reduce-scattered: three
                                   collectives of fixed size. Without `ep`, nothing travels: tokens are on all devices
                   all_to_all      a row goes once to each rank that has any of its experts: three exchanges, of which
                                   each waits for the one before
                   auto            `resolve`
    wire           dtype of rows on their way to the experts; None: as they are. float8_e4m3fn: with a scale for each
                   row, which travels with its expert ids
    reduce, cube, micro_batches    as `mesh/collectives.py:reduce_scatter` has them
    chunks         of gather_scatter: the rows are summed and reduce-scattered in so many parts, so that one is summed
                   while the one before travels
    ragged         of all_to_all: the platform exchanges only the rows that go somewhere (TPU). If not, each pair of
                   ranks exchanges room for all T rows, which cannot overflow
    """

    kind: Kind = "auto"
    wire: Literal["float8_e4m3fn"] | None = None
    reduce: Reduce = "xla"
    micro_batches: int = 1
    chunks: int = 1
    ragged: bool = False
    cube: Hypercube | None = None

    def __post_init__(self) -> None:
        allowed: dict[str, tuple] = {
            "kind": ("auto", "gather_scatter", "all_to_all"),
            "wire": (None, "float8_e4m3fn"),
            "reduce": ("xla", "hierarchical"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is {getattr(self, name)!r}, it must be one of {', '.join(map(str, values))}")
        for name in ("micro_batches", "chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")

    def resolve(self, tokens: int, ep: int, experts_per_token: int, row_bytes: int) -> Kind:
        """What `auto` is for `tokens` rows a rank of `row_bytes` each.

        With even routing a row has experts on ep (1 - (1 - 1 / ep)^X) ranks: 5.3 of 8 for X = 8, 6.5 of 16, 7.2 of 32.
        gather_scatter sends it to all of them and back. all_to_all saves the rest, if the platform sends no empty room,
        but its exchanges wait for each other: it must at least halve the bytes, and save more than that wait.
        """
        if self.kind != "auto" or ep == 1:
            return "gather_scatter" if ep == 1 else self.kind
        reached = ep * (1 - (1 - 1 / ep) ** experts_per_token)
        saved_bytes = 2 * tokens * row_bytes * (ep - reached)
        return "all_to_all" if self.ragged and 2 * reached <= ep and saved_bytes > LATENCY_BYTES else "gather_scatter"


def route_on(mesh: Mesh, **choices: Any) -> Route:
    """A Route with what the mesh's devices decide: `ragged`, and `cube` where the reduction uses it."""
    cube = hypercube(mesh, "ep") if choices.get("reduce") == "hierarchical" else None
    return Route(ragged=mesh.devices.flat[0].platform == "tpu", cube=cube, **choices)


def routed(
    p: Moe, l: jax.Array, x_TD: jax.Array, places_TX: jax.Array, gates_TX: jax.Array, *, impl: Impl, route: Route
) -> tuple[Term, jax.Array]:
    """(sum over a row's experts that are on any rank with this index of `tp`, rows of each own place [Q]).

    places_TX are of all devices, NOWHERE for padding, whose gates do not matter; gates_TX float32. The sum is float32
    unless it travelled.
    """
    T, D = x_TD.shape
    ep = jax.lax.axis_size("ep")
    if ep == 1:
        part = _own_experts(p, l, x_TD, places_TX, gates_TX, impl)
        return part.rows, part.load_Q
    row_bytes = D * x_TD.dtype.itemsize
    kind = route.resolve(T, ep, places_TX.shape[1], row_bytes)
    through = _all_to_all if kind == "all_to_all" else _gather_scatter
    sums_TD, load_Q = through(p, l, x_TD, places_TX, gates_TX, impl, route)
    return sums_TD[None], load_Q


def _gather_scatter(
    p: Moe, l: jax.Array, x_TD: jax.Array, places_TX: jax.Array, gates_TX: jax.Array, impl: Impl, route: Route
) -> tuple[jax.Array, jax.Array]:
    T = x_TD.shape[0]
    wire_TD, scale_T1 = _to_wire(x_TD, route)
    packed = _pack(places_TX, gates_TX, scale_T1)
    # Two all-gathers: ids, weights and scales are one int32 array.
    wire_TD, packed = (jax.lax.all_gather(a, "ep", tiled=True) for a in (wire_TD, packed))
    places_TX, gates_TX, scale_T1 = _unpack(packed, places_TX.shape[1])
    part = _own_experts(p, l, _from_wire(wire_TD, scale_T1, x_TD.dtype), places_TX, gates_TX, impl)
    cuts = [T * i // min(route.chunks, T) for i in range(min(route.chunks, T) + 1)]
    sums = [
        reduce_scatter(
            part.of(T, start, stop).sums(impl).astype(x_TD.dtype),
            "ep",
            how=route.reduce,
            cube=route.cube,
            micro_batches=route.micro_batches,
        )
        for start, stop in itertools.pairwise(cuts)
    ]
    return jnp.concatenate(sums), part.load_Q


def _all_to_all(
    p: Moe, l: jax.Array, x_TD: jax.Array, places_TX: jax.Array, gates_TX: jax.Array, impl: Impl, route: Route
) -> tuple[jax.Array, jax.Array]:
    """Each pair of ranks has T slots. N: ranks of `ep`; a row's slots in [N, T] are the first free ones, in order."""
    (T, X), D = places_TX.shape, x_TD.shape[1]
    N = jax.lax.axis_size("ep")
    rank_TX = jnp.where(places_TX == NOWHERE, N, places_TX // (p.w_gate.shape[1] * jax.lax.axis_size("tp")))
    goes_NT = jnp.any(rank_TX == jnp.arange(N)[:, None, None], -1)
    row_NT = jnp.argsort(~goes_NT, stable=True)
    sizes_N = jnp.sum(goes_NT, 1, dtype=jnp.int32)

    wire_TD, scale_T1 = _to_wire(x_TD, route)
    filled_NT1 = (jnp.arange(T) < sizes_N[:, None])[..., None]
    here_NTX = filled_NT1 & (rank_TX[row_NT] == jnp.arange(N)[:, None, None])
    packed = _pack(jnp.where(here_NTX, places_TX[row_NT], NOWHERE), gates_TX[row_NT], scale_T1[row_NT])
    packed = jax.lax.all_to_all(packed, "ep", 0, 0, tiled=True).reshape(N * T, -1)
    places_SX, gates_SX, scale_S1 = _unpack(packed, X)  # S: slots of all sources
    from_N = jnp.sum(jnp.any(places_SX != NOWHERE, -1).reshape(N, T), 1, dtype=jnp.int32)

    wire_SD = _exchange(wire_TD[row_NT].reshape(N * T, D), sizes_N, from_N, route)
    part = _own_experts(p, l, _from_wire(wire_SD, scale_S1, x_TD.dtype), places_SX, gates_SX, impl)
    back_SD = _exchange(part.sums(impl).astype(x_TD.dtype), from_N, sizes_N, route)

    slot_NT = jnp.cumsum(goes_NT, 1) - 1
    slot_TX = rank_TX * T + slot_NT[jnp.minimum(rank_TX, N - 1), jnp.arange(T)[:, None]]
    earlier_XX = jnp.tri(X, k=-1, dtype=bool)
    again_TX = jnp.any((rank_TX[:, :, None] == rank_TX[:, None, :]) & earlier_XX, -1)
    slot_TX = jnp.where((rank_TX < N) & ~again_TX, slot_TX, -1)
    sums_TD = expert_sum(back_SD, slot_TX, jnp.ones_like(gates_TX), impl=impl)
    return sums_TD, part.load_Q


def _exchange(x_SD: jax.Array, send_N: jax.Array, receive_N: jax.Array, route: Route) -> jax.Array:
    """Block i of N goes to rank i of `ep`, as the block of this rank; only its first `send_N[i]` rows matter."""
    if not route.ragged:
        return jax.lax.all_to_all(x_SD, "ep", 0, 0, tiled=True)
    N = jax.lax.axis_size("ep")
    T = x_SD.shape[0] // N
    start_N = jnp.arange(N, dtype=jnp.int32) * T
    room_SD = vary_like(jnp.zeros_like(x_SD), x_SD)
    mine_N = jnp.full(N, T, jnp.int32) * jax.lax.axis_index("ep")
    return jax.lax.ragged_all_to_all(x_SD, room_SD, start_N, send_N, mine_N, receive_N, axis_name="ep")


def _to_wire(x_TD: jax.Array, route: Route) -> tuple[jax.Array, jax.Array]:
    """Rows as they travel, and their float32 scales [T, 1]; [T, 0] where they need none."""
    if route.wire is None:
        return x_TD, jnp.zeros((x_TD.shape[0], 0), jnp.float32)
    x_TD = x_TD.astype(jnp.float32)
    top = float(jnp.finfo(route.wire).max)
    size_T1 = jnp.max(jnp.abs(x_TD), -1, keepdims=True)
    scale_T1 = jnp.where(size_T1 > 0, size_T1, top) / top
    return jnp.clip(x_TD / scale_T1, -top, top).astype(route.wire), scale_T1


def _from_wire(wire_TD: jax.Array, scale_T1: jax.Array, dtype: Any) -> jax.Array:
    return wire_TD if scale_T1.shape[1] == 0 else (wire_TD.astype(jnp.float32) * scale_T1).astype(dtype)


def _pack(places: jax.Array, *floats: jax.Array) -> jax.Array:
    """int32 ids and float32 values side by side in one int32 array."""
    bits = (jax.lax.bitcast_convert_type(x, jnp.int32) for x in floats)
    return jnp.concatenate([places, *bits], -1)


def _unpack(packed: jax.Array, X: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    floats = jax.lax.bitcast_convert_type(packed[:, X:], jnp.float32)
    return packed[:, :X], floats[:, :X], floats[:, X:]


@struct.dataclass
class _Part:
    """What this device's experts computed: row t's x-th one is y[pos_TX]; pos is -1 if it is not here.

    y_RD in x's dtype, in any order (few rows: float32, summed over x already); load_Q int32, rows of each own place.
    """

    rows: Gathered
    load_Q: jax.Array

    def of(self, T: int, start: int, stop: int) -> _Part:
        """For rows `start` to `stop` of each T."""

        def cut(a_TX: jax.Array) -> jax.Array:
            X = a_TX.shape[1]
            return a_TX.reshape(-1, T, X)[:, start:stop].reshape(-1, X)

        y_RD, pos_TX, gates_TX = self.rows.y_RD, self.rows.pos_TX, self.rows.gates_TX
        return _Part(Gathered(y_RD, cut(pos_TX), cut(gates_TX)), self.load_Q)

    def sums(self, impl: Impl) -> jax.Array:
        """float32 [T, D]: each row's weighted sum of own experts."""
        return expert_sum(self.rows.y_RD, self.rows.pos_TX, self.rows.gates_TX, impl=impl)


def _own_experts(p: Moe, l: jax.Array, x_TD: jax.Array, places_TX: jax.Array, gates_TX: jax.Array, impl: Impl) -> _Part:
    """Computes the rows of own places only. Others are not even read, but for few rows."""
    (T, X), Q = places_TX.shape, p.w_gate.shape[1]
    weights = (p.w_gate, p.w_up, p.w_down, l)
    local_TX = places_TX - jax.lax.axis_index(EXPERTS) * Q  # negative from NOWHERE on every device
    if FEW_ROWS[impl] >= T:
        own_TX = (local_TX >= 0) & (local_TX < Q)
        own_TXQ = own_TX[..., None] & (local_TX[..., None] == jnp.arange(Q))
        gates_TQ = jnp.sum(jnp.where(own_TXQ, gates_TX[..., None], 0), 1)
        own_TQ = jnp.any(own_TXQ, 1)
        y_TD = few_rows_mlp(x_TD, own_TQ, gates_TQ, *weights, impl=impl)
        pos_T1 = jnp.where(jnp.any(own_TX, 1), jnp.arange(T), -1)[:, None]
        load_Q = jnp.sum(own_TQ, 0, dtype=jnp.int32)
        return _Part(Gathered(y_TD, pos_T1, jnp.ones_like(pos_T1, jnp.float32)), load_Q)

    order = expert_sort(local_TX, Q, impl=impl)
    expected = math.ceil(T * X / jax.lax.axis_size(EXPERTS))
    y_RD = grouped_mlp(x_TD, order.rows_R, order.sizes_E, *weights, expected=expected, impl=impl)
    return _Part(Gathered(y_RD, order.pos_TX, gates_TX), order.sizes_E)
