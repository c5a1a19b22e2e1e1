# SPDX-License-Identifier: Apache-2.0
"""What the processes of a replica say to each other: frames of a fixed header, five numbers and bytes, over TCP.

The bytes are raw words, JSON or text, never a pickle. Not here: who says what when (`replica`).
"""

from __future__ import annotations

import collections
import enum
import socket
import struct
import threading
import time
from typing import NamedTuple

MAGIC = b"qspm"
VERSION = 1
"""Of the frames and of who says what when. Processes with different ones do not work together."""

HEADER = struct.Struct("<4sHHI5i")
NONE = (0,) * 5
READ_BYTES = 1 << 18
STRANGER_BYTES = 1 << 16
"""Longest frame of someone who has not said yet who it is."""


class Kind(enum.IntEnum):
    """
    HELLO    JSON; a follower names its rank and what must agree
    WELCOME  JSON; all have come
    REFUSED  text; why a follower may not take part
    ALIVE    nothing
    STEP     words; the numbers are T (0 in a decode window), B, iterations, ranks, look
    VALUE    JSON; one process's part of an exchange, or the answer with all parts
    LEAVE    nothing; a follower was asked to end, so all should
    STOP     nothing; the last step was sent
    FAILED   text; the sender ends, this is why
    """

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    ALIVE = 4
    STEP = 5
    VALUE = 6
    LEAVE = 7
    STOP = 8
    FAILED = 9


class Frame(NamedTuple):
    kind: Kind
    numbers: tuple[int, ...]
    payload: bytes


class Connection:
    """A TCP socket that carries frames and never blocks.

    heard          when something came last (`time.monotonic`)
    unsent_since   since when the other side has taken nothing of what waits to be sent; None: nothing waits
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.peer = where(*sock.getpeername()[:2])
        self.limit = STRANGER_BYTES
        self.heard = time.monotonic()
        self.unsent_since: float | None = None
        self._lock = threading.Lock()
        self._unsent: collections.deque[memoryview] = collections.deque()
        self._got = bytearray()
        self._room = memoryview(bytearray(READ_BYTES))

    def send(self, kind: Kind, payload: bytes | memoryview = b"", numbers: tuple[int, ...] = NONE) -> bool:
        """Send a frame, from any thread. False: some of it waits until `flush`. A dead socket shows in `receive`."""
        parts = [memoryview(HEADER.pack(MAGIC, VERSION, kind, len(payload), *numbers)), memoryview(payload)]
        with self._lock:
            if not self._unsent:
                parts = self._write(parts)
            if parts and self.unsent_since is None:
                self.unsent_since = time.monotonic()
            self._unsent.extend(memoryview(bytes(part)) for part in parts)  # the caller may use its memory again
            return not self._unsent

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it."""
        with self._lock:
            before = sum(map(len, self._unsent))
            self._unsent = collections.deque(self._write(list(self._unsent)))
            if not self._unsent:
                self.unsent_since = None
            elif sum(map(len, self._unsent)) < before:
                self.unsent_since = time.monotonic()

    def receive(self) -> tuple[list[Frame], bool]:
        """The frames that have come, and whether that was all there will ever be. ValueError: it speaks otherwise."""
        ended = False
        while True:
            try:
                n = self.sock.recv_into(self._room)
            except BlockingIOError:
                break
            except OSError:
                n = 0
            if n == 0:
                ended = True
                break
            self.heard = time.monotonic()
            self._got += self._room[:n]
            if len(self._got) > 2 * self.limit:
                break  # the rest stays in the socket until these are taken
        return self._frames(), ended

    def close(self) -> None:
        self.sock.close()

    def _write(self, parts: list[memoryview]) -> list[memoryview]:
        """What of `parts` is left."""
        parts = [part for part in parts if len(part)]
        while parts:
            try:
                sent = self.sock.sendmsg(parts[:16])
            except BlockingIOError:
                break
            except OSError:
                return []
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]
        return parts

    def _frames(self) -> list[Frame]:
        frames: list[Frame] = []
        while len(self._got) >= HEADER.size:
            magic, version, kind, size, *numbers = HEADER.unpack_from(self._got)
            if magic != MAGIC:
                raise ValueError("these are no frames")
            if version != VERSION:
                raise ValueError(f"its version is {version}, that of this process {VERSION}")
            if size > self.limit:
                raise ValueError(f"a frame has {size} bytes, it must be at most {self.limit}")
            end = HEADER.size + size
            if len(self._got) < end:
                break
            frames.append(Frame(Kind(kind), tuple(numbers), bytes(self._got[HEADER.size : end])))
            del self._got[:end]
        return frames


def where(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
