# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint folder to compiled programs, the same on every process, and the loop of a process that follows.

Not here: the loop of the process that plans (`engine`).
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from qwen_spmd import checkpoint
from qwen_spmd.config import ModelConfig, load_config
from qwen_spmd.layers.moe import Route, route_on
from qwen_spmd.mesh.axes import make_mesh
from qwen_spmd.params import Params
from qwen_spmd.serve.packed import Packed
from qwen_spmd.serve.replica import Follower, Leader
from qwen_spmd.serve.sizes import EngineConfig, Sizes, choose, make_layout
from qwen_spmd.serve.step import Steps, use_compilation_cache


def load(folder: Path, config: EngineConfig) -> tuple[ModelConfig, Params]:
    """A checkpoint folder: its config, and its parameters on this process's part of the mesh."""
    cfg = dataclasses.replace(load_config(folder, config.hf_overrides), mtp=False)  # no step reads it
    dtype = jnp.dtype(cfg.dtype if config.dtype == "auto" else config.dtype)
    layout = make_layout(cfg, config)
    mesh = make_mesh(config.dp, config.ep, config.tp)
    return cfg, checkpoint.load(folder, cfg, dtype=dtype, mesh=mesh, layout=layout, progress=config.progress)


def prepare(
    cfg: ModelConfig, weights: Params, config: EngineConfig, replica: Leader | Follower | None
) -> tuple[Sizes, Steps]:
    """Choose the sizes and compile the programs. With a replica, the same sizes everywhere, and all wait for all."""
    if config.compilation_cache is not None:
        use_compilation_cache(config.compilation_cache)
    layout, mesh = make_layout(cfg, config), make_mesh(config.dp, config.ep, config.tp)
    sizes = choose(cfg, weights, mesh.local_devices[0], layout, config)
    if replica is not None:  # who has room for the fewest pages decides; the rest follows from that and the config
        pages = min(replica.exchange("pages", sizes.shapes.pages))
        config = dataclasses.replace(config, num_pages=layout.ranks * (pages - 1))
        sizes = choose(cfg, weights, mesh.local_devices[0], layout, config)
        replica.agree({"sizes": repr(sizes.shapes)})
    if config.progress:
        print(sizes, file=sys.stderr)
    dtypes = weights.embed.dtype, jnp.dtype(config.state_dtype)
    steps = Steps(cfg, weights, mesh, layout, sizes.shapes, *dtypes, make_route(mesh, config))
    steps.compile(progress=config.progress)
    if replica is not None:
        replica.exchange("compiled", None)
    return sizes, steps


def make_route(mesh: Mesh, config: EngineConfig) -> Route:
    """The way of rows to their experts that a config asks for, on these devices. ValueError if there is none to go."""
    for name, idle in (("moe_route", "auto"), ("moe_wire", "auto"), ("moe_reduce", "xla"), ("moe_chunks", 1)):
        if mesh.shape["ep"] == 1 and getattr(config, name) not in (idle, "gather_scatter"):
            raise ValueError(f"{name} is {getattr(config, name)!r}, with ep=1 nothing travels: it must be {idle!r}")
    return route_on(
        mesh,
        kind=config.moe_route,
        wire="float8_e4m3fn" if config.moe_wire == "fp8" else None,
        reduce=config.moe_reduce,
        micro_batches=2 if config.moe_reduce == "hierarchical" else 1,
        chunks=config.moe_chunks,
    )


def follow(folder: Path, config: EngineConfig, replica: Follower, ready: Callable[[], None]) -> None:
    """The engine of another process than the first: run the steps that come until there are no more. Lost.

    `ready` is called when all processes have compiled.
    """
    cfg, weights = load(folder, config)
    _, steps = prepare(cfg, weights, config, replica)
    ready()
    flight: collections.deque[jax.Array] = collections.deque()
    while (step := replica.receive()) is not None:
        flight.append(steps.run(Packed(step.key, step.iterations, step.words)))
        if step.look:
            steps.load()
        if len(flight) > 2:  # as on process 0, so that no queue grows
            flight.popleft().block_until_ready()
    for tokens in flight:
        tokens.block_until_ready()
