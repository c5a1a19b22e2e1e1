# SPDX-License-Identifier: Apache-2.0
"""Which place holds which expert: the table, a balanced choice of copies and ranks, and moving the weights there.

Places are numbered over the devices of `ep` and `tp`; rank here means one of these devices. Balancing is numpy on the
host; only `rearrange` touches devices. Not here: when to rebalance.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from qwen_spmd.mesh.axes import EXPERTS
from qwen_spmd.mesh.vary import vary_like

NULL = -1
"""The expert of a place that no row goes to."""


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """experts_LQ, int [L, Q]: the expert of each place in each MoE layer, NULL for none. Each of E experts has one."""

    experts_LQ: np.ndarray

    def __post_init__(self) -> None:
        if self.experts_LQ.ndim != 2 or self.experts_LQ.max() < 0 or not np.all(self.copies_LE() > 0):
            raise ValueError(f"experts_LQ: every expert of every layer needs a place, have {self.experts_LQ.tolist()}")

    def copies_LE(self) -> np.ndarray:
        """int [L, E]: how many places each expert has."""
        E = int(self.experts_LQ.max()) + 1
        return np.stack([np.bincount(experts[experts != NULL], minlength=E) for experts in self.experts_LQ])

    def table(self, copies: int) -> np.ndarray:
        """int32 [L, E, A = copies], what `params.Moe.places` holds: each expert's places, repeated in turn up to A."""
        copies_LE = self.copies_LE()
        if copies_LE.max() > copies:
            raise ValueError(f"copies is {copies}, an expert has {copies_LE.max()} places")
        table = np.empty((*copies_LE.shape, copies), np.int32)
        for l, experts_Q in enumerate(self.experts_LQ):
            for e in range(table.shape[1]):
                table[l, e] = np.resize(np.flatnonzero(experts_Q == e), copies)
        return table

    def load_LE(self, load_LQ: np.ndarray) -> np.ndarray:
        """Rows of each expert, from the rows that each place has computed: what `balance` takes."""
        load = np.zeros(self.copies_LE().shape, np.int64)
        l, q = np.nonzero(self.experts_LQ != NULL)
        np.add.at(load, (l, self.experts_LQ[l, q]), load_LQ[l, q])
        return load

    def load_LQ(self, load_LE: np.ndarray, copies: int) -> np.ndarray:
        """float [L, Q]: rows that each place will compute, if an expert's rows take turns over its `table(copies)`."""
        table, load = self.table(copies), np.zeros(self.experts_LQ.shape)
        l = np.arange(len(table))[:, None, None]
        np.add.at(load, (l, table), load_LE[..., None] / copies)
        return load


def identity(layers: int, experts: int, places: int) -> Placement:
    """Expert e in place e, the places beyond null."""
    if places < experts:
        raise ValueError(f"places is {places}, it must be at least the {experts} experts")
    experts_Q = np.where(np.arange(places) < experts, np.arange(places), NULL)
    return Placement(np.tile(experts_Q, (layers, 1)))


def imbalance(load_LQ: np.ndarray, ranks: int) -> np.ndarray:
    """float [L]: the busiest rank's rows over the mean of all ranks, 1 is even. A step waits for the busiest."""
    load = np.asarray(load_LQ, np.float64).reshape(len(load_LQ), ranks, -1).sum(-1)
    mean = load.mean(-1)
    return np.divide(load.max(-1), mean, out=np.ones_like(mean), where=mean > 0)


def balance(load_LE: np.ndarray, ranks: int, places: int, copies: int) -> Placement:
    """A placement that spreads this load over the ranks: the idea of DeepSeek's EPLB, without its groups of nodes.

    Spare places go one by one to the expert with most rows a copy, up to `copies` of it. Then the copies, busiest
    first, go to the least loaded rank that has room and not that expert yet.
    """
    E = load_LE.shape[1]
    if places < E or places % ranks:
        raise ValueError(f"places is {places}, it must be a multiple of {ranks} ranks and at least {E} experts")
    return Placement(np.stack([_balance_layer(load_E, ranks, places, copies) for load_E in load_LE]))


