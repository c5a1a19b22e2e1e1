# SPDX-License-Identifier: Apache-2.0
"""This process among those of a replica: its channel, `jax.distributed` beside that, and how it leaves.

Not here: what goes over the channel (`replica`), the engine.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qwen_spmd.serve.args import ServeArgs, option
from qwen_spmd.serve.replica import Follower, Leader

JAX_LOST_S = 60
"""What jax.distributed gives a silent process: longer than the channel does, which can say more and ends cleanly."""

MAY_DIFFER = {"compilation_cache_dir"}


class Node:
    """One process. Where it is the only one, there is no channel, and nothing is to be done.

    on_lost    called once, from a thread of the channel, when the replica cannot go on
    on_leave   called from that thread on node 0, when another node was asked to end
    """

    def __init__(self, args: ServeArgs, on_lost: Callable[[str], None], on_leave: Callable[[], None]) -> None:
        self.args, self._on_lost, self._on_leave = args, on_lost, on_leave
        self.channel: Leader | Follower | None = None

    @property
    def leader(self) -> Leader | None:
        assert not isinstance(self.channel, Follower)
        return self.channel

    def join(self) -> None:
        """Wait for the others, and make all their devices JAX's. Before anything else of JAX is used.

        ValueError, TimeoutError, OSError and Lost, as Leader and Follower raise them.
        """
        args = self.args
        if args.nnodes == 1:
            return
        fields = [f.name for f in dataclasses.fields(args) if f.metadata["engine"] and f.name not in MAY_DIFFER]
        fields += ["layout", "enable_expert_parallel", "nnodes", "node_timeout"]
        facts = {option(name): getattr(args, name) for name in fields}
        facts |= {name: importlib.metadata.version(name) for name in ("qwen-spmd", "jax", "jaxlib")}
        times: Any = {"join_s": args.dist_timeout, "lost_s": args.node_timeout, "on_lost": self._on_lost}
        if args.node_rank == 0:
            leave = lambda rank: self._on_leave()  # noqa: E731
            self.channel = Leader(*args.master, args.nnodes, facts, on_leave=leave, **times)
        else:
            self.channel = Follower(*args.master, args.nnodes, args.node_rank, facts, **times)

        import jax

        jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, which is ours
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            self.channel.coordinator,
            args.nnodes,
            args.node_rank,
            cluster_detection_method="deactivate",
            initialization_timeout=math.ceil(args.dist_timeout),
            heartbeat_timeout_seconds=math.ceil(max(JAX_LOST_S, 3 * args.node_timeout)),
            shutdown_timeout_seconds=math.ceil(2 * args.node_timeout),
            coordinator_bind_address=self.channel.coordinator,
        )

    def agree(self, folder: Path) -> None:
        """Check that all nodes have the same model. ValueError names what differs and where."""
        if self.channel is not None:
            from qwen_spmd import checkpoint

            self.channel.agree({"the checkpoint's digest": checkpoint.identity(folder)})

    def fail(self, reason: str, wait_s: float = 0.0) -> None:
        """Take the others along: this node cannot go on. `wait_s`: the cause may be elsewhere and show a little later.

        `on_lost` has been called when this returns.
        """
        if self.channel is not None:
            if self.channel.wait_lost(wait_s) is None:
                self.channel.fail(reason)
            self.channel.close()

    def end(self) -> None:
        """Leave with the others, after the last step."""
        if self.channel is None:
            return
        if isinstance(self.channel, Leader):
            self.channel.stop()
        import jax

        jax.distributed.shutdown()
        if isinstance(self.channel, Leader):
            self.channel.wait_closed()
        self.channel.close()
