# SPDX-License-Identifier: Apache-2.0
"""The server as people use it: its own process with the demo model, asked by OpenAI's client."""

import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

CONTEXT = 512
FLAGS = {
    "port": 0,
    "served-model-name": "demo",
    "dtype": "float32",  # so that sums in another order choose the same tokens
    "max-model-len": CONTEXT,
    "max-num-seqs": 8,
    "max-num-batched-tokens": 64,
}
# Long and varied, whatever the model knows.
RANDOM = {"temperature": 2.0, "top_p": 1.0, "max_tokens": 32, "extra_body": {"top_k": 0, "ignore_eos": True}}


class Server:
    def __init__(self, url):
        self.http = httpx.Client(base_url=url)
        self.openai = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)

    def chat(self, text="What is 12 + 30?", **options):
        messages = [{"role": "user", "content": text}]
        return self.openai.chat.completions.create(model="demo", messages=messages, **options)

    def complete(self, prompt="Once upon a time", **options):
        return self.openai.completions.create(model="demo", prompt=prompt, **options)

    def metric(self, name, **labels):
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and sample.labels.items() >= labels.items():
                    return sample.value
        raise AssertionError(f"no {name}")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One for all tests here. After them, nothing was compiled for them, and a signal ends it with 0."""
    folder = tmp_path_factory.mktemp("server")
    flags = [str(word) for name, value in FLAGS.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "qwen_spmd.serve", *flags, "--compilation-cache-dir", str(folder / "programs")]
    log = folder / "log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        patience = threading.Timer(180, process.kill)
        patience.start()
        try:
            first = process.stdout.readline()
            assert first.startswith("ready: http://"), log.read_text()
            patience.cancel()
            server = Server(first.split()[1].removesuffix("/v1"))
            with server.http, server.openai:
                yield server
                assert server.metric("qwen_spmd:compiles_after_ready_total") == 0
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, log.read_text()
            assert "Traceback" not in log.read_text()
        finally:
            patience.cancel()
            process.kill()


def test_chat(server):
    answer = server.chat(temperature=0)
    (choice,) = answer.choices
    assert answer.model == "demo"
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens
    assert min(usage.prompt_tokens, usage.completion_tokens) > 0


def test_chat_stream_is_the_plain_answer(server):
    plain = server.chat(seed=1, **RANDOM)
    *chunks, last = server.chat(seed=1, stream=True, stream_options={"include_usage": True}, **RANDOM)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == plain.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    assert last.choices == [] and last.usage.total_tokens == plain.usage.total_tokens


def test_completion_stream_is_the_plain_answer(server):
    plain = server.complete(seed=1, **RANDOM)
    chunks = list(server.complete(seed=1, stream=True, **RANDOM))
    assert len(chunks) > 2
    assert "".join(c.choices[0].text for c in chunks) == plain.choices[0].text != ""


def test_seeds(server):
    texts = [server.complete(seed=seed, **RANDOM).choices[0].text for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    assert server.complete(**RANDOM).choices[0].text != server.complete(**RANDOM).choices[0].text


def test_two_choices(server):
    answer = server.complete(seed=1, n=2, **RANDOM)
    first, second = sorted(answer.choices, key=lambda choice: choice.index)
    assert (first.index, second.index) == (0, 1)
    assert first.text == server.complete(seed=1, **RANDOM).choices[0].text != second.text
    assert answer.usage.completion_tokens == 64


def test_many_prompts(server):
    prompts = ["One", "Two, three"]
    answer = server.complete(prompts, seed=1, **RANDOM)
    assert [choice.text for choice in answer.choices] == [
        server.complete(prompt, seed=1, **RANDOM).choices[0].text for prompt in prompts
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(server, stream):
    full = server.complete(seed=1, **RANDOM).choices[0].text
    stop = re.search(r"(?<=.{5})[!-~]{3}", full, re.DOTALL).group()
    options = RANDOM | {"stop": ["never in it", stop], "max_tokens": CONTEXT - 20}
    answer = server.complete(seed=1, stream=stream, **options)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == full[: full.index(stop)]
    assert choices[-1].finish_reason == "stop"
    assert server.metric("vllm:num_requests_running") == 0


def test_max_tokens(server):
    answer = server.chat(max_tokens=5, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5


def test_the_context_is_the_most(server):
    answer = server.complete([5] * (CONTEXT - 3), max_tokens=100, extra_body={"ignore_eos": True})
    assert (answer.choices[0].finish_reason, answer.usage.total_tokens) == ("length", CONTEXT)
    with pytest.raises(openai.BadRequestError, match=f"prompt has {CONTEXT} tokens") as caught:
        server.complete([5] * CONTEXT)
    assert caught.value.code == "context_length_exceeded"


def test_an_unknown_model(server):
    with pytest.raises(openai.NotFoundError, match="model is 'other', it must be 'demo'"):
        server.openai.completions.create(model="other", prompt="Hi")
    assert [model.id for model in server.openai.models.list()] == ["demo"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"extra_body": {"tempreature": 1}}, "tempreature"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
    ],
)
def test_a_wrong_field_is_named(server, options, param):
    steps = server.metric("qwen_spmd:steps_total")
    with pytest.raises(openai.BadRequestError, match=param) as caught:
        server.chat(**options)
    assert caught.value.param == param
    assert server.metric("qwen_spmd:steps_total") == steps


def test_sixteen_at_once_are_what_each_is_alone(server):
    """Twice as many as run at once, with prompts from a few tokens to several chunks."""

    def ask(i):
        options = RANDOM | {"temperature": 0 if i % 2 else 2.0, "max_tokens": 4 + 2 * i}
        return server.chat("Tell me a story. " * (1 + 4 * (i % 4)), seed=i, **options).choices[0].message.content

    alone = [ask(i) for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == alone


def test_a_client_that_leaves_frees_its_place(server):
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")
    with server.complete(stream=True, **RANDOM | {"max_tokens": CONTEXT - 20}) as stream:
        next(iter(stream))
        assert server.metric("vllm:num_requests_running") == 1
    steps, end = server.metric("qwen_spmd:steps_total"), time.monotonic() + 10
    while server.metric("vllm:num_requests_running"):
        assert time.monotonic() < end
    # To its end it would take more than 50 of 8 tokens each.
    assert server.metric("qwen_spmd:steps_total") - steps < 20
    assert server.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1
    assert server.metric("vllm:kv_cache_usage_perc") == server.metric("qwen_spmd:recurrent_slot_usage_perc") == 0


def test_health(server):
    assert server.http.get("/health").json()["status"] == "ok"
    assert server.http.get("/ready").json() == {"status": "ready"}


def test_metrics(server):
    before = server.metric("vllm:generation_tokens_total")
    server.chat(**RANDOM)
    assert server.metric("vllm:generation_tokens_total") == before + RANDOM["max_tokens"]
    assert server.metric("qwen_spmd:compiles_total") > 0
