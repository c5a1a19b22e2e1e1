# SPDX-License-Identifier: Apache-2.0
"""The channel between the processes of a replica, over real sockets: who may join, what arrives, who is missed."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from qwen_spmd.serve.channel import Lost
from qwen_spmd.serve.replica import Follower, Leader, Step
from qwen_spmd.serve.wire import HEADER, MAGIC, NONE, VERSION, Connection, Kind

HOST = "127.0.0.1"
AGREE = {"--max-num-seqs": 16, "--dtype": "auto"}


def free_port():
    with socket.create_server((HOST, 0)) as sock:
        return sock.getsockname()[1]


class Losses(list):
    """An `on_lost` that remembers."""

    def wait(self, seconds=10.0):
        end = time.monotonic() + seconds
        while not self:
            assert time.monotonic() < end, "no loss was reported"
            time.sleep(0.005)
        return self[0]


class Group:
    """A leader and its followers, each made in a thread of its own, and what they lost."""

    def __init__(self, nodes, **options):
        self.port = free_port()
        self.lost = [Losses() for _ in range(nodes)]
        self.left = []
        with ThreadPoolExecutor(nodes) as pool:
            leader = pool.submit(
                Leader, HOST, self.port, nodes, AGREE, on_lost=self.lost[0].append, on_leave=self.left.append, **options
            )
            followers = [
                pool.submit(Follower, HOST, self.port, nodes, rank, AGREE, on_lost=self.lost[rank].append, **options)
                for rank in range(1, nodes)
            ]
        self.leader, self.followers = leader.result(), [f.result() for f in followers]

    @property
    def all(self):
        return [self.leader, *self.followers]

    def everywhere(self, call):
        """What `call` gives on each, at the same time: results, or the errors."""
        with ThreadPoolExecutor(len(self.all)) as pool:
            futures = [pool.submit(call, channel) for channel in self.all]
        return [f.exception() or f.result() for f in futures]

    def close(self):
        for channel in self.all:
            channel.close()


@pytest.fixture(autouse=True)
def no_thread_stays():
    yield
    end = time.monotonic() + 5
    while any(t.name == "replica" for t in threading.enumerate()):
        assert time.monotonic() < end, "a channel's thread is still there"
        time.sleep(0.01)


@pytest.fixture
def group():
    with contextlib.ExitStack() as stack:

        def make(nodes=3, **options):
            made = Group(nodes, **options)
            stack.callback(made.close)
            return made

        yield make


def step(i, n=300, key=(32, 8)):
    return Step(key, i, np.random.default_rng(i).integers(-(2**31), 2**31 - 1, (4, n)).astype(np.int32))


def test_steps_arrive_as_they_were_sent(group):
    g = group()
    sent = [step(i, n, key) for i, (n, key) in enumerate([(1, 8), (300, (32, 8)), (400_000, (64, 4)), (2, 16)])]
    sent[2] = sent[2]._replace(look=True)
    for s in sent:
        g.leader.broadcast(s)
    g.leader.stop()
    for follower in g.followers:
        for s in sent:
            got = follower.receive()
            assert (got.key, got.iterations, got.look) == (s.key, s.iterations, s.look)
            assert got.words.dtype == np.int32
            np.testing.assert_array_equal(got.words, s.words)
        assert follower.receive() is None
        assert follower.receive() is None, "the end stays the end"
        follower.close()
    assert g.leader.wait_closed()
    assert g.lost == [[], [], []], "who leaves after the end is not lost"


def test_the_leader_may_use_its_words_again(group):
    """What the socket did not take at once is kept apart."""
    g = group(2)
    words = np.zeros((1, 4_000_000), np.int32)
    for i in range(3):
        words[:] = i
        g.leader.broadcast(Step(8, 0, words))
    words[:] = -1
    for i in range(3):
        assert (g.followers[0].receive().words == i).all()


def test_exchange_gives_everyone_all_values_and_waits_for_all(group):
    g = group()
    order = []

    def exchange(channel):
        time.sleep(0.1 * channel.rank)
        order.append(channel.rank)
        values = channel.exchange("pages", {"n": channel.rank})
        order.append("done")
        return values, channel.exchange("again", [channel.rank])

    expected = ([{"n": 0}, {"n": 1}, {"n": 2}], [[0], [1], [2]])
    assert g.everywhere(exchange) == [expected] * 3
    assert order[:3] == [0, 1, 2]
    assert len({channel.coordinator for channel in g.all}) == 1


def test_agree_names_what_differs_and_where(group):
    g = group()
    assert g.everywhere(lambda c: c.agree({"config.json": "a"})) == [None] * 3
    errors = g.everywhere(lambda c: c.agree({"config.json": "b" if c.rank == 2 else "a", "jax": "1"}))
    assert {type(e) for e in errors} == {ValueError}
    assert {str(e) for e in errors} == {"node 2 differs from node 0: config.json is 'b' there, 'a' on node 0"}


def test_different_points_are_a_bug_that_shows(group):
    g = group(2)
    with ThreadPoolExecutor(1) as pool:
        follower = pool.submit(g.followers[0].exchange, "b", 1)
        with pytest.raises(RuntimeError, match="node 1 is at 'b', node 0 at 'a'"):
            g.leader.exchange("a", 1)
        g.leader.fail("a bug")
        g.leader.close()
        with pytest.raises(Lost, match="node 0 failed: a bug"):
            follower.result()


def join(pool, port, rank, agree=AGREE, nodes=2):
    return pool.submit(Follower, HOST, port, nodes, rank, agree, on_lost=pytest.fail)


@pytest.mark.parametrize(
    ("followers", "message"),
    [
        ([(1, AGREE | {"--max-num-seqs": 8})], "node 1 differs from node 0: --max-num-seqs is 8 there, 16 on node 0"),
        ([(1, AGREE | {"--tp": 2})], "node 1 differs from node 0: --tp is 2 there, None on node 0"),
        ([(3, AGREE)], "node 3 came from 127.0.0.1:[0-9]+, it must be from 1 to 2"),
        ([(1, AGREE), (1, AGREE)], "node 1 came twice, from 127.0.0.1:[0-9]+ and from 127.0.0.1:[0-9]+"),
    ],
)
def test_who_may_not_take_part_is_told_why_and_so_are_the_others(followers, message):
    port = free_port()
    with ThreadPoolExecutor(4) as pool:
        joining = [join(pool, port, rank, agree, 3) for rank, agree in followers]
        with pytest.raises(ValueError, match=message):
            Leader(HOST, port, 3, AGREE, on_lost=pytest.fail)
        for follower in joining:
            with pytest.raises((ValueError, Lost), match=message):
                follower.result()


def test_who_does_not_come_is_named():
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        follower = join(pool, port, 2, nodes=5)
        with pytest.raises(TimeoutError, match=f"node 1, 3, 4 of 5 did not come to {HOST}:{port} in 0.5 s"):
            Leader(HOST, port, 5, AGREE, join_s=0.5, on_lost=pytest.fail)
        with pytest.raises(Lost, match="node 0 failed: node 1, 3, 4 of 5 did not come"):
            follower.result()


def test_a_leader_that_does_not_come_is_named():
    port = free_port()
    with pytest.raises(TimeoutError, match=f"node 0 was not at {HOST}:{port} in 0.3 s: Connection refused"):
        Follower(HOST, port, 2, 1, AGREE, join_s=0.3, on_lost=pytest.fail)


def test_the_leader_listens_on_an_address_of_its_own_only():
    with pytest.raises(OSError, match=r"node 0 cannot listen on 192.0.2.1:5, which must be an address of its own"):
        Leader("192.0.2.1", 5, 2, AGREE, on_lost=pytest.fail)


def hello(rank, version=VERSION, magic=MAGIC):
    payload = json.dumps({"rank": rank, "agree": AGREE}).encode()
    return HEADER.pack(magic, version, Kind.HELLO, len(payload), *NONE) + payload


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n" + b" " * 100_000, "these are no frames"),
        (hello(1, version=VERSION + 1), f"its version is {VERSION + 1}, that of this process {VERSION}"),
        (HEADER.pack(MAGIC, VERSION, Kind.HELLO, 1 << 30, *NONE), "a frame has 1073741824 bytes"),
        (HEADER.pack(MAGIC, VERSION, Kind.HELLO, 2, *NONE) + b"{}", "rank"),
        (HEADER.pack(MAGIC, VERSION, Kind.LEAVE, 0, *NONE), "it did not say who it is"),
        (HEADER.pack(MAGIC, VERSION, 77, 0, *NONE), "77"),
        (b"", None),
    ],
    ids=["http", "version", "long", "empty", "kind", "no kind", "silent"],
)
def test_strangers_do_not_disturb(said, answer):
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(Leader, HOST, port, 2, AGREE, on_lost=pytest.fail)
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                stranger = socket.create_connection((HOST, port))
                break
            time.sleep(0.01)
        with stranger:
            stranger.settimeout(5)
            with contextlib.suppress(ConnectionError):
                stranger.sendall(said)
                if answer:
                    assert answer in stranger.recv(4096).decode(errors="replace")
            follower = join(pool, port, 1).result()
            assert leader.result().port == port
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((HOST, port))  # all have come: nobody else can
        leader.result().stop()
        follower.close()
        leader.result().close()


def test_frames_may_come_in_any_pieces(group):
    with socket.create_server((HOST, 0)) as server:
        a, b = socket.create_connection(server.getsockname()), None
        b, _ = server.accept()
    payloads = [os.urandom(n) for n in (0, 1, 27, 28, 29, 5000)]
    sent = b"".join(HEADER.pack(MAGIC, VERSION, Kind.VALUE, len(p), i, 0, 0, 0, -1) + p for i, p in enumerate(payloads))
    connection, random, got = Connection(b), np.random.default_rng(0), []
    with a:
        while sent:
            n = int(random.integers(1, 60))
            a.sendall(sent[:n])
            sent = sent[n:]
            frames, ended = connection.receive()
            assert not ended
            got += frames
    end = time.monotonic() + 5
    while not ended:
        assert time.monotonic() < end
        frames, ended = connection.receive()
        got += frames
    connection.close()
    assert [(f.payload, f.numbers) for f in got] == [(p, (i, 0, 0, 0, -1)) for i, p in enumerate(payloads)]


def test_a_failure_reaches_everyone_once(group):
    g = group(4)
    g.followers[1].fail("no weights for layer 3")
    g.followers[1].close()
    for rank in (0, 1, 3):
        assert g.lost[rank].wait() == "node 2 failed: no weights for layer 3"
        with pytest.raises(Lost, match="no weights for layer 3"):
            g.all[rank].exchange("ready", None)
    with pytest.raises(Lost, match="no weights"):
        g.leader.broadcast(step(0))
    with pytest.raises(Lost, match="no weights"):
        g.followers[0].receive()
    time.sleep(0.2)
    assert [len(lost) for lost in g.lost] == [1, 1, 1, 1], "each is told once"
    assert g.leader.lost == g.leader.wait_lost(0) == "node 2 failed: no weights for layer 3"


def test_who_waits_is_woken_by_a_loss(group):
    g = group(3)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(g.followers[0].receive), pool.submit(g.leader.exchange, "ready", None)]
        time.sleep(0.1)
        assert not any(f.done() for f in waiting)
        g.followers[1].close()  # without a word
        for future in waiting:
            with pytest.raises(Lost, match=r"node 2 \(127.0.0.1:[0-9]+\) was lost: it closed the connection"):
                future.result(5)


def test_a_lost_leader(group):
    g = group(3)
    g.leader.close()
    for rank in (1, 2):
        assert "node 0 (127.0.0.1" in g.lost[rank].wait()


def test_leave_asks_the_leader(group):
    g = group(3)
    g.followers[1].leave()
    end = time.monotonic() + 5
    while not g.left:
        assert time.monotonic() < end
        time.sleep(0.005)
    assert g.left == [2]
    g.leader.broadcast(step(1))
    g.leader.stop()
    for follower in g.followers:
        assert follower.receive().iterations == 1
        assert follower.receive() is None
        follower.close()
    assert g.leader.wait_closed()
    assert not any(g.lost)


def test_silence_without_work_is_no_loss(group):
    g = group(2, lost_s=0.6)
    time.sleep(1.5)
    assert not any(g.lost)
    assert g.everywhere(lambda c: c.exchange("ready", c.rank)) == [[0, 1]] * 2


def test_who_stops_reading_is_lost_and_blocks_nobody():
    """It says that it lives and takes nothing: the leader's loop goes on until it is given up."""
    port, lost, stop = free_port(), Losses(), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(Leader, HOST, port, 2, AGREE, lost_s=1.0, on_lost=lost.append)
        sock = None
        while sock is None:
            with contextlib.suppress(ConnectionRefusedError):
                sock = socket.create_connection((HOST, port))
        sock.sendall(hello(1))
        leader = leader.result()

        def live():
            with contextlib.suppress(ConnectionError):
                while not stop.wait(0.1):
                    sock.sendall(HEADER.pack(MAGIC, VERSION, Kind.ALIVE, 0, *NONE))

        pool.submit(live)
        big, longest, start = step(0, 500_000), 0.0, time.monotonic()
        with pytest.raises(Lost):
            while time.monotonic() < start + 10:
                before = time.monotonic()
                leader.broadcast(big)
                longest = max(longest, time.monotonic() - before)
                time.sleep(0.1)
        assert "node 1" in lost[0] and "it has read nothing for 1 s" in lost[0]
        assert len(lost) == 1
        assert time.monotonic() - start < 5
        assert longest < 0.5
        stop.set()
        sock.close()


