# SPDX-License-Identifier: Apache-2.0
"""Find tile sizes of Triton kernels on the GPU that is here: `python scripts/tune_gpu.py --ops grouped --write`.

For each row of bench_gpu.py and each kernel that it launches, from the config in force: every change of one parameter
is tried, the best is kept, until none is better. `--write` puts what is faster by more than 2 % into the
op's table, `pallas/<op>/configs.json`, which is looked up by shape class and compute capability while a model runs.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_gpu import OPTIONS, ROWS, Row, beginning, ceilings, compiled, reason

from qwen_spmd.pallas.triton import capability, configs
from qwen_spmd.pallas.triton.configs import Config

TILES = {"warps": (2, 4, 8), "stages": (1, 2, 3, 4, 5, 6)}
SPACES: dict[str, dict[str, tuple[int, ...]]] = {
    "gate_up": {"hopper": (0, 1)}
    | TILES
    | {"block_r": (16, 32, 64, 128), "block_o": (64, 128, 256), "block_i": (64, 128), "swap": (0, 1)}
    | {"programs": (1, 2, 3), "flatten": (0, 1)},
    "down": TILES
    | {"block_r": (16, 32, 64, 128), "block_o": (64, 128, 256), "block_i": (64, 128), "swap": (0, 1)}
    | {"programs": (1, 2, 3), "flatten": (0, 1)},
    "decode": TILES
    | {"block_n": (16, 32, 64, 128), "programs": (1, 2, 3), "pieces": (1, 2, 4)}
    | {"block_z": (16, 32, 64, 128), "split": (1, 2, 4, 8, 16), "prefetch": (0, 1)},
    "prefill": TILES | {"block_m": (64, 128), "block_n": (32, 64, 128), "tma": (0, 1)},
    "linear": TILES | {"block_o": (16, 32, 64, 128), "block_i": (32, 64, 128, 256)},
    "parts": TILES | {"block_o": (16, 32, 64, 128), "block_i": (32, 64, 128, 256), "parts": (1, 2, 4, 8, 16)},
    "convolve": {"warps": (2, 4, 8)},
    "chunks": {"warps": (2, 4, 8)},
    "recurrence": TILES | {"block_z": (16, 32, 64, 128)},
}
"""Values to try, by kernel; those that a kernel's config does not have are left out."""

GAIN = 0.98
"""A config must be so much faster than the one in force to be written."""


def neighbours(config: Config, space: dict[str, tuple[int, ...]]) -> list[Config]:
    """With one parameter changed."""
    return [config | {n: v} for n, values in space.items() if n in config for v in values if v != config[n]]


def descend(
    start: Config, space: dict[str, tuple[int, ...]], costs: Callable[[list[Config]], list[float]]
) -> tuple[Config, float, float]:
    """The best config found by changing one parameter at a time; its cost, and that of `start`."""
    key = lambda config: tuple(sorted(config.items()))  # noqa: E731
    (first,) = costs([start])
    best, least, seen, improved = start, first, {key(start)}, True
    while improved:
        tried = [c for c in neighbours(best, space) if key(c) not in seen]
        seen |= set(map(key, tried))
        us, i = min(((us, i) for i, us in enumerate(costs(tried))), default=(float("inf"), 0))
        if improved := us < least:
            best, least = tried[i], us
    return best, least, first


def tune(row: Row, floor_us: float, write: bool, threads: int) -> None:
    loop = row.ours()["ours"]()
    held, first = [jax.tree.map(jnp.copy, beginning(loop))], functools.partial(loop.step, 0)
    with configs.asked() as choices:
        jax.eval_shape(first, loop.carry, *loop.operands)

    def result(program: Callable[..., Any]) -> np.ndarray:
        """The output of the first call, which comes before the pools: what skips work shows there."""
        return np.asarray(jax.tree.leaves(program(loop.carry, *loop.operands))[0], np.float32)

    for op, kernel, shape_class, start in {(c[0], c[1]): c for c in choices}.values():
        want: list[np.ndarray] = []

        def build(config: Config, op: str = op, kernel: str = kernel) -> Any:
            try:
                with configs.force(op, kernel, config):
                    once = jax.jit(first).lower(loop.carry, *loop.operands).compile(OPTIONS)
                    return once, compiled(loop, 1.3 * floor_us + 3, 10_000, held)
            except Exception as e:
                return reason(e)

        def costs(tried: list[Config], build: Any = build, want: list[np.ndarray] = want) -> list[float]:
            """Infinite for what cannot run, and for what computes something else than the config in force."""
            found = []
            with ThreadPoolExecutor(threads) as pool:
                built = list(pool.map(build, tried))  # nothing compiles while anything is timed
            for config, made in zip(tried, built, strict=True):
                try:
                    once, measure = made
                    got = result(once)
                    want[:] = want or [got]
                    np.testing.assert_allclose(got, want[0], rtol=0, atol=0.02 * np.abs(want[0]).max())
                    found.append(statistics.median(measure() for _ in range(4)))
                except Exception as e:
                    print(f"  {config}: {made if isinstance(made, str) else reason(e)}")
                    found.append(float("inf"))
            return found

        best, us, before = descend(start, SPACES[kernel], costs)
        print(f"{row.name}: {op}.{kernel}, {shape_class}: {before:.1f} -> {us:.1f} us, {best}", flush=True)
        if write and us < GAIN * before:
            table = configs.table(op)
            table.setdefault(kernel, {}).setdefault(str(capability()), {})[shape_class] = best
            configs.file(op).write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ops = [op for op in ROWS if op != "around"]
    parser.add_argument("--ops", nargs="+", default=ops, choices=ops)
    parser.add_argument("--match", default="", help="only rows whose name holds this")
    parser.add_argument("--write", action="store_true", help="into the tables")
    parser.add_argument("--threads", type=int, default=12, help="that compile")
    args = parser.parse_args()
    limits = ceilings()
    for op in args.ops:
        for row in ROWS[op]:
            if args.match in row.name:
                floor_us = 1e6 * max(row.bytes / limits["bytes_s"], row.flop / limits["flop_s"])
                tune(row, floor_us, args.write, args.threads)


if __name__ == "__main__":
    main()
