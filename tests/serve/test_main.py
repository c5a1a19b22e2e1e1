# SPDX-License-Identifier: Apache-2.0
"""The server as a process: its start, its signals, its exit codes. The engine is the scripted one of conftest.py."""

import dataclasses
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from qwen_spmd.serve.args import ServeArgs
from qwen_spmd.serve.model_folder import model_folder

PROGRAM = """
import importlib.util, sys, types
spec = importlib.util.spec_from_file_location("scripted", sys.argv.pop(1))
scripted = sys.modules["scripted"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scripted)
sys.modules["qwen_spmd.serve.engine"] = types.SimpleNamespace(Engine=scripted.FakeEngine, EngineConfig=dict)
from qwen_spmd.serve.__main__ import main
sys.exit(main())
"""


class Process:
    """A server process; what it prints is in `lines`."""

    def __init__(self, *argv):
        command = [sys.executable, "-c", PROGRAM, str(Path(__file__).with_name("conftest.py")), *map(str, argv)]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines = []
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.popen.stdout), daemon=True)
        self.reader.start()

    def wait_for(self, text):
        end = time.monotonic() + 20
        while not any(text in line for line in self.lines):
            assert time.monotonic() < end and (self.popen.poll() is None or self.reader.is_alive()), self.lines
            time.sleep(0.02)
        return next(line for line in self.lines if text in line)

    def ends(self):
        """The exit code."""
        code = self.popen.wait(20)
        self.reader.join()
        return code

    def close(self):
        self.popen.kill()
        self.ends()
        self.popen.stdout.close()


@pytest.fixture
def launch():
    processes = []

    def launch(*argv):
        processes.append(Process(*argv))
        return processes[-1]

    yield launch
    for process in processes:
        process.close()


@pytest.fixture
def model(folder):
    """The model folder, with options for the scripted engine."""

    def model(**options):
        (folder / "fake.json").write_text(json.dumps(options))
        return folder

    return model


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def wait_for_port(port):
    end = time.monotonic() + 20
    while time.monotonic() < end:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError(f"nobody listens on {port}")


def stream(url, max_tokens):
    """Start a stream in the background: what came of it, and the thread."""
    got = []

    def read():
        body = {"prompt": "a", "max_tokens": max_tokens, "stream": True}
        with httpx.stream("POST", url + "/completions", json=body, timeout=20) as response:
            got.extend(response.iter_lines())

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return got, thread


def test_start_serve_drain(launch, model):
    port = free_port()
    process = launch(model(load_s=1, answer="x", step_s=0.02), "--port", port, "--served-model-name", "tiny")
    url = f"http://127.0.0.1:{port}"
    wait_for_port(port)  # it is there before the model is
    response = httpx.get(url + "/ready")
    assert (response.status_code, response.json()["status"]) == (503, "loading")
    response = httpx.get(url + "/v1/models")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "loading")
    assert process.wait_for("ready:") == f"ready: {url}/v1 serves tiny\n"
    assert httpx.get(url + "/ready").status_code == 200

    got, thread = stream(url + "/v1", 50)
    while not got:
        time.sleep(0.01)
    process.popen.send_signal(signal.SIGTERM)
    process.wait_for("shutting down")
    assert httpx.get(url + "/ready").json()["status"] == "draining"
    assert httpx.get(url + "/health").status_code == 200
    assert httpx.post(url + "/v1/completions", json={"prompt": "a"}).status_code == 503
    thread.join()
    chunks = [json.loads(line.removeprefix("data: ")) for line in got if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "x" * 50, "what ran has ended"
    assert got[-2] == "data: [DONE]"
    assert process.ends() == 0


def test_what_does_not_end_in_time_is_told(launch, model):
    process = launch(model(step_s=0.02), "--port", 0, "--shutdown-timeout", "0.2")
    url = process.wait_for("ready:").split()[1]
    got, thread = stream(url, 2000)
    while not got:
        time.sleep(0.01)
    process.popen.send_signal(signal.SIGINT)
    assert process.ends() == 0
    thread.join()
    assert "the server is shutting down" in got[-4]
    assert got[-2] == "data: [DONE]"


def test_stop_before_the_first_request(launch, model):
    process = launch(model(), "--port", 0)
    process.wait_for("ready:")
    process.popen.send_signal(signal.SIGTERM)
    assert process.ends() == 0
    assert [line for line in process.lines if "ERROR" in line or "Traceback" in line] == []


def test_a_second_signal_does_not_wait(launch, model):
    process = launch(model(step_s=0.02), "--port", 0)
    url = process.wait_for("ready:").split()[1]
    threading.excepthook, hook = lambda args: None, threading.excepthook  # the stream will break
    try:
        got, thread = stream(url, 2000)
        while not got:
            time.sleep(0.01)
        process.popen.send_signal(signal.SIGTERM)
        process.wait_for("shutting down")
        process.popen.send_signal(signal.SIGTERM)
        assert process.ends() == 128 + signal.SIGTERM
        thread.join()
    finally:
        threading.excepthook = hook


def test_a_signal_while_loading(launch, model):
    port = free_port()
    process = launch(model(load_s=60), "--port", port)
    wait_for_port(port)
    process.popen.send_signal(signal.SIGTERM)
    assert process.ends() == 128 + signal.SIGTERM
    assert process.lines == ["stopped while loading\n"]


def test_a_busy_port_is_one_sentence_and_no_model_is_loaded(launch, model):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        process = launch(model(load_s=60), "--port", port)
        assert process.ends() == 1
    assert process.lines == [f"error: cannot listen on port {port} on 127.0.0.1: Address already in use\n"]


def test_a_model_that_does_not_load(launch, model):
    process = launch(model(error="config.json has layers is 0, it must be at least 1"), "--port", 0)
    assert process.ends() == 1
    assert process.lines == ["error: config.json has layers is 0, it must be at least 1\n"]


def test_tls_files_are_read_before_the_model(launch, model, tmp_path):
    (tmp_path / "cert").write_text("no certificate")
    process = launch(model(load_s=60), "--ssl-keyfile", tmp_path / "cert", "--ssl-certfile", tmp_path / "cert")
    assert process.ends() == 1
    assert len(process.lines) == 1
    assert process.lines[0].startswith("error: --ssl-certfile or --ssl-keyfile cannot be used")


def test_a_unix_socket(launch, model, tmp_path):
    path = tmp_path / "socket"
    for _ in range(2):  # what a killed server leaves behind is no obstacle
        process = launch(model(), "--uds", path)
        process.wait_for("ready:")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://x/health").status_code == 200
        process.popen.kill()
        process.ends()


def test_the_engine_knows_the_names_of_the_options():
    sizes = pytest.importorskip("qwen_spmd.serve.sizes", reason="needs jax")
    ours = {field.metadata["engine"] for field in dataclasses.fields(ServeArgs)} - {None}
    assert ours <= {field.name for field in dataclasses.fields(sizes.EngineConfig)}


def test_model_folders(tmp_path):
    assert model_folder(str(tmp_path)) == tmp_path
    assert model_folder(None).name == "model"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "model is './nowhere': there is no such folder"),
        ("nowhere", "model is 'nowhere': there is no such folder, and a Hugging Face id looks like owner/name"),
        (__file__, "which is a file"),
        ("owner/spaces in it", "Hugging Face does not give it"),
    ],
)
def test_no_model(name, message):
    with pytest.raises(ValueError, match=message):
        model_folder(name)
