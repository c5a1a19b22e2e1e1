# SPDX-License-Identifier: Apache-2.0
"""The processes of one replica, and the channel on which process 0 leads the others. No jax.

All run the same programs in the same order: process 0, the `Leader`, plans each step and sends it to the `Follower`s
before it runs it itself. All end together: who is lost, or says that it failed, takes everybody along. Not here: what a
step means, what `jax.distributed` does, the frames (`wire`).

The channel is not encrypted and asks for no password. It listens on one address, that of process 0 in the network of
the replica, and only until all have come; that network must be trusted.
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
from typing import Any, NamedTuple

import numpy as np

from qwen_spmd.serve.wire import Connection, Frame, Kind, where

log = logging.getLogger(__name__)

LOST_S = 5.0
"""Without a sign for so long, a process is lost. Five signs are sent in this time."""

HELLO_S = 5.0
"""Within so long a connection must say who it is."""

FRAME_BYTES = 1 << 28


class Lost(ConnectionError):
    """A process of the replica is gone, or failed, or was refused: none of them can go on."""


class Step(NamedTuple):
    """A step as it was planned: `key` and `iterations` of its program, `words` int32 [ranks, n]. `look`: copy the
    experts' load after it, which is a program too.
    """

    key: tuple[int, int] | int
    iterations: int
    words: np.ndarray
    look: bool = False


class _Channel:
    """The part that both sides have: a thread that reads, keeps up the heartbeats and notices who is gone."""

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
            if difference := _difference(rank, all_facts[0], theirs):
                raise ValueError(difference)

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
            self._lost = reason
            self._changed.notify_all()
        for connection in list(self._connections.values()):
            connection.send(Kind.FAILED, reason.encode())
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
        payload = b"" if value is None else _dump(value)
        for connection in list(self._connections.values()):
            connection.send(kind, payload)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # enough of them are under way, or the thread has ended
            self._waker.send(b"x")


class Leader(_Channel):
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
        return json.loads(_dump(out))  # as the others get it

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
        refusal = _difference(rank, self._agree, agree)
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
                other.send(Kind.WELCOME, _dump({"coordinator": self.coordinator}))
            with self._changed:
                self._joined = True
                self._changed.notify_all()


class Follower(_Channel):
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
        leader.send(Kind.HELLO, _dump({"rank": rank, "agree": dict(agree)}))
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


def _difference(rank: int, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """What the facts of node `rank` have otherwise than those of node 0, as a sentence."""
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    said = [f"{name} is {theirs.get(name)!r} there, {ours.get(name)!r} on node 0" for name in names]
    return f"node {rank} differs from node 0: {'; '.join(said)}" if said else None


def _as_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(_dump(dict(facts)))


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode()


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
