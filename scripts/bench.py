# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode speed of a model folder through the engine's loop: `python scripts/bench.py --model DIR`.

`--random NAME` takes a model's published sizes and random weights instead (`python -m qwen_spmd.plan --help` lists the
names). `--peer PYTHON` adds transformers in that interpreter, on the same folder and number of threads; all take turns
at the same prompts, so that they see the same state of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench_engine import add_arguments, engine, prepare

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
    with engine(args) as run:

        def seconds(prompts: list[list[int]], new: int) -> float:
            start = time.perf_counter()
            run(prompts, new)
            return time.perf_counter() - start

        yield seconds


@contextlib.contextmanager
def peer(args: argparse.Namespace, attention: str) -> Iterator[Engine]:
    """transformers_peer.py in another interpreter. A line of JSON goes in, the seconds come out."""
    script = Path(__file__).with_name("transformers_peer.py")
    command = [args.peer, str(script), args.model, args.dtype, attention, str(THREADS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout

        def seconds(prompts: list[list[int]], new: int) -> float:
            print(json.dumps([prompts, new]), file=process.stdin, flush=True)
            return float(process.stdout.readline())  # type: ignore[union-attr]

        yield seconds
        process.stdin.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--repeats", type=int, default=5, help="runs of which the fastest counts")
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter with transformers and torch")
    args = parser.parse_args()
    prepare(args)
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
