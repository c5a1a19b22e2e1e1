# SPDX-License-Identifier: Apache-2.0
"""Where a decode step's time goes on a GPU: `python scripts/profile_step.py --random qwen3.5-35b-a3b --batch 64`.

For each number of requests: milliseconds of a decode iteration, the device's share of it, and that of each block of the
model and of the busiest kernels, from the profiler's trace of some windows after a warm-up.
"""

from __future__ import annotations

import argparse
import collections
import random
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from bench_engine import add_arguments, engine, prepare

BLOCKS = ("attention", "gated_delta", "moe", "mlp", "unembed", "sample")

OF_OPS = {
    "paged_attention": "attention",
    "gated_delta": "gated_delta",
    "router": "moe",
    "expert_sort": "moe",
    "expert_sum": "moe",
    "grouped_mlp": "moe",
    "linear": "linear",
    "add_norm": "add_norm",
}
"""How names of our own kernels begin, which no scope comes with, and what they count as: blocks, or themselves where
several blocks have them."""


def blocks_of(programs: dict[Any, Any]) -> dict[str, str]:
    """Kernel name -> block, from the scopes in the compiled programs' metadata."""
    found = {}
    for program in programs.values():
        for name, scope in re.findall(r"%([\w.\-]+) = .*op_name=\"([^\"]*)\"", program.as_text()):
            parts = scope.split("/")
            found[re.sub(r"[.\-]", "_", name)] = next((b for b in BLOCKS if b in parts), "other")
    return found


def kernels(trace: Path) -> list[tuple[float, float, str, dict[str, Any]]]:
    """(start, duration, name, stats) of what ran on the first GPU, in ns."""
    file = next(trace.rglob("*.xplane.pb"))
    out = []
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if not plane.name.startswith("/device:GPU:0"):
            continue
        for line in plane.lines:
            if "Stream" in line.name:
                out += [(e.start_ns, e.duration_ns, e.name, dict(e.stats)) for e in line.events]
    return sorted(out, key=lambda e: e[0])


def report(events: list, blocks: dict[str, str], iterations: int, wall_ms: float) -> None:
    busy, end = 0.0, 0.0
    by_block, by_kernel, count = collections.Counter(), collections.Counter(), collections.Counter()
    for start, duration, name, stats in events:
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
        op = str(stats.get("hlo_op", name))
        key = re.sub(r"[.\-]", "_", op)
        ours = next((block for op, block in OF_OPS.items() if name.startswith(op)), None)
        block = ours or blocks.get(key) or blocks.get(re.sub(r"[.\-]", "_", name)) or "other"
        kind = f"{block}: {re.sub(r'[_.]?[0-9]+', '', name)[:60]}"
        by_block[block] += duration
        by_kernel[kind] += duration
        count[kind] += 1
    if not events:
        print("the trace holds no kernels")
        return
    span, busy = ((events[-1][0] + events[-1][1] - events[0][0]) / 1e6 / iterations, busy / 1e6 / iterations)
    print(f"  {wall_ms:.2f} ms an iteration; in the trace {span:.2f}: busy {busy:.2f}, idle {span - busy:.2f}")
    print(f"  {len(events) / iterations:.0f} kernels an iteration")
    for name, ns in by_block.most_common():
        print(f"  {name:14} {ns / 1e6 / iterations:7.3f} ms  {100 * ns / sum(by_block.values()):5.1f} %")
    for name, ns in by_kernel.most_common(40):
        print(f"    {ns / 1e3 / iterations:9.1f} us  {count[name] / iterations:6.1f} times  {name}")


def memory() -> dict[str, int]:
    return jax.local_devices()[0].memory_stats() or {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--trace", type=Path, help="keep the trace in this folder")
    args = parser.parse_args()
    prepare(args)
    rng = random.Random(0)
    with engine(args) as run:
        blocks = blocks_of(run.engine._steps._programs)
        for batch in args.batch:
            prompts = [rng.choices(range(args.vocab), k=args.prompt) for _ in range(batch)]

            def seconds(new: int, prompts: list[list[int]] = prompts) -> float:
                start = time.perf_counter()
                run(prompts, new)
                return time.perf_counter() - start

            seconds(args.new)
            prefill = min(seconds(1) for _ in range(2))
            decode = min(seconds(args.new) for _ in range(2)) - prefill
            print(f"{batch} requests of {args.prompt} + {args.new} tokens")
            print(f"  prefill {1e3 * prefill:.1f} ms, {batch * args.prompt / prefill:,.0f} tokens/s")
            print(f"  decode {batch * (args.new - 1) / decode:,.0f} tokens/s")
            used, peak = (memory().get(name, 0) / 2**30 for name in ("bytes_in_use", "peak_bytes_in_use"))
            print(f"  device memory {used:.1f} GiB, at most {peak:.1f}")
            short = [[1 + i] for i in range(batch)]
            run(short, args.new)
            with tempfile.TemporaryDirectory() as folder:
                trace = args.trace or Path(folder)
                with jax.profiler.trace(str(trace)):
                    run(short, args.new)
                report(kernels(trace), blocks, args.new - 1, 1e3 * decode / (args.new - 1))


if __name__ == "__main__":
    main()