FOLLOW = """
import sys
from qwen_spmd.serve.replica import Follower, Lost
lost = lambda reason: print("lost:", reason, flush=True)
follower = Follower("127.0.0.1", int(sys.argv[1]), 2, 1, {}, lost_s=float(sys.argv[2]), on_lost=lost)
print("joined", flush=True)
try:
    while follower.receive() is not None:
        pass
except Lost:
    follower.close()
    sys.exit(7)
"""


@contextlib.contextmanager
def process(lost_s):
    """A leader here, a follower in another process."""
    port, lost = free_port(), Losses()
    argv = [sys.executable, "-c", FOLLOW, str(port), str(lost_s)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as popen:
        leader = Leader(HOST, port, 2, {}, lost_s=lost_s, on_lost=lost.append)
        try:
            assert popen.stdout.readline() == "joined\n"
            yield leader, popen, lost
        finally:
            popen.kill()
            leader.close()


def test_a_killed_process_is_lost_at_once():
    with process(lost_s=30) as (_, popen, lost):
        start = time.monotonic()
        popen.kill()
        assert "was lost: it closed the connection" in lost.wait(5)
        assert time.monotonic() - start < 2


def test_a_stopped_process_is_lost_in_time_and_notices_when_it_wakes():
    with process(lost_s=1.5) as (leader, popen, lost):
        start = time.monotonic()
        popen.send_signal(signal.SIGSTOP)
        assert "no sign of it for 1.5 s" in lost.wait(10)
        assert 0.5 < time.monotonic() - start < 5
        with pytest.raises(Lost):
            leader.broadcast(step(0))
        popen.send_signal(signal.SIGCONT)
        assert "lost: node 1" in popen.stdout.readline()
        assert popen.wait(5) == 7


def test_a_process_that_is_told_to_stop_ends():
    with process(lost_s=5) as (leader, popen, lost):
        leader.broadcast(step(0))
        leader.stop()
        assert popen.wait(5) == 0
        assert leader.wait_closed()
        assert not lost
