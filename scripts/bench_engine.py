# SPDX-License-Identifier: Apache-2.0
"""An engine to measure: of a model folder, or of a model's published sizes with random weights. Not a script."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from qwen_spmd import SamplingParams, params
from qwen_spmd.config import load_config
from qwen_spmd.mesh.axes import make_mesh
from qwen_spmd.mesh.rules import layout
from qwen_spmd.plan.presets import model_config
from qwen_spmd.serve.engine import Engine
from qwen_spmd.serve.model_folder import model_folder
from qwen_spmd.serve.request import Request
from qwen_spmd.serve.scheduler import Output
from qwen_spmd.serve.sizes import EngineConfig

Run = Callable[[list[list[int]], int], None]
"""Continue each prompt by so many tokens, all at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a folder or a Hugging Face id; the demo that ships with the package if absent")
    parser.add_argument("--random", metavar="NAME", help="random weights in the sizes of this model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="requests at once")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=65, help="tokens that each request generates")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--window", type=int, default=8, help="decode iterations of a step")
    parser.add_argument("--step-tokens", type=int, help="most tokens of a step")
    for axis in ("dp", "ep", "tp"):
        parser.add_argument(f"--{axis}", type=int, default=1)


def prepare(args: argparse.Namespace) -> None:
    """Find the model and its vocabulary."""
    if args.random:
        args.vocab = model_config(args.random).vocab_size
    else:
        args.model = str(model_folder(args.model))
        args.vocab = load_config(Path(args.model)).vocab_size


@contextlib.contextmanager
def engine(args: argparse.Namespace) -> Iterator[Any]:
    """A `Run`; its `engine` is the Engine."""
    config = EngineConfig(
        dtype=args.dtype,
        max_num_seqs=max(args.batch),
        max_model_len=args.prompt + args.new,
        max_num_batched_tokens=args.step_tokens,
        decode_window=args.window,
        dp=args.dp,
        ep=args.ep,
        tp=args.tp,
    )
    made = random_engine(args.random, config) if args.random else Engine.load(Path(args.model), config)
    finished: queue.SimpleQueue[str] = queue.SimpleQueue()

    def deliver(outputs: list[Output]) -> None:
        for output in outputs:
            if output.finish_reason:
                finished.put(output.request.id)

    made.deliver = deliver
    names = itertools.count()

    def run(prompts: list[list[int]], new: int) -> None:
        greedy = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        for prompt in prompts:
            made.submit(Request(id=str(next(names)), prompt=prompt, params=greedy, max_len=len(prompt) + new))
        for _ in prompts:
            finished.get()

    run.engine = made  # type: ignore[attr-defined]
    try:
        yield run
    finally:
        made.stop()


def random_engine(name: str, config: EngineConfig) -> Engine:
    cfg = model_config(name)
    dtype = cfg.dtype if config.dtype == "auto" else config.dtype
    mesh, lay = make_mesh(config.dp, config.ep, config.tp), layout(cfg.dims(), dp=config.dp, ep=config.ep, tp=config.tp)
    return Engine(cfg, random_weights(params.declare(cfg, dtype, lay), mesh, lay), config)


def random_weights(declared: params.Params, mesh: jax.sharding.Mesh, lay: Any) -> params.Params:
    """Made where they are used, a layer at a time: the largest stacks are a third of a device's memory."""

    def make(leaf: params.Leaf, i: int) -> jax.Array:
        def draw() -> jax.Array:
            if leaf.init != "normal":
                return params._init_leaf(leaf, jax.random.key(i))
            scale = params._fan_in(leaf) ** -0.5
            keys = jax.random.split(jax.random.key(i), leaf.shape[0] if leaf.dims[0] == "L" else 1)
            one = lambda k: jax.random.uniform(k, leaf.shape[1:], leaf.dtype, -1.7 * scale, 1.7 * scale)  # noqa: E731
            if leaf.dims[0] == "L":
                return jax.lax.map(one, keys)
            return jax.random.uniform(keys[0], leaf.shape, leaf.dtype, -1.7 * scale, 1.7 * scale)

        return jax.jit(draw, out_shardings=NamedSharding(mesh, lay.spec(leaf.dims)))()

    leaves, tree = jax.tree.flatten(declared)
    return jax.tree.unflatten(tree, [make(leaf, i) for i, leaf in enumerate(leaves)])
