# SPDX-License-Identifier: Apache-2.0
"""A server of two processes with devices of their own: the answers of one process, and both end together."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

ORACLE = Path(__file__).parents[1] / "oracles" / "qwen3_moe"
SIZES = ["--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--dtype", "float32", "--layout", "dp_ep"]
TALK = {"temperature": 2.0, "top_p": 1.0, "top_k": 0, "ignore_eos": True, "max_tokens": 24}
START_S = 180.0
LOST_S = 10.0
"""From a kill to the end of everything, at most."""


class Process:
    """A process of a server; what it prints is in `lines`."""

    def __init__(self, *argv, devices):
        flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
        env = os.environ | {"XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}"}
        command = [sys.executable, "-m", "qwen_spmd.serve", *map(str, argv)]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        self.lines = []
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.popen.stdout), daemon=True)
        self.reader.start()

    def wait_for(self, text, seconds=START_S):
        end = time.monotonic() + seconds
        while not any(text in line for line in self.lines):
            assert time.monotonic() < end and self.reader.is_alive(), "".join(self.lines)
            time.sleep(0.02)
        return next(line for line in self.lines if text in line)

    def ends(self, seconds=30.0):
        """The exit code, and all that it printed."""
        try:
            code = self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError("it does not end: " + "".join(self.lines)) from None
        self.reader.join()
        return code, "".join(self.lines)

    def close(self):
        self.popen.kill()
        self.popen.wait()
        self.reader.join()
        self.popen.stdout.close()


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Start servers: one process, or two that have the devices between them."""
    cache = tmp_path_factory.mktemp("programs")
    with contextlib.ExitStack() as stack:

        def one(*argv, devices):
            process = Process(*argv, "--compilation-cache-dir", cache, devices=devices)
            stack.callback(process.close)
            return process

        def launch(*argv, devices=2, nodes=2, differs=()):
            if nodes == 1:
                return [one(*argv, "--port", 0, devices=devices)]
            with socket.create_server(("127.0.0.1", 0)) as sock:
                master = f"127.0.0.1:{sock.getsockname()[1]}"
            argv = [*argv, "--nnodes", nodes, "--master-addr", master, "--node-rank"]
            return [one(*argv, 0, "--port", 0, devices=devices // 2), one(*argv, 1, *differs, devices=devices // 2)]

        yield launch


def url(processes):
    return processes[0].wait_for("ready: http").split()[1]


class Stream:
    """A client that reads a long answer in the background."""

    def __init__(self, server, **options):
        self.lines, self.error = [], None
        self.thread = threading.Thread(target=self._read, args=(server, options), daemon=True)
        self.thread.start()
        end = time.monotonic() + 60
        while len(self.lines) < 6:
            assert time.monotonic() < end and self.thread.is_alive()
            time.sleep(0.01)

    def _read(self, server, options):
        body = {"prompt": [5, 6, 7], "stream": True, "ignore_eos": True, "temperature": 0} | options
        with (
            contextlib.suppress(httpx.RemoteProtocolError),
            httpx.stream("POST", server + "/completions", json=body, timeout=60) as response,
        ):
            self.lines.extend(response.iter_lines())

    def events(self):
        self.thread.join(30)
        assert not self.thread.is_alive(), "the client still waits"
        return [json.loads(line.removeprefix("data: ")) for line in self.lines if line.startswith("data: {")]


def answers(server):
    """Of several clients at once, greedy and seeded."""

    def chat(text, **options):
        body = {"messages": [{"role": "user", "content": text}]} | options
        answer = httpx.post(server + "/chat/completions", json=body, timeout=120).raise_for_status().json()
        return answer["choices"], answer["usage"]

    asks = [("What is 12 + 30?", {"temperature": 0}), ("Which animal says hoot?", {"temperature": 0})]
    asks += [("Tell me a story. " * n, TALK | {"seed": n}) for n in (1, 9, 20)]
    asks += [("Spell garden.", TALK | {"seed": 3, "n": 4})]
    with ThreadPoolExecutor(len(asks)) as pool:
        return list(pool.map(lambda ask: chat(ask[0], **ask[1]), asks))


def test_two_processes_answer_as_one(launch):
    argv = ["--max-model-len", 512, "--decode-window", 4, *SIZES]
    alone = launch(*argv, devices=8, nodes=1)
    expected = answers(url(alone))
    alone[0].popen.terminate()
    assert expected[0][0][0]["message"]["content"] == "12 + 30 = 42"

    two = launch(*argv, devices=8)
    server = url(two)
    two[1].wait_for("ready: node 1 of 2")
    assert answers(server) == expected
    metrics = httpx.get(server.removesuffix("/v1") + "/metrics").text
    two[1].popen.terminate()
    for process in two:
        code, text = process.ends()
        assert (code, "ERROR" in text, "Traceback" in text) == (0, False, False), text
    assert alone[0].ends()[0] == 0
    assert re.search(r"^qwen_spmd\S*compiles_after_ready\S* 0", metrics, re.M), metrics


def test_what_runs_ends_before_both_do(launch):
    two = launch(ORACLE, *SIZES)
    stream = Stream(url(two), max_tokens=150)
    two[0].popen.terminate()
    events = stream.events()
    assert events[-1]["choices"][0]["finish_reason"] == "length", events[-1]
    for process in two:
        code, text = process.ends()
        assert (code, "ERROR" in text, "Traceback" in text) == (0, False, False), text


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGSTOP], ids=lambda kill: kill.name)
def test_a_lost_process_ends_the_other_and_the_clients_are_told(launch, kill):
    two = launch(ORACLE, *SIZES)
    server = url(two)
    with ThreadPoolExecutor(1) as pool:
        body = {"prompt": [9, 8], "ignore_eos": True, "max_tokens": 4000}
        whole = pool.submit(httpx.post, server + "/completions", json=body, timeout=60)
        stream = Stream(server, max_tokens=4000)
        assert not whole.done()
        start = time.monotonic()
        two[1].popen.send_signal(kill)
    events = stream.events()
    code, text = two[0].ends()
    assert time.monotonic() - start < LOST_S
    assert code == 1
    why = {signal.SIGKILL: "it closed the connection", signal.SIGSTOP: "no sign of it for 5 s"}[kill]
    message = rf"node 1 \(127.0.0.1:\d+\) was lost: {why}"
    assert re.search(f"^error: {message}$", text, re.M), text
    for error in (events[-1]["error"], whole.result().json()["error"]):
        assert re.fullmatch(f"the engine failed: {message}", error["message"]), error
    assert whole.result().status_code == 500
    if kill is signal.SIGSTOP:  # it was given up meanwhile
        two[1].popen.send_signal(signal.SIGCONT)
        code, text = two[1].ends(10)
        assert code not in (0, None)


