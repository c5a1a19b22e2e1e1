# SPDX-License-Identifier: Apache-2.0
"""A very small hybrid MoE with random weights, engines over it, and a way to run requests to their end."""

import functools
import queue
import random

import jax
import jax.numpy as jnp
import pytest

from qwen_spmd import params
from qwen_spmd.config import from_hf
from qwen_spmd.mesh.axes import make_mesh
from qwen_spmd.serve.engine import Engine
from qwen_spmd.serve.request import Request, SamplingParams
from qwen_spmd.serve.sizes import EngineConfig, make_layout

VOCAB = 128
HF_CONFIG = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "dtype": "float32",
}


@functools.cache
def model():
    cfg = from_hf(HF_CONFIG)
    weights = jax.jit(lambda key: params.init(cfg, jnp.float32, key))(jax.random.key(0))
    # Larger embeddings than at the start of a training, so that the next token depends on the text.
    weights = weights.replace(embed=weights.embed * 50, lm_head=weights.lm_head * 50)
    return cfg, weights


class Harness:
    """An engine whose outputs are collected; `run` is one request after another or all at once."""

    def __init__(self, **options):
        sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 16, "decode_window": 4}
        config = EngineConfig(**(sizes | {"compilation_cache": None, "progress": False} | options))
        cfg, weights = model()
        mesh = make_mesh(config.dp, config.ep, config.tp)
        self.engine = Engine(cfg, params.place(weights, cfg, mesh, make_layout(cfg, config)), config)
        self.engine.deliver = self._deliver
        self.events = queue.SimpleQueue()
        self.ended = {}
        self.streamed = {}

    def _deliver(self, outputs):
        for output in outputs:
            self.events.put(output)

    def submit(self, request):
        self.engine.submit(request)

    def wait(self, ids, timeout=60):
        """Until all of these have ended. Returns {id: (tokens, finish reason)}, tokens as they were delivered."""
        while not set(ids) <= set(self.ended):
            output = self.events.get(timeout=timeout)
            self.streamed.setdefault(output.request.id, []).extend(output.tokens)
            if output.finish_reason is not None:
                assert output.request.id not in self.ended, "a request ended twice"
                self.ended[output.request.id] = output.finish_reason
        return {id: (self.streamed.get(id, []), self.ended[id]) for id in ids}

    def run(self, requests, *, together=True):
        if together:
            for r in requests:
                self.submit(r)
            return self.wait([r.id for r in requests])
        out = {}
        for r in requests:
            self.submit(r)
            out |= self.wait([r.id])
        return out

    def free(self):
        blocks = self.engine._scheduler.blocks
        for of_rank in blocks:
            of_rank.check([])
        return [(of_rank.free_pages, of_rank.free_slots) for of_rank in blocks]

    def close(self):
        self.engine.stop()


@pytest.fixture
def harness():
    made = []

    def make(**options):
        made.append(Harness(**options))
        return made[-1]

    yield make
    for h in made:
        h.close()


@pytest.fixture
def make_request():
    def make(id, prompt, **params):
        p = SamplingParams(**params)
        stop_ids = tuple(p.stop_token_ids)
        limit = len(prompt) + (p.max_tokens or 16)
        return Request(id=id, prompt=prompt, params=p, stop_ids=stop_ids, seed=p.seed or 0, max_len=limit)

    return make


@pytest.fixture
def mixed(make_request):
    """64 requests of mixed lengths: greedy and seeded, with and without stop ids."""

    def make(count=64):
        rng = random.Random(0)
        out = []
        for i in range(count):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 3, 5, 17, 33, 70, 120]))]
            options = {"max_tokens": rng.choice([1, 2, 7, 20, 45])}
            if i % 2:
                options |= {
                    "temperature": 0.8,
                    "seed": i,
                    "top_p": rng.choice([0.9, 1.0]),
                    "top_k": rng.choice([0, 10]),
                }
            else:
                options |= {"temperature": 0.0}
            if i % 3 == 0:
                options["stop_token_ids"] = tuple(rng.sample(range(VOCAB), 6))
                options["min_tokens"] = min(options["max_tokens"], rng.choice([0, 3]))
            out.append(make_request(f"r{i}", prompt, **options))
        return out

    return make
