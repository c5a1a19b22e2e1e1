# SPDX-License-Identifier: Apache-2.0
"""The torch side of `bench_gpu.py`: libraries that other servers run, in a process of their own.

Argument: the folder of unpacked libraries, or nothing. Each line of stdin is JSON, and is answered by a line:

    ["start"]                           ceilings of this GPU and versions
    ["prepare", row, kind, shape, us]   {peer: null or the reason why it cannot run}; us: about what a call takes
    ["time", row, peer]                 microseconds a call
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Call = Callable[[int], Any]
"""Of a peer; the argument, from 0 to SETS - 1, says which of several equal inputs it takes."""

WORK_US = 20_000
"""Timed at once."""

LAUNCHED_US = 15
"""Calls that take longer are launched by the time the one before has ended. (Graphs of DeepGEMM's and
FlashAttention-3's calls do not repeat them.)"""

SETS = 4
FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else None


def torch() -> Any:
    import torch  # type: ignore[import-not-found]

    return torch


def normal(*shape: int, dtype: Any = None, scale: float = 1.0) -> Any:
    t = torch()
    return (t.randn(shape, device="cuda", dtype=t.bfloat16) * scale).to(dtype or t.bfloat16)


def int32(values: Any) -> Any:
    return torch().tensor(values, device="cuda", dtype=torch().int32)


def grouped(sizes: list[int], inner: int, outer: int, contiguous: bool) -> Iterator[tuple[str, Callable[[], Call]]]:
    """x [R, I], w [E, O, I]: rows are sorted by expert."""
    E, R = len(sizes), sum(sizes)
    w = torch().empty((E, outer, inner), device="cuda", dtype=torch().bfloat16).normal_(std=inner**-0.5)

    def deep_gemm() -> Call:
        import deep_gemm  # type: ignore[import-not-found]

        align = deep_gemm.get_mk_alignment_for_contiguous_layout()
        if contiguous:  # each expert's rows begin at a multiple of what a tile takes
            places = [e if i < n else -1 for e, n in enumerate(sizes) for i in range(-(-n // align) * align)]
            x, d, layout = normal(len(places), inner), normal(len(places), outer), int32(places)
            return lambda _: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(x, w, d, layout)
        room = -(-max(sizes) // align) * align
        x, d, masked = normal(E, room, inner), normal(E, room, outer), int32(sizes)
        return lambda _: deep_gemm.m_grouped_bf16_gemm_nt_masked(x, w, d, masked, -(-R // E))

    def grouped_mm() -> Call:
        f = getattr(torch().nn.functional, "grouped_mm", None) or torch()._grouped_mm
        x, ends = normal(R, inner), int32(sizes).cumsum(0).to(torch().int32)
        return lambda _: f(x, w.transpose(-2, -1), offs=ends)

    yield "DeepGEMM", deep_gemm
    yield "torch grouped_mm", grouped_mm


def attention(
    heads: int, kv_heads: int, head_dim: int, sequences: int, context: int, new: int, page: int
) -> Iterator[tuple[str, Callable[[], Call]]]:
    """`sequences` of `context` tokens, `new` of which are queries: 1, or all."""
    t = torch()

    def flash() -> Call:
        file = next((FOLDER or Path()).glob("**/_vllm_fa3_C*.so"), None)
        if file is None:
            raise ModuleNotFoundError("_vllm_fa3_C.abi3.so is not in the folder of peers")
        t.ops.load_library(str(file))
        pages = -(-context // page)
        caches = [[normal(sequences * pages, page, kv_heads, head_dim) for _ in "kv"] for _ in range(SETS)]
        table = t.randperm(sequences * pages, device="cuda").to(t.int32).view(sequences, pages)
        q = normal(sequences * new, heads, head_dim)
        out, starts = t.empty_like(q), t.arange(sequences + 1, device="cuda", dtype=t.int32) * new
        used = int32([context] * sequences)
        head = (None, None, None, out, starts, None, None, None, used, new, context, table)
        tail = (
            *[None] * 5,
            None,
            None,
            None,
            head_dim**-0.5,
            True,
            -1,
            -1,
            0.0,
            True,
            None,
            0,
            None,
            0,
            None,
            1,
            0,
            None,
        )
        return lambda i: t.ops._vllm_fa3_C.fwd(q, *caches[i], *head, *tail)

    def sdpa() -> Call:
        q, k, v = (normal(sequences, n, context, head_dim) for n in (heads, kv_heads, kv_heads))
        f = t.nn.functional.scaled_dot_product_attention
        return lambda _: f(q, k, v, is_causal=True, enable_gqa=True)

    yield "FlashAttention-3", flash
    if new == context:
        yield "torch SDPA", sdpa


def delta(key_heads: int, heads: int, dim: int, sequences: int, new: int) -> Iterator[tuple[str, Callable[[], Call]]]:
    """`sequences` of `new` tokens. Neither the convolution nor the gates, and the state is written elsewhere."""

    def fla() -> Call:
        from fla.ops import gated_delta_rule as ops  # type: ignore[import-not-found]

        t = torch()
        f = ops.fused_recurrent_gated_delta_rule if new == 1 else ops.chunk_gated_delta_rule
        q, k = (normal(sequences, new, key_heads, dim) for _ in "qk")
        v, beta = normal(sequences, new, heads, dim), normal(sequences, new, heads).sigmoid()
        g = -t.nn.functional.softplus(normal(sequences, new, heads, dtype=t.float32) - 3)
        states = [
            normal(sequences, heads, dim, dim, dtype=t.float32) for _ in range(SETS * (8 if sequences == 1 else 1))
        ]
        calls = iter(range(sys.maxsize))
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return lambda _: f(q, k, v, g=g, beta=beta, initial_state=states[next(calls) % len(states)], **options)

    yield "fla recurrent" if new == 1 else "fla chunk", fla


KINDS: dict[str, Callable[..., Iterator[tuple[str, Callable[[], Call]]]]] = {
    "grouped": grouped,
    "attention": attention,
    "delta": delta,
}


def graph(calls: Callable[[], None]) -> Callable[[], Any]:
    """Its replay."""
    t = torch()
    captured = t.cuda.CUDAGraph()
    with t.cuda.graph(captured):
        calls()
    return captured.replay


def timer(call: Call, us: float) -> Callable[[], float]:
    """Microseconds a call: replays of a CUDA graph of some calls, where launching might take longer than they do."""
    t = torch()
    for i in range(SETS):
        call(i)
    t.cuda.synchronize()
    calls = SETS * max(1, min(64, int(WORK_US / us)) // SETS)

    def each() -> None:
        for i in range(calls):
            call(i % SETS)

    once = graph(each) if us < LAUNCHED_US else each
    times = max(1, round(WORK_US / (us * calls)))

    def measure() -> float:
        once()
        start, end = (t.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            once()
        end.record()
        t.cuda.synchronize()
        return 1e3 * start.elapsed_time(end) / (times * calls)

    return measure


def start() -> dict[str, Any]:
    """Bytes/s that a copy reads and writes, bf16 FLOP/s of a large product, and versions."""
    t = torch()
    n, gib = 8192, 1 << 30
    a, b, c = normal(n, n), normal(n, n), normal(n, n)
    x, y = normal(gib), t.empty(gib, device="cuda", dtype=t.bfloat16)
    # An addition: what copies may be an engine of its own, and slower.
    copy, product = timer(lambda _: t.add(x, 1, out=y), 1000), timer(lambda _: t.matmul(a, b, out=c), 1400)
    best = lambda f: min(f() for _ in range(3))  # noqa: E731
    found = {}
    if FOLDER:
        found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions(path=[str(FOLDER)])}
    return {
        "bytes_s": 4 * gib / best(copy) * 1e6,
        "flop_s": 2 * n**3 / best(product) * 1e6,
        "gpu": t.cuda.get_device_name(),
        "versions": {"torch": t.__version__, "CUDA (torch)": t.version.cuda} | found,
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    if FOLDER:
        sys.path.insert(0, str(FOLDER))
        sys.path.extend(str(p.parents[1]) for p in FOLDER.glob("**/deep_gemm/__init__.py"))
    os.environ.setdefault("FLA_FLASH_QLA", "0")
    ready: dict[tuple[str, str], Callable[[], float]] = {}

    def prepare(row: str, kind: str, shape: dict[str, Any], us: float) -> dict[str, str | None]:
        said: dict[str, str | None] = {}
        for name, make in KINDS[kind](**shape):
            try:
                ready[row, name], said[name] = timer(make(), us), None
            except Exception as e:
                traceback.print_exc()
                said[name] = f"{type(e).__name__}: {e}".splitlines()[0][:120]
        return said

    commands = {"start": start, "prepare": prepare, "time": lambda *which: ready[which]()}
    for line in sys.stdin:
        name, *args = json.loads(line)
        try:
            with torch().inference_mode():
                answer = {"ok": commands[name](*args)}
        except Exception as e:
            traceback.print_exc()
            answer = {"error": f"{type(e).__name__}: {e}".splitlines()[0][:200]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