def _balance_layer(load_E: np.ndarray, ranks: int, places: int, copies: int) -> np.ndarray:
    E, room = len(load_E), places // ranks
    count_E = np.ones(E, np.int64)
    for _ in range(places - E):
        share_E = np.where(count_E < min(copies, ranks), load_E / count_E, -1.0)
        hottest = int(np.argmax(share_E))
        if share_E[hottest] <= 0:  # nothing is gained by a copy of an idle expert
            break
        count_E[hottest] += 1
    share_E = load_E / count_E
    held, load = [[] for _ in range(ranks)], np.zeros(ranks)
    for e in np.repeat(np.arange(E), count_E)[np.argsort(-np.repeat(share_E, count_E), kind="stable")]:
        free = [r for r in range(ranks) if len(held[r]) < room]
        # Where only ranks that hold it have room, a second copy there does no harm.
        rank = min([r for r in free if e not in held[r]] or free, key=lambda r: (load[r], len(held[r])))
        held[rank].append(int(e))
        load[rank] += share_E[e]
    return np.concatenate([np.pad(experts, (0, room - len(experts)), constant_values=NULL) for experts in held]).astype(
        np.int64
    )


def rearrange[Moe](p: Moe, old: Placement, new: Placement, mesh: Mesh) -> Moe:
    """A `params.Moe` on the mesh whose weights are in `old` places, with them in `new` places, and its table.

    Layer by layer in place, so that a device needs room for two layers' shares besides the weights: every device's
    share goes round all devices, and each takes what it needs. `p`'s expert weights are given up. What null places hold
    is left over. Compiles once for each shape.
    """
    copies = p.places.shape[2]  # type: ignore[attr-defined]
    if old.experts_LQ.shape != new.experts_LQ.shape:
        raise ValueError(f"new placement is {new.experts_LQ.shape}, the old one {old.experts_LQ.shape}")
    first_LE = old.table(old.copies_LE().max())[..., 0]
    source_LQ = np.where(new.experts_LQ == NULL, np.arange(new.experts_LQ.shape[1]), 0).astype(np.int32)
    l, q = np.nonzero(new.experts_LQ != NULL)
    source_LQ[l, q] = first_LE[l, new.experts_LQ[l, q]]
    weights = (p.w_gate, p.w_up, p.w_down)  # type: ignore[attr-defined]
    put = functools.partial(_put, mesh=mesh)
    w_gate, w_up, w_down = _rearranged(mesh)(weights, put(source_LQ, spec=P(None, EXPERTS)))
    return p.replace(w_gate=w_gate, w_up=w_up, w_down=w_down, places=put(new.table(copies), spec=P()))  # type: ignore


def _put(x: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """A host array that every process has, on the mesh."""
    return jax.make_array_from_callback(x.shape, jax.NamedSharding(mesh, spec), lambda index: x[index])


@functools.cache
def _rearranged(mesh: Mesh):
    spec = P(None, EXPERTS, None, None)

    def body(weights: tuple[jax.Array, ...], source_LQ: jax.Array) -> tuple[jax.Array, ...]:
        devices, rank = jax.lax.axis_size(EXPERTS), jax.lax.axis_index(EXPERTS)
        Q = source_LQ.shape[1]
        ring = [(i, (i + 1) % devices) for i in range(devices)]

        def layer(l: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            share = tuple(w[l] for w in weights)
            source_Q = source_LQ[l]

            def take(i: jax.Array, here: tuple, share: tuple) -> tuple:
                """From the share that has come i devices far."""
                local_Q = source_Q - (rank - i) % devices * Q
                hit_Q = (local_Q >= 0) & (local_Q < Q)
                local_Q = jnp.clip(local_Q, 0, Q - 1)
                return tuple(jnp.where(hit_Q[:, None, None], s[local_Q], h) for h, s in zip(here, share, strict=True))

            def move(i: jax.Array, carry: tuple) -> tuple:
                here, share = carry
                share = jax.lax.ppermute(share, EXPERTS, ring)
                return take(i, here, share), share

            here, _ = jax.lax.fori_loop(1, devices, move, (take(jnp.int32(0), share, share), share))
            return tuple(jax.lax.dynamic_update_index_in_dim(w, h, l, 0) for w, h in zip(weights, here, strict=True))

        return jax.lax.fori_loop(0, source_LQ.shape[0], layer, vary_like(weights, source_LQ))

    program = jax.shard_map(body, mesh=mesh, in_specs=((spec,) * 3, P(None, EXPERTS)), out_specs=(spec,) * 3)
    return jax.jit(program, donate_argnums=0)
