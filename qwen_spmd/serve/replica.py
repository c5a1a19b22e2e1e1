# SPDX-License-Identifier: Apache-2.0
"""The two sides of a replica of several processes: process 0 leads, the others follow. No jax.

All run the same programs in the same order: process 0, the `Leader`, plans each step and sends it to the `Follower`s
before it runs it itself. All end together: who is lost, or says that it failed, takes everybody along. Not here: what a
step means, what `jax.distributed` does, heartbeats and losses (`channel`).

The channel is not encrypted and asks for no password. It listens on one address, that of process 0 in the network of
the replica, and only until all have come; that network must be trusted.
"""

from __future__ import annotations

import json
import logging
import queue
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from qwen_spmd.serve.channel import LOST_S, Channel, Lost, difference, dump
from qwen_spmd.serve.wire import Connection, Frame, Kind, where

log = logging.getLogger(__name__)

HELLO_S = 5.0
"""Within so long a connection must say who it is."""

FRAME_BYTES = 1 << 28


class Step(NamedTuple):
    """A step as it was planned: `key` and `iterations` of its program, `words` int32 [ranks, n]. `look`: copy the
    experts' load after it, which is a program too.
    """

    key: tuple[int, int] | int
    iterations: int
    words: np.ndarray
    look: bool = False


