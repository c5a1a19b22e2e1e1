# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode speed of a model folder through the engine's loop: `python scripts/bench.py --model DIR`.

`--peer PYTHON` adds transformers in that interpreter, on the same folder and number of threads; all take turns at the
same prompts, so that they see the same state of the machine. `--host` measures instead what the host does in a step of
`--seqs` running requests: scheduling, packing, committing (for a null model) and the dispatch of the compiled program.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
Engine = Callable[[list[list[int]], int], float]
"""Seconds that it takes to continue each prompt by so many tokens, all at once."""


def measure(engines: dict[str, Engine], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Tokens/s. Prefill is the time of one new token, decode what the others add to it.

    The fastest of the runs counts: other work on the machine only ever adds. Prompts are fresh each time.
    """
    rng, speeds = random.Random(0), {}
    for batch in args.batch:
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for _ in range(args.repeats + 1):
            one, more = ([rng.choices(range(args.vocab), k=args.prompt) for _ in range(batch)] for _ in range(2))
            for name, seconds in engines.items():
                runs[name].append((seconds(one, 1), seconds(more, args.new)))
        # The first run warms up.
        prefill, both = ({name: min(run[i] for run in r[1:]) for name, r in runs.items()} for i in range(2))
        speeds[f"prefill, batch {batch}"] = {name: batch * args.prompt / s for name, s in prefill.items()}
        speeds[f"decode, batch {batch}"] = {
            name: batch * (args.new - 1) / (s - prefill[name]) for name, s in both.items()
        }
    return speeds


@contextlib.contextmanager
def ours(args: argparse.Namespace) -> Iterator[Engine]:
    from qwen_spmd import LLM, SamplingParams

    sizes = {"max_num_seqs": max(args.batch), "max_model_len": args.prompt + args.new}
    with LLM(args.model, dtype=args.dtype, **sizes) as llm:

        def seconds(prompts: list[list[int]], new: int) -> float:
            start = time.perf_counter()
            llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True))
            return time.perf_counter() - start

        yield seconds


@contextlib.contextmanager
def peer(args: argparse.Namespace, attention: str) -> Iterator[Engine]:
    """This file in another interpreter, see `serve_peer`. A line of JSON goes in, the seconds come out."""
    command = [args.peer, __file__, "--as-peer", args.model, args.dtype, attention]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout

        def seconds(prompts: list[list[int]], new: int) -> float:
            print(json.dumps([prompts, new]), file=process.stdin, flush=True)
            return float(process.stdout.readline())  # type: ignore[union-attr]

        yield seconds
        process.stdin.close()


def serve_peer(folder: str, dtype: str, attention: str) -> None:
    """transformers, one generate() for each line of stdin."""
    import torch  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM  # type: ignore[import-not-found]

    torch.set_num_threads(THREADS)
    kind = dtype if dtype == "auto" else getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, attn_implementation=attention).eval()
    for line in sys.stdin:
        prompts, new = json.loads(line)
        ids, start = torch.tensor(prompts), time.perf_counter()
        options = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new}
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        print(time.perf_counter() - start, flush=True)


def host(args: argparse.Namespace) -> dict[str, float]:
    """Microseconds of the parts of a step in which every one of `--seqs` requests decodes."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from qwen_spmd import SamplingParams, params
    from qwen_spmd.config import load_config
    from qwen_spmd.mesh.axes import make_mesh
    from qwen_spmd.mesh.rules import SINGLE
    from qwen_spmd.serve.blocks import Blocks
    from qwen_spmd.serve.packed import pack
    from qwen_spmd.serve.request import Request
    from qwen_spmd.serve.scheduler import Scheduler
    from qwen_spmd.serve.sizes import EngineConfig, choose
    from qwen_spmd.serve.step import Steps

    cfg, mesh, B, length = load_config(Path(args.model)), make_mesh(), args.seqs, 256
    weights = params.place(params.init(cfg, jnp.float32, jax.random.key(0)), cfg, mesh, SINGLE)
    limits = EngineConfig(max_num_seqs=B, max_model_len=length, decode_window=args.window)
    sizes = choose(cfg, weights, mesh.devices.flat[0], SINGLE, limits)
    shapes = dataclasses.replace(sizes.shapes, ragged=(), windows=(B,))  # the only program that runs here
    steps = Steps(cfg, weights, mesh, SINGLE, shapes, jnp.float32, jnp.float32)
    steps.compile(progress=False)
    scheduler = Scheduler(sizes.scheduler, [Blocks(shapes.pages, shapes.page_size, shapes.slots)])
    for i in range(B):
        scheduler.add(Request(id=str(i), prompt=[1], params=SamplingParams(ignore_eos=True), max_len=length))

    times: dict[str, list[float]] = {name: [] for name in ("schedule", "pack", "commit", "dispatch")}

    def timed(name: str, f: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = f()
        times[name].append(1e6 * (time.perf_counter() - start))
        return result

    tokens, windows = np.ones((1, B, args.window), np.int32), []  # what a null model samples
    while (plan := timed("schedule", scheduler.schedule)) is not None:
        if plan.iterations:
            windows.append(plan)
            timed("pack", lambda plan=plan: pack(plan))
        timed("commit", lambda plan=plan: scheduler.commit(plan, tokens))
    for plan in windows:
        # Without live rows the program ends at once, so that a device that works in this thread does not count.
        empty = pack(dataclasses.replace(plan, kv_len_B=np.zeros_like(plan.kv_len_B)))
        timed("dispatch", lambda empty=empty: steps.run(empty)).block_until_ready()
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a Hugging Face id; the demo that ships with the package if absent")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="requests at once")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=65, help="tokens that each request generates")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=5, help="runs of which the fastest counts")
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter with transformers and torch")
    parser.add_argument("--host", action="store_true", help="measure the host's part of a step instead")
    parser.add_argument("--seqs", type=int, default=256, help="running requests of --host")
    parser.add_argument("--window", type=int, default=8, help="decode iterations of a step of --host")
    parser.add_argument("--as-peer", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_peer:
        serve_peer(*args.as_peer)
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
    with contextlib.ExitStack() as stack:
        engines = {"qwen_spmd": stack.enter_context(ours(args))}
        for attention in ("eager", "sdpa") if args.peer else ():
            engines[f"transformers, {attention}"] = stack.enter_context(peer(args, attention))
        speeds = measure(engines, args)
    print(f"| {'tokens/s':18} | " + " | ".join(f"{name:>19}" for name in engines) + " |" + " ratio |" * bool(args.peer))
    print("|---" * (1 + len(engines) + bool(args.peer)) + "|")
    for figure, speed in speeds.items():
        mine, *theirs = speed.values()
        cells = [
            f"{figure:18}",
            *(f"{s:19.1f}" for s in (mine, *theirs)),
            *(f"{mine / max(theirs):5.2f}" for _ in theirs[:1]),
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
