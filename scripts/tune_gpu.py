# SPDX-License-Identifier: Apache-2.0
"""Find tile sizes of Triton kernels on the GPU that is here: `python scripts/tune_gpu.py --ops grouped --write`.

For each row of bench_gpu.py and each kernel that it launches, from the config in force: every value of one parameter
at a time is tried, the best is kept, until none is better. `--write` puts what is faster by more than 2 % into the
op's table, `pallas/<op>/configs.json`, which is looked up by shape class and compute capability while a model runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import jax
import numpy as np
from bench_gpu import ROWS, Loop, Row, ceilings, compiled, reason

from qwen_spmd.pallas.triton import capability, configs
from qwen_spmd.pallas.triton.configs import Config

TILES = {"warps": (2, 4, 8), "stages": (1, 2, 3, 4, 5, 6)}
SPACES: dict[str, dict[str, tuple[int, ...]]] = {
    "gate_up": TILES
    | {"block_r": (16, 32, 64, 128), "block_o": (64, 128, 256), "block_i": (64, 128), "swap": (0, 1)}
    | {"programs": (1, 2, 3), "flatten": (0, 1)},
    "down": TILES
    | {"block_r": (16, 32, 64, 128), "block_o": (64, 128, 256), "block_i": (64, 128), "swap": (0, 1)}
    | {"programs": (1, 2, 3), "flatten": (0, 1)},
    "decode": TILES
    | {"block_n": (16, 32, 64, 128), "programs": (1, 2, 3), "pieces": (1, 2, 4)}
    | {"block_z": (16, 32, 64, 128), "split": (1, 2, 4, 8, 16)},
    "prefill": TILES | {"block_m": (64, 128), "block_n": (32, 64, 128), "tma": (0, 1)},
    "convolve": {"warps": (2, 4, 8)},
    "chunks": {"warps": (2, 4, 8)},
    "recurrence": TILES | {"block_z": (16, 32, 64, 128)},
}
"""Values to try, by kernel; those that a kernel's config does not have are left out."""

GAIN = 0.98


def descend(start: Config, space: dict[str, tuple[int, ...]], cost: Callable[[Config], float]) -> tuple[Config, float]:
    """The best config found by changing one parameter at a time, and its cost. What cannot run costs infinity."""
    best, least, seen = start, cost(start), {tuple(sorted(start.items()))}
    improved = True
    while improved:
        improved = False
        for name, values in space.items():
            for value in values if name in start else ():
                config = best | {name: value}
                if (key := tuple(sorted(config.items()))) in seen:
                    continue
                seen.add(key)
                if (us := cost(config)) < least:
                    best, least, improved = config, us, True
    return best, least


def first_result(loop: Loop) -> np.ndarray:
    """The output of one call, which comes before the pools: what skips work shows there."""
    carry = jax.jit(loop.step, static_argnums=0)(0, loop.carry, *loop.operands)
    return np.asarray(jax.tree.leaves(carry)[0], np.float32)


def tune(row: Row, floor_us: float, write: bool) -> None:
    make = row.ours()["ours"]
    with configs.asked() as choices:
        compiled(make(), floor_us, 1.0)
    for op, kernel, shape_class, start in {(c[0], c[1]): c for c in choices}.values():
        want = first_result(make())

        def cost(config: Config, op: str = op, kernel: str = kernel, want: np.ndarray = want) -> float:
            """Infinite for what cannot run, and for what computes something else than the config in force."""
            try:
                with configs.force(op, kernel, config):
                    got, measure = first_result(make()), compiled(make(), 1.3 * floor_us + 3, 20_000)
                np.testing.assert_allclose(got, want, rtol=0, atol=0.02 * np.abs(want).max())
                return statistics.median(measure() for _ in range(4))
            except Exception as e:
                print(f"  {config}: {reason(e)}")
                return float("inf")

        before = cost(start)
        best, us = descend(start, SPACES[kernel], cost)
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
    args = parser.parse_args()
    limits = ceilings()
    for op in args.ops:
        for row in ROWS[op]:
            if args.match in row.name:
                tune(row, 1e6 * max(row.bytes / limits["bytes_s"], row.flop / limits["flop_s"]), args.write)


if __name__ == "__main__":
    main()
