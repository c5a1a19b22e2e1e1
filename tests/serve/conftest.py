# SPDX-License-Identifier: Apache-2.0
"""A live server with a scripted engine behind it, for tests of the HTTP side. No model, no jax."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
import tokenizers
import uvicorn
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from qwen_spmd.serve.args import parse
from qwen_spmd.serve.http import build_app
from qwen_spmd.serve.request import Request
from qwen_spmd.serve.scheduler import Output, QueueFull
from qwen_spmd.serve.tokenizer import Tokenizer

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)


def make_folder(folder: Path) -> Path:
    """A model folder without a model: every byte is a token, and so is what a chat needs."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(CONTROL)
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20}))
    return folder


@dataclasses.dataclass
class Stats:
    running: int = 0
    waiting: int = 0
    running_by_rank: tuple[int, ...] = (2, 1)
    tokens_by_rank: tuple[int, ...] = (40, 30)
    rank_imbalance: float = 1.5
    expert_imbalance: float = 1.25
    kv_usage: float = 0.25
    slot_usage: float = 0.5
    step_age_s: float = 0.0
    steps: int = 7
    preemptions: int = 6
    compiles: int = 5
    compiles_after_ready: int = 0
    scheduled_tokens: int = 70
    padding_tokens: int = 30
    alive: bool = True
    error: str | None = None


class FakeEngine:
    """Answers with what `script` says a request gets, `window` tokens a step, on a thread of its own.

    hold      requests wait and nothing is generated while this is set
    requests  all that were submitted; `aborted`: (id, reason) of those that were ended from outside
    """

    max_model_len, vocab_size = 256, 300

    def __init__(self) -> None:
        self.deliver = lambda outputs: None
        self.script = lambda request: []
        self.window = 1
        self.hold = threading.Event()
        self.capacity = 64
        self.requests: list[Request] = []
        self.aborted: list[tuple[str, str]] = []
        self.facts = Stats()
        self._lock = threading.Lock()
        self._live: dict[str, tuple[Request, list[int]]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, folder: Path, config: dict) -> FakeEngine:
        """For the server as a process: answers with `answer`, after `load_s`, in steps of `step_s` seconds."""
        options = json.loads((folder / "fake.json").read_text())
        if "error" in options:
            raise ValueError(options["error"])
        time.sleep(options.get("load_s", 0))
        engine = cls()
        answer = Tokenizer.load(folder).encode(options.get("answer", "ok"))
        engine.script = lambda request: answer * 1000
        engine.step_s = options.get("step_s", 0)
        return engine

    step_s = 0.0

    def submit(self, request: Request) -> None:
        with self._lock:
            if not self.facts.alive:
                raise RuntimeError(self.facts.error)
            if len(self._live) >= self.capacity:
                raise QueueFull(f"{len(self._live)} requests wait")
            self.requests.append(request)
            self._live[request.id] = (request, list(self.script(request)))

    def abort(self, request_id: str, reason: str = "abort") -> None:
        with self._lock:
            live = self._live.pop(request_id, None)
            self.aborted.append((request_id, reason))
        if live is not None:
            self.deliver([Output(live[0], [], reason)])

    def stats(self) -> Stats:
        return self.facts

    def die(self, error: str, *, silently: bool = False) -> None:
        with self._lock:
            self.facts = Stats(alive=False, error=error)
            ended = [Output(request, [], "error") for request, _ in self._live.values()]
            self._live.clear()
        if not silently:
            self.deliver(ended)

    def drain(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while self._live and time.monotonic() < end:
            time.sleep(0.01)
        with self._lock:
            ended = [Output(request, [], "abort") for request, _ in self._live.values()]
            self._live.clear()
        self.deliver(ended)
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                outputs = [] if self.hold.is_set() else [self._step(*live) for live in list(self._live.values())]
            if outputs:
                self.deliver(outputs)
            time.sleep(self.step_s or 0.0005)

    def _step(self, request: Request, left: list[int]) -> Output:
        now = time.monotonic()
        request.first_scheduled = request.first_scheduled or now
        request.first_token = request.first_token or now
        new, reason = [], None
        for token in left[: self.window]:
            new.append(token)
            stops = token in request.stop_ids and len(request.output) + len(new) > request.params.min_tokens
            full = len(request.prompt) + len(request.output) + len(new) >= request.max_len
            if stops or full:
                reason = "stop" if stops else "length"
                break
        del left[: len(new)]
        request.output += new
        if reason is not None:
            request.finished = now
            del self._live[request.id]
        return Output(request, new, reason)


class Live:
    """A server on a port of this machine, and clients for it."""

    def __init__(self, url: str, engine: FakeEngine, tokenizer: Tokenizer, app, server: uvicorn.Server) -> None:
        self.url, self.engine, self.tokenizer, self.app, self.server = url, engine, tokenizer, app, server
        import openai  # not above: what runs the engine in a process of its own needs no client

        self.http = httpx.Client(base_url=url, timeout=10)
        self.openai = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=10)

    def says(self, text: str, *, end: str = "<|im_end|>", window: int = 1) -> None:
        """From now on every request is answered with this text."""
        ids = self.tokenizer.encode(text + end)
        self.engine.script, self.engine.window = lambda request: ids, window

    def wait(self, true, seconds: float = 5.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.005)


@contextlib.contextmanager
def running(folder: Path, *argv: str):
    engine, tokenizer = FakeEngine(), Tokenizer.load(folder)
    app = build_app(engine, tokenizer, parse(["--served-model-name", "tiny", "alias", *argv]))
    sock = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", ws="none"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), daemon=True)
    thread.start()
    live = Live(f"http://127.0.0.1:{sock.getsockname()[1]}", engine, tokenizer, app, server)
    try:
        live.wait(lambda: server.started)
        yield live
    finally:
        live.http.close()
        live.openai.close()
        server.force_exit = server.should_exit = True
        thread.join(10)
        engine.stop()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(folder):
    """Start a server with flags of one's own."""
    with contextlib.ExitStack() as stack:
        yield lambda *argv: stack.enter_context(running(folder, *argv))


@pytest.fixture(scope="module")
def shared(folder):
    with running(folder) as live:
        yield live


@pytest.fixture
def live(shared):
    """The server that tests share, as if it were new."""
    shared.says("Hello!")
    shared.engine.hold.clear()
    shared.engine.requests.clear()
    shared.engine.aborted.clear()
    shared.engine.facts = Stats()
    yield shared
    shared.wait(lambda: not shared.app.state.front.busy)