def test_a_lost_leader_ends_the_other(launch):
    two = launch(ORACLE, *SIZES)
    Stream(url(two), max_tokens=4000)
    start = time.monotonic()
    two[0].popen.kill()
    code, text = two[1].ends()
    assert time.monotonic() - start < LOST_S
    assert code != 0
    assert re.search("node 0 .* was lost: it closed the connection|JAX distributed service detected", text), text


def test_a_signal_while_loading_ends_both(launch):
    two = launch(ORACLE, *SIZES)
    two[0].wait_for("node 1 came")
    two[1].popen.terminate()
    code, text = two[1].ends()
    assert (code, "stopped while loading" in text) == (128 + signal.SIGTERM, True), text
    code, text = two[0].ends()
    assert (code, "error: node 1 failed: it was stopped while loading" in text) == (1, True), text


def test_arguments_must_be_the_same(launch):
    two = launch(ORACLE, *SIZES, differs=["--max-num-seqs", "8", "--decode-window", "3"])
    message = "error: node 1 differs from node 0: --max-num-seqs is 8 there, 16 on node 0; "
    message += "--decode-window is 3 there, None on node 0"
    for process in two:
        code, text = process.ends(60)
        assert code == 1
        assert message in text


def test_all_devices_must_have_a_part(launch):
    two = launch(ORACLE, *SIZES[:-2], "--expert-parallel-size", 3, devices=4)
    for process in two:
        code, text = process.ends(60)
        assert code == 1
        assert re.search("error: (node [01] failed: )?dp=1 ep=3 tp=1 is 3 devices, the 2 nodes have 4: all must", text)