class Leader(Channel):
    """Process 0's side. Making it listens on `host`, `port` and waits until all `nodes - 1` followers have come.

    agree      what the followers must have the same, by name; JSON
    join_s     how long to wait for them
    on_lost    called once, from a thread of the channel, with the reason for which the replica cannot go on
    on_leave   called from that thread when a follower was asked to end; the replica should drain and `stop`

    ValueError: a follower differs in something, or two have the same rank. TimeoutError: who did not come. OSError: the
    address cannot be listened on. Lost: one came and went.
    """

    def __init__(
        self,
        host: str,
        port: int,
        nodes: int,
        agree: Mapping[str, Any],
        *,
        join_s: float = 300.0,
        lost_s: float = LOST_S,
        on_lost: Callable[[str], None] = log.error,
        on_leave: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self._listener = _listen(host, port)
        super().__init__(nodes, 0, lost_s, on_lost)
        self._agree, self._on_leave = _as_json(agree), on_leave
        self._refused: str | None = None
        self._strangers: dict[Connection, float] = {}
        self.port: int = self._listener.getsockname()[1]
        self.coordinator = where(host, _free_port(self._listener))
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread.start()
        deadline = time.monotonic() + join_s
        with self._changed:
            self._changed.wait_for(lambda: self._joined or self._lost or self._refused, deadline - time.monotonic())
        if self._joined:
            return
        missing = ", ".join(str(rank) for rank in range(1, nodes) if rank not in self._connections)
        late = f"node {missing} of {nodes} did not come to {where(host, self.port)} in {join_s:g} s"
        lost = self._lost
        self.fail(self._refused or late)
        self.close()
        if self._refused:
            raise ValueError(self._refused)
        raise Lost(lost) if lost else TimeoutError(late)

    def broadcast(self, step: Step) -> None:
        """Send a step to all followers. Never waits: who does not take it is lost in time. Lost, once that is so."""
        if self._lost is not None:
            raise Lost(self._lost)
        words = np.ascontiguousarray(step.words, "<i4")
        T, B = step.key if isinstance(step.key, tuple) else (0, step.key)
        numbers = (T, B, step.iterations, len(words), int(step.look))
        if not all([c.send(Kind.STEP, words.data.cast("B"), numbers) for c in list(self._connections.values())]):
            self._wake()

    def exchange(self, name: str, value: Any) -> list[Any]:
        values = {0: value}
        while len(values) < self.nodes:
            rank, part = self._next_value(name)
            values[rank] = part
        out = [values[rank] for rank in range(self.nodes)]
        self._send(Kind.VALUE, {"name": name, "value": out})
        return json.loads(dump(out))  # as the others get it

    def stop(self) -> None:
        """Tell the followers that the last step was sent: they finish what they have, and close."""
        with self._changed:
            self._leaving = self._lost is None
        self._send(Kind.STOP)

    def wait_closed(self) -> bool:
        """After `stop`: wait until all followers have closed, at most as long as it takes to lose one."""
        self._thread.join(self._lost_s)
        return not self._thread.is_alive()

    def _ready(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is not self._listener:
            return super()._ready(key, events)
        try:
            sock, _ = self._listener.accept()
            connection = Connection(sock)
        except OSError:  # it has gone again
            return
        self._strangers[connection] = time.monotonic() + HELLO_S
        self._selector.register(connection.sock, selectors.EVENT_READ, connection)

    def _check(self, now: float) -> None:
        super()._check(now)
        for connection in [c for c, deadline in self._strangers.items() if now > deadline]:
            self._gone(connection, "it did not say who it is")

    def _gone(self, connection: Connection, why: str) -> None:
        if self._strangers.pop(connection, None):
            log.warning("a connection from %s ended: %s", connection.peer, why)
            connection.send(Kind.REFUSED, why.encode())
        super()._gone(connection, why)

    def _take(self, connection: Connection, frame: Frame) -> None:
        if connection in self._strangers:
            return self._hello(connection, frame)
        rank = next(rank for rank, other in self._connections.items() if other is connection)
        if frame.kind is Kind.VALUE:
            self._values.put((rank, json.loads(frame.payload)))
        elif frame.kind is Kind.LEAVE:
            self._on_leave(rank)
        else:
            super()._take(connection, frame)

    def _hello(self, connection: Connection, frame: Frame) -> None:
        if frame.kind is not Kind.HELLO:
            raise ValueError("it did not say who it is")
        hello = json.loads(frame.payload)
        rank, agree = hello["rank"], hello["agree"]
        del self._strangers[connection]
        refusal = difference(rank, self._agree, agree)
        if refusal is None and not 0 < rank < self.nodes:
            refusal = f"node {rank} came from {connection.peer}, it must be from 1 to {self.nodes - 1}"
        if refusal is None and rank in self._connections:
            refusal = f"node {rank} came twice, from {self._connections[rank].peer} and from {connection.peer}"
        if refusal is not None:
            connection.send(Kind.REFUSED, refusal.encode())
            self._drop(connection)
            with self._changed:
                self._refused = self._refused or refusal
                self._changed.notify_all()
            return
        connection.limit = FRAME_BYTES
        self._connections[rank] = connection
        log.info("node %d came from %s", rank, connection.peer)
        if len(self._connections) == self.nodes - 1:
            self._selector.unregister(self._listener)
            self._listener.close()
            for other in self._connections.values():
                other.send(Kind.WELCOME, dump({"coordinator": self.coordinator}))
            with self._changed:
                self._joined = True
                self._changed.notify_all()


class Follower(Channel):
    """The side of process `rank`, above 0. Making it connects to the leader, tries for `join_s` if nobody is there yet,
    and waits until all have come. The other arguments and the errors are as the leader's.
    """

    def __init__(
        self,
        host: str,
        port: int,
        nodes: int,
        rank: int,
        agree: Mapping[str, Any],
        *,
        join_s: float = 300.0,
        lost_s: float = LOST_S,
        on_lost: Callable[[str], None] = log.error,
    ) -> None:
        leader = Connection(_connect(host, port, join_s))
        super().__init__(nodes, rank, lost_s, on_lost)
        self._refused: str | None = None
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()  # None: stop, or lost
        leader.limit = FRAME_BYTES
        leader.send(Kind.HELLO, dump({"rank": rank, "agree": dict(agree)}))
        self._connections[0] = leader
        self._selector.register(leader.sock, selectors.EVENT_READ, leader)
        self._thread.start()
        with self._changed:  # the leader is patient for all, so this one needs no time limit of its own
            self._changed.wait_for(lambda: self._joined or self._lost or self._refused)
        if not self._joined:
            self.close()
            raise ValueError(self._refused) if self._refused else Lost(self._lost)

    def receive(self) -> Step | None:
        """The next step, for which it waits. None: there is no more, the replica ends. Lost."""
        step = self._steps.get()
        if step is None:
            self._steps.put(None)
            if self._lost is not None:
                raise Lost(self._lost)
        return step

    def exchange(self, name: str, value: Any) -> list[Any]:
        self._send(Kind.VALUE, {"name": name, "value": value})
        return self._next_value(name)[1]

    def leave(self) -> None:
        """Ask the leader to end the replica in good order."""
        self._send(Kind.LEAVE)

    def _lose(self, reason: str) -> None:
        super()._lose(reason)
        if self._lost is not None:
            self._steps.put(None)

    def _take(self, connection: Connection, frame: Frame) -> None:
        if frame.kind is Kind.STEP:
            T, B, iterations, ranks, look = frame.numbers
            words = np.frombuffer(frame.payload, "<i4").reshape(ranks, -1)
            self._steps.put(Step((T, B) if T else B, iterations, words, bool(look)))
        elif frame.kind is Kind.VALUE:
            self._values.put((0, json.loads(frame.payload)))
        elif frame.kind is Kind.STOP:
            with self._changed:
                self._leaving = True
            self._steps.put(None)
        elif frame.kind is Kind.WELCOME:
            self.coordinator = json.loads(frame.payload)["coordinator"]
            with self._changed:
                self._joined = True
                self._changed.notify_all()
        elif frame.kind is Kind.REFUSED:
            with self._changed:
                self._refused = frame.payload.decode()
                self._changed.notify_all()
        else:
            super()._take(connection, frame)


def _as_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(dump(dict(facts)))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=128)
    except OSError as error:
        message = f"node 0 cannot listen on {where(host, port)}, which must be an address of its own"
        raise OSError(f"{message}: {error.strerror or error}") from None


def _free_port(listener: socket.socket) -> int:
    """A port that nobody has at this moment, on the listener's address."""
    with socket.create_server((listener.getsockname()[0], 0), family=listener.family) as sock:
        return sock.getsockname()[1]


def _connect(host: str, port: int, join_s: float) -> socket.socket:
    """A connection to the leader, which may start later than this process, and its name too."""
    deadline = time.monotonic() + join_s
    why = "it listens to itself"
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=max(0.1, min(5.0, deadline - time.monotonic())))
            if sock.getsockname() != sock.getpeername():  # TCP may connect a port to itself while nobody listens
                return sock
            sock.close()
        except OSError as error:
            why = error.strerror or error
        if time.monotonic() > deadline:
            raise TimeoutError(f"node 0 was not at {where(host, port)} in {join_s:g} s: {why}")
        time.sleep(min(0.2, join_s))
