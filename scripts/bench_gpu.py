# SPDX-License-Identifier: Apache-2.0
"""Kernels on one GPU beside those of other servers, and beside what the hardware allows: a Markdown table.

    python scripts/bench_gpu.py --peers DIR --out gpu.md

Every figure is the median over rounds in which all take turns, in microseconds a call. `floor` is the larger of the
bytes that must move at the speed of a copy, and the operations at that of a large product, both measured in this run.
Peers run in a process with torch (`--python`, by default this interpreter). DIR is theirs:

    pip install --no-deps --target DIR vllm==0.33.0 fla-core==0.6.0 einops

from which come FlashAttention-3, DeepGEMM (compiles with the CUDA toolkit's nvcc) and flash-linear-attention. What is
missing is a dash, with the reason below the table. torch's own kernels need torch alone, cuDNN comes with jax.

Ours do more than some peers: attention also writes the new keys and values, the gated delta rule also convolves and
computes gates, and gate and up end in SwiGLU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # peers share the GPU

import jax
import jax.numpy as jnp
import numpy as np

from qwen_spmd import state
from qwen_spmd.pallas.add_norm import add_norm
from qwen_spmd.pallas.expert_sort import expert_sort
from qwen_spmd.pallas.expert_sum import expert_sum
from qwen_spmd.pallas.gated_delta import gated_delta
from qwen_spmd.pallas.linear import linear, linear_parts
from qwen_spmd.pallas.paged_attention import paged_attention
from qwen_spmd.pallas.router import router
from qwen_spmd.serve.step import COMPILER_OPTIONS
from qwen_spmd.state import Batch

BF16 = jnp.bfloat16
OPTIONS = COMPILER_OPTIONS["gpu"] if jax.default_backend() == "gpu" else {}

UNROLL = 4
"""Calls in the body of a loop."""

PAGE = 256


class Loop(NamedTuple):
    """step(i, carry, *operands) -> carry, for i from 0 to `calls` - 1 in the body of a loop: on the i-th layer.

    pure  calls have no state: each has operands of its own, or XLA would run one of two equal calls, and all results
          are kept, or it would run none whose result is not used
    """

    step: Callable[..., Any]
    carry: Any
    operands: tuple[Any, ...]
    calls: int = UNROLL
    pure: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table. `peer`: what gpu_peers.py calls it; `bytes` and `flop`: what a call must do at least."""

    name: str
    ours: Callable[[], dict[str, Callable[[], Loop]]]
    bytes: float
    flop: float
    peer: tuple[str, dict[str, Any]] = ("", {})


# ---------------------------------------------------------------- inputs


