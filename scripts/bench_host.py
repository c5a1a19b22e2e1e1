# SPDX-License-Identifier: Apache-2.0
"""What the host does in a step of running requests, in microseconds: `python scripts/bench_host.py --model DIR`.

Scheduling, packing and committing for a null model, and the dispatch of the compiled program.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
    parser.add_argument("--seqs", type=int, default=256, help="running requests")
    parser.add_argument("--window", type=int, default=8, help="decode iterations of a step")
    args = parser.parse_args()

    from qwen_spmd.serve.model_folder import model_folder

    args.model = str(model_folder(args.model))
    parts = host(args)
    for name, us in (parts | {"all": sum(parts.values())}).items():
        print(f"{name:10} {us:8.0f} us")


if __name__ == "__main__":
    main()
