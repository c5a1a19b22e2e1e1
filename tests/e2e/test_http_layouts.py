# SPDX-License-Identifier: Apache-2.0
"""Load over HTTP on attention-DP=8 with MoE-EP=8: every answer is that of one device, aborts included."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from qwen_spmd import LLM, SamplingParams

PROMPTS = ["Once upon a time 0", "12 + 30 = 1", "A 2", "The day after 3", "Sort: 3 1 2 4"]
TOKENS = 12
LAYOUT = "--data-parallel-size 8 --enable-expert-parallel --moe-route gather_scatter"
LIMITS = "--max-num-seqs 64 --max-num-batched-tokens 256 --max-model-len 128 --block-size 16 --max-num-queued-reqs 256"
OPTIONS = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}]


@pytest.fixture(scope="module")
def expected():
    """The text of each prompt with each of OPTIONS, on one device."""
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128, "block_size": 16}
    out = {}
    with LLM(dtype="float32", compilation_cache=None, progress=False, **sizes) as llm:
        for n, options in enumerate(OPTIONS):
            params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **options)
            answers = llm.generate(PROMPTS, params)
            out |= {(i, n): answer.text for i, answer in enumerate(answers)}
    return out


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dp_ep")
    words = f"--port 0 --dtype float32 --served-model-name demo {LAYOUT} {LIMITS} --disable-log-requests".split()
    command = [sys.executable, "-m", "qwen_spmd.serve", *words, "--compilation-cache-dir", str(folder / "programs")]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}  # with the eight devices of XLA_FLAGS
    log = folder / "log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env) as server,
    ):
        assert server.stdout is not None
        ready = server.stdout.readline()
        assert ready.startswith("ready: "), log.read_text()
        yield ready.split()[1].removesuffix("/v1")
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0, log.read_text()
        assert "mesh         ep=8" in log.read_text()


def metric(url, name):
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            if sample.name == name:
                yield sample.value


async def ask(client, which):
    """One answer, streamed; None for a client that leaves after its first piece."""
    prompt, n, leaves = which % len(PROMPTS), which % len(OPTIONS), which % 7 == 3
    body = {"model": "demo", "prompt": PROMPTS[prompt], "max_tokens": TOKENS, "ignore_eos": True, "top_p": 1.0}
    body |= {"top_k": 0, "stream": True, **OPTIONS[n]}
    text = ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            if leaves:
                return None
    return (prompt, n), text


@pytest.mark.parametrize("clients", [1, 7, 64, 200])
def test_every_client_gets_the_answer_of_one_device(url, expected, clients):
    async def load():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(ask(client, which) for which in range(clients)))

    answers = asyncio.run(load())
    assert sum(answer is None for answer in answers) == len(range(3, clients, 7))
    for answer in filter(None, answers):
        assert answer[1] == expected[answer[0]]

    async def empty():
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        for _ in range(200):  # what the last clients left behind is freed within a step
            if not any(value for name in names for value in metric(url, name)):
                return
            await asyncio.sleep(0.05)
        raise AssertionError([(name, *metric(url, name)) for name in names])

    asyncio.run(empty())
    assert list(metric(url, "qwen_spmd:compiles_after_ready_total")) == [0.0]
    assert list(metric(url, "qwen_spmd:rank_requests_running")) == [0.0] * 8