def normal(seed: int, *shape: int, dtype: Any = BF16, scale: float = 1.0) -> jax.Array:
    return _normal(jax.random.key(seed), scale, shape, dtype)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _normal(key: jax.Array, scale: float, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Made in pieces along the first axis: random bits take more room than what becomes of them."""

    pieces = math.gcd(shape[0], 64)
    piece_shape = (shape[0] // pieces, *shape[1:])
    draw = lambda key: (scale * jax.random.normal(key, piece_shape, jnp.float32)).astype(dtype)  # noqa: E731
    return jax.lax.map(draw, jax.random.split(key, pieces)).reshape(shape)


def batch(new: int, context: int, sequences: int, pages_BP: np.ndarray, slots: bool) -> state.Ragged:
    zeros = jnp.zeros(sequences, jnp.int32)
    slot_B = jnp.arange(1, sequences + 1, dtype=jnp.int32) if slots else zeros
    rows = Batch(
        tokens_T=jnp.zeros(sequences * new, jnp.int32),
        q_start_B=new * jnp.arange(sequences + 1, dtype=jnp.int32),
        kv_len_B=zeros + context,
        pages_BP=jnp.asarray(pages_BP, jnp.int32),
        read_slot_B=slot_B,
        write_slot_B=slot_B,
        fresh_B=zeros + new == context,
        emit_B=zeros > 0,
        sampling=None,  # type: ignore[arg-type]
    )
    page_size = PAGE if pages_BP.any() else 1 << 30
    return jax.jit(lambda rows: state.ragged(rows, page_size, one_token=new == 1))(rows)


# ---------------------------------------------------------------- rows


def grouped(name: str, experts: int, inner: int, outer: int, rows: int, ragged_dot: bool = False) -> Row:
    """Rows choose experts at random. name: gate_up, `outer` counts both; or down."""
    sizes = np.bincount(np.random.default_rng(0).integers(0, experts, rows), minlength=experts)
    hit, gated = int((sizes > 0).sum()), name == "gate_up"

    def ours() -> dict[str, Callable[[], Loop]]:
        sizes_E, width = jnp.asarray(sizes, jnp.int32), outer // 2 if gated else outer

        def kernel() -> Loop:
            from qwen_spmd.pallas.grouped_mlp import gpu

            ws = tuple(normal(i, UNROLL * experts, inner, width, scale=inner**-0.5) for i in range(1 + gated))
            ws = tuple(w.reshape(UNROLL, experts, inner, width) for w in ws)
            places = jnp.asarray(np.random.default_rng(1).permutation(rows), jnp.int32)
            call: Any = gpu.gate_up if gated else gpu.down

            def step(i: int, y: jax.Array, x: jax.Array, places_R: jax.Array, *ws: jax.Array) -> jax.Array:
                return call(after(x, y), places_R, sizes_E, *ws, jnp.int32(i), rows)

            return Loop(step, jnp.zeros((rows, width), BF16), (normal(7, rows, inner), places, *ws), pure=True)

        def dense() -> Loop:
            step = lambda i, y, x, *ws: jax.lax.ragged_dot(after(x, y), ws[i], sizes_E)  # noqa: E731
            ws = (normal(i, experts, inner, outer, scale=inner**-0.5) for i in range(UNROLL))
            return Loop(step, jnp.zeros((rows, outer), BF16), (normal(7, rows, inner), *ws), pure=True)

        return {"ours": kernel} | ({"ragged_dot": dense} if ragged_dot else {})

    shape = {"sizes": sizes.tolist(), "inner": inner, "outer": outer, "contiguous": rows >= 256 * experts}
    return Row(
        f"{name.replace('_', '-')}, {experts} experts {inner}x{outer}, {rows:,} rows",
        ours,
        bytes=2 * (hit * inner * outer + rows * (inner + outer // (1 + gated))),
        flop=2.0 * rows * inner * outer,
        peer=("grouped", shape) if experts <= 64 else ("", {}),  # of 256, DeepGEMM's end in an assertion
    )


def attention(heads: int, kv_heads: int, head_dim: int, sequences: int, context: int, new: int = 1) -> Row:
    prefill = new > 1

    def ours() -> dict[str, Callable[[], Loop]]:
        N, K, H, T = heads, kv_heads, head_dim, sequences * new

        def kernel() -> Loop:
            pages = -(-context // PAGE)
            pages_BP = 1 + np.random.default_rng(0).permutation(sequences * pages).reshape(sequences, pages)
            rows = batch(new, context, sequences, pages_BP, slots=False)
            kv = normal(0, UNROLL, sequences * pages + 1, K, 2, PAGE, H)

            def step(i: int, carry: Any, q: jax.Array, k: jax.Array, v: jax.Array, rows: Any) -> Any:
                return paged_attention(after(q, carry[0]), k, v, carry[1], jnp.int32(i), rows, impl="gpu")

            qkv = tuple(normal(i + 1, T, n, H) for i, n in enumerate((N, K, K)))
            return Loop(step, (jnp.zeros((T, N, H), BF16), kv), (*qkv, rows))

        def cudnn() -> Loop:
            def step(i: int, o: jax.Array, q: jax.Array, v: jax.Array, *k: jax.Array) -> jax.Array:
                return jax.nn.dot_product_attention(after(q, o), k[i], v, is_causal=True, implementation="cudnn")

            q, *kv = (normal(i, sequences, new, n, H) for i, n in enumerate((N, *[K] * (UNROLL + 1))))
            return Loop(step, jnp.zeros_like(q), (q, *kv), pure=True)

        return {"ours": kernel} | ({"cuDNN (jax.nn)": cudnn} if prefill else {})

    scores = sequences * new * (context if not prefill else (context + 1) / 2)
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "sequences": sequences}
    return Row(
        f"{'prefill' if prefill else 'decode'}, {heads}/{kv_heads}x{head_dim}, {sequences}x{context}",
        ours,
        bytes=4 * sequences * (context * kv_heads + new * heads) * head_dim,
        flop=4 * scores * heads * head_dim,
        peer=("attention", shape | {"context": context, "new": new, "page": PAGE}),
    )


def delta(sequences: int, new: int = 1, heads: int = 64) -> Row:
    J, U, Y, W = 16, heads, 128, 4
    C = (2 * J + U) * Y
    T, layers = sequences * new, 32 if sequences == 1 and new == 1 else UNROLL

    def ours() -> dict[str, Callable[[], Loop]]:
        def kernel() -> Loop:
            rows = batch(new, new if new > 1 else 9, sequences, np.zeros((sequences, 1)), slots=True)
            conv = normal(0, layers, sequences + 1, W - 1, C)
            rec = normal(1, layers, sequences + 1, U, Y, Y, dtype=jnp.float32, scale=0.3)

            def step(i: int, carry: Any, qkv: jax.Array, b: Any, a: Any, w: Any, log: Any, bias: Any, rows: Any) -> Any:
                o, conv, rec = carry
                return gated_delta(after(qkv, o), b, a, w, log, bias, conv, rec, jnp.int32(i), rows, impl="gpu")

            gates = (normal(2, T, U, dtype=jnp.float32), normal(3, T, U, dtype=jnp.float32))
            weights = (normal(4, W, C, scale=0.5), jnp.log(jnp.linspace(1.0, 16.0, U)), jnp.full(U, -3.0))
            inputs = (normal(5, T, C), *gates, *weights, rows)
            return Loop(step, (jnp.zeros((T, U, Y), BF16), conv, rec), inputs, calls=layers)

        return {"ours": kernel}

    # A chunk of 64: three products with the state and five within the chunk, for each token and head.
    flop = T * U * Y * (3 * 2 * Y + 5 * 2 * 64 if new > 1 else 6 * Y)
    return Row(
        f"gated delta {'decode' if new == 1 else 'prefill'}, {J}/{U}x{Y}, {sequences if new == 1 else new}",
        ours,
        bytes=sequences * U * Y * Y * 4 * (2 if new == 1 else 1) + T * 2 * (C + U * Y + 4 * U) + sequences * 12 * C,
        flop=flop if new > 1 else 0,
        peer=("delta", {"key_heads": J, "heads": U, "dim": Y, "sequences": sequences, "new": new}),
    )


def dense(name: str, T: int, I: int, widths: tuple[int, ...], parts: bool = False, out: bool = False) -> Row:
    """Few rows by the weights of a layer beside XLA's products: by several, whole or in parts; or `out`, by one, onto
    the residual stream and through the next norm."""

    def ours() -> dict[str, Callable[[], Loop]]:
        def run(impl: Any) -> Loop:
            def project(i: int, y: Any, x: jax.Array, *ws: tuple[jax.Array, ...]) -> Any:
                if parts:
                    return linear_parts(after(x, y), ws[i], dtype=jnp.float32, impl=impl)
                return linear(after(x, y), ws[i], out_dtypes=[BF16] * len(widths), impl=impl)

            def add(i: int, y: tuple[jax.Array, ...], x: jax.Array, *ws: tuple[jax.Array, ...]) -> Any:
                terms = linear_parts(after(x, y), ws[i], dtype=BF16, impl=impl)
                return add_norm(y[0], terms, jnp.zeros(widths[0]), eps=1e-6, zero_centred=True, impl=impl)

            w = lambda seed, width: normal(seed, I, width, scale=I**-0.5)  # noqa: E731
            ws = tuple(tuple(w(9 * i + j, width) for j, width in enumerate(widths)) for i in range(layers))
            carry, x = tuple(jnp.zeros((T, widths[0]), BF16) for _ in range(2)), normal(99, T, I)
            if not out:
                made = jax.eval_shape(functools.partial(project, 0), x, x, *ws)
                carry = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), made)
            return Loop(add if out else project, carry, (x, *ws), layers, pure=not out)

        return {"ours": lambda: run("gpu"), "XLA": lambda: run("reference")}

    moved = 2 * (I * sum(widths) + T * (I + sum(widths)))
    layers = max(UNROLL, (1 << 27) // moved)  # more than the cache holds
    return Row(f"{name}, {T} rows of {I} by {'+'.join(map(str, widths))}", ours, bytes=moved, flop=0)


def around(name: str, T: int, X: int, E: int, D: int) -> Row:
    """What is done around the experts, beside the plain jnp of it. Its operands stay in the cache, as in a layer."""

    def ours() -> dict[str, Callable[[], Loop]]:
        def run(impl: Any) -> Loop:
            logits, valid = [normal(i, 1, T, E, dtype=jnp.float32) for i in range(UNROLL)], jnp.ones(T, bool)
            chosen = [router(a, valid, X, normalise=True, impl="reference") for a in logits]
            orders = [expert_sort(experts, E, impl="reference") for experts, _ in chosen]
            if name == "router":

                def step(i: int, y: Any, *logits: jax.Array) -> Any:
                    return router(after(logits[i], y), valid, X, normalise=True, impl=impl)

                return Loop(step, chosen[0], tuple(logits), pure=True)
            if name == "expert_sort":
                step = lambda i, y, *experts: expert_sort(after(experts[i], y), E, impl=impl)  # noqa: E731
                return Loop(step, orders[0], tuple(experts for experts, _ in chosen), pure=True)
            values, gates, pos = normal(1, T * X, D), chosen[0][1], tuple(order.pos_TX for order in orders)
            step = lambda i, y, v, g, *pos: expert_sum(after(v, y), pos[i], g, impl=impl)  # noqa: E731
            return Loop(step, jnp.zeros((T, D)), (values, gates, *pos), pure=True)

        return {"ours": lambda: run("gpu"), "XLA": lambda: run("reference")}

    bytes_of = {"router": 4 * T * (E + 2 * X), "expert_sort": 12 * T * X, "expert_sum": 2 * T * X * D + 4 * T * D}
    return Row(f"{name}, {T}x{X} of {E}", ours, bytes=bytes_of[name], flop=0)


ROWS = {
    "grouped": (
        grouped("gate_up", 64, 4096, 2048, 640, ragged_dot=True),
        grouped("gate_up", 64, 4096, 2048, 5120),
        grouped("gate_up", 64, 4096, 2048, 81920),
        grouped("gate_up", 16, 4096, 3072, 512),
        grouped("down", 64, 1024, 4096, 640),
        *(grouped("gate_up", 256, 2048, 1024, rows) for rows in (8, 512)),
        *(grouped("down", 256, 512, 2048, rows) for rows in (8, 512)),
    ),
    "decode": (
        *(attention(32, 2, 256, B, n) for B, n in ((64, 8192), (64, 1024), (1, 32768), (256, 4096))),
        attention(64, 4, 128, 64, 8192),
        attention(16, 2, 256, 1, 1024),
    ),
    "prefill": (attention(32, 2, 256, 1, 8192, 8192), attention(64, 4, 128, 1, 8192, 8192)),
    "delta": (delta(1, heads=32), delta(1), delta(64, heads=32), delta(64), delta(256), delta(1, 1024), delta(1, 8192)),
    "linear": tuple(
        dense(name, T, I, widths, *how)
        for T in (1, 64)
        for name, I, widths, *how in (
            ("delta in", 2048, (8192, 32, 32, 4096)),
            ("delta out", 4096, (2048,), False, True),
            ("attention in", 2048, (4096, 512, 512, 4096)),
            ("MoE in", 2048, (256, 512, 512, 1), True),
            ("shared out", 512, (2048,), False, True),
        )
    ),
    "around": tuple(
        around(name, *shape)
        for name in ("router", "expert_sort", "expert_sum")
        for shape in ((64, 8, 256, 2048), (1024, 10, 512, 4096))
    ),
}


# ---------------------------------------------------------------- measuring


def after(x: jax.Array, y: Any) -> jax.Array:
    """x, but not before y is known: calls of a loop with the same operands are neither merged nor taken out of it."""
    return jax.lax.optimization_barrier((x, y))[0]


def beginning(loop: Loop) -> Any:
    """What the loop begins with."""
    return [jax.tree.map(jnp.copy, loop.carry) for _ in range(loop.calls)] if loop.pure else loop.carry


def reason(e: Exception) -> str:
    return f"{type(e).__name__}: {e}".strip().splitlines()[0][:160]


def compiled(loop: Loop, us: float, work_us: float, held: list[Any] | None = None) -> Callable[[], float]:
    """Microseconds a call, from a program that loops over about `work_us` of them. State is donated: what is in `held`,
    which may be shared by programs that run in turn."""
    times = max(1, round(work_us / (us * loop.calls)))

    def run(carry: Any, *operands: Any) -> Any:
        def calls(_: Any, carry: Any) -> Any:
            if not loop.pure:
                for i in range(loop.calls):
                    carry = loop.step(i, carry, *operands)
                return carry
            results = [carry[-1]]
            for i in range(loop.calls):
                results.append(loop.step(i, results[-1], *operands))
            return results[1:]

        return jax.lax.fori_loop(0, times, calls, carry)

    program = jax.jit(run, donate_argnums=0).lower(beginning(loop), *loop.operands).compile(OPTIONS)
    operands, held = loop.operands, [beginning(loop)] if held is None else held

    def measure() -> float:
        start = time.perf_counter()
        held[0] = jax.block_until_ready(program(held[0], *operands))
        us = 1e6 * (time.perf_counter() - start) / (times * loop.calls)
        first = jax.tree.leaves(held[0])[0]
        if jnp.issubdtype(first.dtype, jnp.floating) and not bool(jnp.isfinite(first).all()):
            raise FloatingPointError("the output is not finite")
        return us

    return measure


class Peers:
    """gpu_peers.py in another process, which answers in the order in which it is asked."""

    def __init__(self, python: str, folder: str | None) -> None:
        command = [python, str(Path(__file__).with_name("gpu_peers.py")), *([folder] if folder else [])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *command: Any) -> None:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(command), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        said = json.loads(line) if line else {"error": "the process of the peers has ended"}
        if "error" in said:
            raise RuntimeError(said["error"])
        return said["ok"]

    def now(self, *command: Any) -> Any:
        self.ask(*command)
        return self.answer()

    def __enter__(self) -> Peers:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def ceilings() -> dict[str, Any]:
    """As the peers' `start`, where there is no torch."""
    n = 8192
    a, b, c = (normal(i, n, n) for i in range(3))
    copy = compiled(Loop(lambda i, x: jax.lax.optimization_barrier(x + 1), jnp.ones(1 << 30, BF16), ()), 1300, 20_000)
    product = compiled(Loop(lambda i, c, a, b: after(a, c) @ b, c, (a, b)), 1400, 20_000)
    best = lambda f: min(f() for _ in range(4))  # noqa: E731
    gpu = jax.devices()[0].device_kind
    return {"bytes_s": 4e6 * (1 << 30) / best(copy), "flop_s": 2e6 * n**3 / best(product), "gpu": gpu, "versions": {}}


def measure(
    rows: Sequence[Row], peers: Peers, floors: dict[str, float], args: argparse.Namespace
) -> Iterator[dict[str, float | str]]:
    """Microseconds of each of a row, or why there are none. All rows are compiled at once, and nothing runs meanwhile:
    some peers choose their tiles by timing them."""
    us = {row.name: 1.3 * floors[row.name] + 3 for row in rows}
    asked = [row for row in rows if row.peer[0] and args.torch]
    for row in asked:
        peers.ask("prepare", row.name, *row.peer, us[row.name])

    def program(job: tuple[Row, str, Callable[[], Loop]]) -> Callable[[], float] | str:
        row, name, make = job
        try:
            slow = 8 if name in ("XLA", "ragged_dot") else 1
            return compiled(make(), us[row.name] * slow, args.work_us)
        except Exception as e:
            return reason(e)

    jobs = [(row, name, make) for row in rows for name, make in row.ours().items()]
    with ThreadPoolExecutor(args.threads) as pool:
        programs = {(row.name, name): p for (row, name, _), p in zip(jobs, pool.map(program, jobs), strict=True)}
    said: dict[str, dict[str, str | None]] = {}
    for row in asked:
        try:
            said[row.name] = peers.answer()
        except RuntimeError as e:
            said[row.name] = {"peers": reason(e)}
    for row in rows:
        timers = {name: p for (of, name), p in programs.items() if of == row.name} | said.get(row.name, {})
        figures: dict[str, float | str] = {}
        runs: dict[str, list[float]] = {name: [] for name in timers}
        for _ in range(args.rounds + 1):
            for name, once in timers.items():
                try:
                    if isinstance(once, str):
                        figures[name] = once
                    elif name not in figures:
                        runs[name].append(once() if once else peers.now("time", row.name, name))
                except Exception as e:
                    figures[name] = reason(e)
        # The first round warms up.
        yield {name: figures[name] if name in figures else statistics.median(r[1:]) for name, r in runs.items()}
        for name in timers:
            programs.pop((row.name, name), None)


# ---------------------------------------------------------------- the table


def cells(row: Row, floor_us: float, figures: dict[str, float | str]) -> Iterator[str]:
    yield row.name
    mine = figures.get("ours", "")
    yield f"{mine:.1f}" if isinstance(mine, float) else "-"
    others = {n: f for n, f in figures.items() if n != "ours"}
    yield ", ".join(f"{n} {f:.1f}" if isinstance(f, float) else f"{n} -" for n, f in others.items()) or "-"
    yield f"{floor_us:.1f}"
    best = min((f for f in others.values() if isinstance(f, float)), default=None)
    yield f"{best / mine:.2f}" if best and isinstance(mine, float) else "-"
    yield f"{floor_us / mine:.2f}" if isinstance(mine, float) else "-"


def versions() -> dict[str, str]:
    found = {}
    for name in ("qwen-spmd", "jax", "jaxlib", "jax-triton", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=list(ROWS), metavar="OP", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--match", default="", help="only rows whose name holds this")
    parser.add_argument("--peers", metavar="DIR", help="folder of unpacked libraries")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with torch")
    parser.add_argument("--out", metavar="FILE", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=8, help="that compile")
    parser.add_argument("--quick", action="store_true", help="one round of a quarter of the work")
    args = parser.parse_args()
    if unknown := set(args.ops) - set(ROWS):
        parser.error(f"no such op: {', '.join(sorted(unknown))}")
    args.work_us, args.rounds = (10_000, 1) if args.quick else (50_000, args.rounds)
    lines, missing = [], {}

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)
        if args.out:
            args.out.write_text("\n".join(lines) + "\n")

    with Peers(args.python, args.peers) as peers:
        try:
            limits, args.torch = peers.now("start"), True
        except RuntimeError as e:
            limits, args.torch, missing["torch"] = ceilings(), False, str(e)
    tb, tflop = limits["bytes_s"] / 1e12, limits["flop_s"] / 1e12
    say(f"{limits['gpu']}; a copy reads and writes {tb:.2f} TB/s, a bf16 product of 8192 does {tflop:.0f} TFLOP/s.\n")
    say(", ".join(f"{n} {v}" for n, v in (versions() | limits["versions"]).items()) + "\n")
    say(f"    {shlex.join(['python', *sys.argv])}\n")
    say("| us | ours | others | floor | best other / ours | floor / ours |")
    say("|---|---|---|---|---|---|")
    for op in args.ops:
        rows = [row for row in ROWS[op] if args.match in row.name]
        floors = {r.name: 1e6 * max(r.bytes / limits["bytes_s"], r.flop / limits["flop_s"]) for r in rows}
        with Peers(args.python, args.peers) as peers:  # of their own: what one breaks on the GPU stays broken
            for row, figures in zip(rows, measure(rows, peers, floors, args), strict=True):
                missing |= {f"{row.name}: {name}": f for name, f in figures.items() if isinstance(f, str)}
                say(f"| {' | '.join(cells(row, floors[row.name], figures))} |")
    if missing:
        say("\n" + "\n".join(f"- {what}: {why}" for what, why in missing.items()))


if __name__ == "__main__":
    main()
