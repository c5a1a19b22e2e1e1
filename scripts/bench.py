# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode speed of a model folder through the engine's loop: `python scripts/bench.py --model DIR`.

`--peer PYTHON` also runs transformers in that interpreter, on the same folder, shapes and number of threads, and prints
the ratios. `--host` measures instead what the host does in a step of `--seqs` running requests: scheduling, packing,
committing (with a null model in the place of the device) and the dispatch of the compiled program.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], int], object]
THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure(generate: Generate, args: argparse.Namespace) -> dict[str, float]:
    """Tokens/s. Prefill is the time of one new token, decode what the others add to it; medians over fresh prompts."""
    rng, speeds = random.Random(0), {}
    for batch in args.batch:

        def seconds(new: int, batch: int = batch) -> float:
            prompts = [[rng.randrange(args.vocab) for _ in range(args.prompt)] for _ in range(batch)]
            start = time.perf_counter()
            generate(prompts, new)
            return time.perf_counter() - start

        runs = [(seconds(1), seconds(args.new)) for _ in range(args.repeats + 1)][1:]  # the first warms up
        speeds[f"prefill, batch {batch}"] = batch * args.prompt / statistics.median(one for one, _ in runs)
        speeds[f"decode, batch {batch}"] = batch * (args.new - 1) / statistics.median(n - one for one, n in runs)
    return speeds


def ours(args: argparse.Namespace) -> dict[str, float]:
    from qwen_spmd import LLM, SamplingParams

    sizes = {"max_num_seqs": max(args.batch), "max_model_len": args.prompt + args.new}
    with LLM(args.model, dtype=args.dtype, **sizes) as llm:
        greedy = lambda new: SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)  # noqa: E731
        return measure(lambda prompts, new: llm.generate(prompts, greedy(new)), args)


def peer(args: argparse.Namespace) -> dict[str, float]:
    """Runs in the peer's interpreter. Of eager and fused attention the faster counts, figure by figure."""
    import torch  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM  # type: ignore[import-not-found]

    torch.set_num_threads(THREADS)
    dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
    best: dict[str, float] = {}
    for attention in ("eager", "sdpa"):
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation=attention).eval()

        def generate(prompts: list[list[int]], new: int, model: Any = model) -> None:
            ids = torch.tensor(prompts)
            options = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new}
            model.generate(ids, attention_mask=torch.ones_like(ids), **options)

        with torch.inference_mode():
            for name, speed in measure(generate, args).items():
                best[name] = max(best.get(name, 0.0), speed)
    return best


def host(args: argparse.Namespace) -> dict[str, float]:
    """Microseconds of the parts of a step in which every one of `--seqs` requests decodes."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from qwen_spmd import SamplingParams, params
    from qwen_spmd.config import load_config
    from qwen_spmd.mesh.axes import make_mesh
    from qwen_spmd.mesh.rules import SINGLE
    from qwen_spmd.serve.blocks import Blocks
    from qwen_spmd.serve.request import Request
    from qwen_spmd.serve.scheduler import Scheduler
    from qwen_spmd.serve.sizes import EngineConfig, choose
    from qwen_spmd.serve.step import Steps, to_batch

    cfg, mesh, B, length = load_config(Path(args.model)), make_mesh(), args.seqs, 256
    weights = jax.device_put(params.init(cfg, jnp.float32, jax.random.key(0)), NamedSharding(mesh, PartitionSpec()))
    limits = EngineConfig(max_num_seqs=B, max_model_len=length, decode_window=args.window)
    sizes = choose(cfg, weights, mesh.devices.flat[0], limits)
    shapes = dataclasses.replace(sizes.shapes, ragged=(), windows=(B,))  # the only program that runs here
    steps = Steps(cfg, weights, mesh, SINGLE, shapes, jnp.float32, jnp.float32)
    steps.compile(progress=False)
    scheduler = Scheduler(sizes.scheduler, Blocks(shapes.pages, shapes.page_size, shapes.slots))
    for i in range(B):
        scheduler.add(Request(id=str(i), prompt=[1], params=SamplingParams(ignore_eos=True), max_len=length))

    times: dict[str, list[float]] = {name: [] for name in ("schedule", "pack", "commit", "dispatch")}

    def timed(name: str, f: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = f()
        times[name].append(1e6 * (time.perf_counter() - start))
        return result

    tokens, windows = np.ones((B, args.window), np.int32), []  # what a null model samples
    while (plan := timed("schedule", scheduler.schedule)) is not None:
        if plan.iterations:
            windows.append(plan)
            timed("pack", lambda plan=plan: to_batch(plan))
        timed("commit", lambda plan=plan: scheduler.commit(plan, tokens))
    for plan in windows:
        # Without live rows the program ends at once, so that a device that works in this thread does not count.
        empty = dataclasses.replace(plan, kv_len_B=np.zeros_like(plan.kv_len_B))
        timed("dispatch", lambda empty=empty: steps.run(empty)).block_until_ready()
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a Hugging Face id; the demo that ships with the package if absent")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="requests at once")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=65, help="tokens that each request generates")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=5, help="runs of which the median counts")
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter with transformers and torch")
    parser.add_argument("--host", action="store_true", help="measure the host's part of a step instead")
    parser.add_argument("--seqs", type=int, default=256, help="running requests of --host")
    parser.add_argument("--window", type=int, default=8, help="decode iterations of a step of --host")
    parser.add_argument("--as-peer", metavar="JSON", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_peer:
        print(json.dumps(peer(argparse.Namespace(**json.loads(args.as_peer)))))
        return

    from qwen_spmd.config import load_config
    from qwen_spmd.serve.model_folder import model_folder

    args.model = str(model_folder(args.model))
    args.vocab = load_config(Path(args.model)).vocab_size
    if args.host:
        parts = host(args)
        for name, us in (parts | {"all": sum(parts.values())}).items():
            print(f"{name:10} {us:8.0f} us")
        return
    speeds, peers = ours(args), {}
    if args.peer:
        command = [args.peer, __file__, "--as-peer", json.dumps(vars(args))]
        peers = json.loads(
            subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
        )
    print(f"{'tokens/s':20} {'qwen_spmd':>12}" + (f" {'transformers':>12} {'ratio':>6}" if peers else ""))
    for name, speed in speeds.items():
        print(f"{name:20} {speed:12.1f}" + (f" {peers[name]:12.1f} {speed / peers[name]:6.2f}" if peers else ""))


if __name__ == "__main__":
    main()
