# SPDX-License-Identifier: Apache-2.0
"""The channel between the processes of a replica, as all have it: heartbeats, who is gone, what all must agree on.

Not here: who connects to whom and what steps are (`replica`), the frames (`wire`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from qwen_spmd.serve.wire import Connection, Frame, Kind

log = logging.getLogger(__name__)

LOST_S = 5.0
"""Without a sign for so long, a process is lost. Five signs are sent in this time."""


class Lost(ConnectionError):
    """A process of the replica is gone, or failed, or was refused: none of them can go on."""


class Channel:
    """Connections to other processes, and a thread that reads them, keeps up the heartbeats and notices who is gone."""

    coordinator: str
    """HOST:PORT for `jax.distributed`, on process 0 and free when that looked for one."""

    def __init__(self, nodes: int, rank: int, lost_s: float, on_lost: Callable[[str], None]) -> None:
        self.nodes, self.rank = nodes, rank
        self._lost_s, self._on_lost = lost_s, on_lost
        self._connections: dict[int, Connection] = {}
        self._changed = threading.Condition()
        self._joined = self._leaving = self._closing = False
        self._lost: str | None = None
        self._values: queue.SimpleQueue[tuple[int, dict[str, Any]] | None] = queue.SimpleQueue()  # None: lost
        self._selector = selectors.DefaultSelector()
        self._waker, woken = socket.socketpair()
        for sock in (self._waker, woken):
            sock.setblocking(False)
        self._selector.register(woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="replica", daemon=True)

    @property
    def lost(self) -> str | None:
        """Why the replica cannot go on, once that is so."""
        return self._lost

    def wait_lost(self, timeout: float) -> str | None:
        """As `lost`, for which it waits: what breaks here may be the first sign of a loss."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost is not None, timeout)
            return self._lost

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Give `value`, which must be JSON, and get those of all processes, by rank. Also a barrier. Lost."""
        raise NotImplementedError

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Check that all processes have the same `facts`. ValueError, on all of them, names what differs and where."""
        all_facts = self.exchange("agree", dict(facts))
        for rank, theirs in enumerate(all_facts):
            if refusal := difference(rank, all_facts[0], theirs):
                raise ValueError(refusal)

    def fail(self, reason: str) -> None:
        """Take everybody along: this process cannot go on, and why. As if it were lost, here and on the others."""
        self._lose(f"node {self.rank} failed: {reason}")
        self._wake()

    def close(self) -> None:
        """End the channel's thread and its sockets. Idempotent."""
        self._closing = True
        self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    # In the channel's thread.

    def _run(self) -> None:
        try:
            beat = time.monotonic()
            while not self._closing and self._lost is None and not (self._leaving and not self._connections):
                for key, connection in self._watched():
                    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent_since else 0)
                    if key.events != events:
                        self._selector.modify(connection.sock, events, connection)
                # Again if nothing came: this process may have slept, and what came meanwhile must count first.
                for key, events in self._selector.select(self._lost_s / 20) or self._selector.select(0):
                    self._ready(key, events)
                now = time.monotonic()
                if now >= beat:
                    beat = now + self._lost_s / 5
                    for connection in self._connections.values():
                        connection.send(Kind.ALIVE)
                self._check(now)
        except Exception as error:  # a bug, which must not look like silence
            log.exception("the replica's channel died")
            self._lose(f"the channel of node {self.rank} failed: {type(error).__name__}: {error}")
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        self._waker.close()
        if self._lost is not None and self._joined:
            self._on_lost(self._lost)

    def _watched(self) -> list[tuple[selectors.SelectorKey, Connection]]:
        return [(key, key.data) for key in self._selector.get_map().values() if isinstance(key.data, Connection)]

    def _ready(self, key: selectors.SelectorKey, events: int) -> None:
        if not isinstance(key.data, Connection):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.recv(4096)  # it only woke this thread
            return
        connection = key.data
        if events & selectors.EVENT_WRITE:
            connection.flush()
        if not events & selectors.EVENT_READ:
            return
        try:
            frames, ended = connection.receive()
            for frame in frames:
                if connection.sock.fileno() >= 0:
                    self._take(connection, frame)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            return self._gone(connection, f"it does not keep to the protocol: {error}")
        if ended and connection.sock.fileno() >= 0:
            self._gone(connection, "it closed the connection")

    def _check(self, now: float) -> None:
        for connection in list(self._connections.values()):
            if now - connection.heard > self._lost_s:
                self._gone(connection, f"no sign of it for {self._lost_s:g} s")
            elif connection.unsent_since is not None and now - connection.unsent_since > self._lost_s:
                self._gone(connection, f"it has read nothing for {self._lost_s:g} s")

    def _gone(self, connection: Connection, why: str) -> None:
        rank = next((rank for rank, other in self._connections.items() if other is connection), None)
        reason = f"node {rank} ({connection.peer}) was lost: {why}"
        if rank is not None:
            connection.send(Kind.FAILED, reason.encode())  # it may live, and wonder
            del self._connections[rank]
        self._drop(connection)
        if rank is not None:
            self._lose(reason)

    def _drop(self, connection: Connection) -> None:
        self._selector.unregister(connection.sock)
        connection.close()

    def _take(self, connection: Connection, frame: Frame) -> None:
        if frame.kind is Kind.FAILED:
            self._lose(frame.payload.decode())
        elif frame.kind is not Kind.ALIVE:
            raise ValueError(f"it sent {frame.kind.name}, which is not its part")

    # In any thread.

    def _lose(self, reason: str) -> None:
        """The first reason counts; none does when all are about to end anyway."""
        with self._changed:
            if self._lost is not None or self._leaving:
                return
            for connection in list(self._connections.values()):  # first, since then the thread closes them
                connection.send(Kind.FAILED, reason.encode())
            self._lost = reason
            self._changed.notify_all()
        self._values.put(None)

    def _next_value(self, name: str) -> tuple[int, Any]:
        got = self._values.get()
        if got is None:
            self._values.put(None)
            raise Lost(self._lost)
        rank, part = got
        if part["name"] != name:
            raise RuntimeError(f"node {rank} is at {part['name']!r}, node {self.rank} at {name!r}")
        return rank, part["value"]

    def _send(self, kind: Kind, value: Any = None) -> None:
        payload = b"" if value is None else dump(value)
        for connection in list(self._connections.values()):
            connection.send(kind, payload)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # enough of them are under way, or the thread has ended
            self._waker.send(b"x")


def difference(rank: int, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """What the facts of node `rank` have otherwise than those of node 0, as a sentence."""
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    said = [f"{name} is {theirs.get(name)!r} there, {ours.get(name)!r} on node 0" for name in names]
    return f"node {rank} differs from node 0: {'; '.join(said)}" if said else None


def dump(value: Any) -> bytes:
    return json.dumps(value).encode()
