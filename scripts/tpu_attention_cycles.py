# SPDX-License-Identifier: Apache-2.0
"""Static cycles of paged attention's TPU kernels, compiled ahead of time for one core of a TPU7x; no TPU is needed.

    python scripts/tpu_attention_cycles.py [case ..]

`tpu_static` compiles a function for a TPU and reports its loops: bundles of each guarded region, spills, memory. It
needs libtpu. Static cycles are those of a core that never waits: a lower bound of the time, to be read beside the time
that the bytes take. What runs how often is known from the kernel's walk, and added up here.

`tokamax decode` and `tokamax prefill` are tokamax 0.0.17's batched ragged paged attention at the same shapes.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from qwen_spmd.pallas.paged_attention import tpu
from qwen_spmd.state import Ragged

GHZ, TBS, TFLOPS = 2.2, 7.37 / 2, 2307 / 2
PAGE = 256


@dataclasses.dataclass(frozen=True)
class Case:
    """`tokens` query rows of each of `batch` sequences of `context` tokens."""

    batch: int
    tokens: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: Any = jnp.bfloat16

    @property
    def rows(self) -> int:
        return self.batch * self.tokens

    def blocks(self, several: bool) -> tpu.Blocks:
        G = self.heads // self.kv_heads
        q = jax.ShapeDtypeStruct((self.rows, self.kv_heads, G, self.head_dim), jnp.bfloat16)
        return tpu.blocks(q, self.kv(), self.context // PAGE, several)

    def kv(self) -> jax.ShapeDtypeStruct:
        pages = self.batch * self.context // PAGE + 1
        return jax.ShapeDtypeStruct((1, pages, self.kv_heads, 2, PAGE, self.head_dim), self.dtype)

    def floors(self) -> tuple[float, float]:
        """Microseconds of the bytes and of the products."""
        row = self.heads * self.head_dim
        read = self.batch * self.context * 2 * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize
        attended = self.rows * (self.context - (self.tokens - 1) / 2)
        return (read + 4 * self.rows * row) / TBS / 1e6, 4 * attended * row / TFLOPS / 1e6


QWEN3_5, QWEN3 = (32, 2, 256), (64, 4, 128)
CASES = {
    "decode": Case(64, 1, 8192, *QWEN3_5),
    "decode fp8": Case(64, 1, 8192, *QWEN3_5, jnp.float8_e4m3fn),
    "decode Qwen3": Case(64, 1, 8192, *QWEN3),
    "prefill": Case(1, 1024, 8192, *QWEN3_5),
    "prefill fp8": Case(1, 1024, 8192, *QWEN3_5, jnp.float8_e4m3fn),
    "prefill Qwen3": Case(1, 1024, 8192, *QWEN3),
    "tokamax decode": Case(64, 1, 8192, *QWEN3_5),
    "tokamax prefill": Case(1, 1024, 8192, *QWEN3_5),
}


def ours(case: Case) -> tuple:
    T, B, one = case.rows, case.batch, case.tokens == 1
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    rows = lambda heads: jax.ShapeDtypeStruct((T, heads, case.head_dim), jnp.bfloat16)  # noqa: E731
    given: dict[str, Any] = {"q_start_B": ints(B + 1), "pages_BP": ints(B, case.context // PAGE), "one_token": one}
    given |= dict.fromkeys(("kv_len_B", "read_slot_B", "write_slot_B"), ints(B))
    given |= dict.fromkeys(("seq_T", "pos_T", "page_T", "slot_T"), ints(T))
    given |= {"valid_T": jax.ShapeDtypeStruct((T,), jnp.bool_), "fresh_B": jax.ShapeDtypeStruct((B,), jnp.bool_)}
    args = rows(case.heads), rows(case.kv_heads), rows(case.kv_heads), case.kv(), ints(), Ragged(**given)
    return tpu.paged_attention, args, {"donate_argnums": (3,)}


def tokamax(case: Case) -> tuple:
    from tokamax._src.ops.batched_rpa.kernel import configs, wrapper  # type: ignore[import-not-found]

    decode = configs.BlockSizes(bq_sz=1, bq_c_sz=1, bkv_sz=2048, batch_size=4, n_buffer=2)
    prefill = configs.BlockSizes(bq_sz=256, bq_c_sz=64, bkv_sz=512, batch_size=1, n_buffer=2)

    def call(q: Any, k: Any, v: Any, cache: Any, *rest: Any) -> Any:
        sizes = {"decode_block_sizes": decode, "prefill_block_sizes": prefill}
        return wrapper.ragged_paged_attention(q, k, v, cache, *rest, sm_scale=case.head_dim**-0.5, **sizes)

    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    rows = lambda heads: jax.ShapeDtypeStruct((case.rows, heads, case.head_dim), jnp.bfloat16)  # noqa: E731
    pages = case.batch * case.context // PAGE
    cache = jax.ShapeDtypeStruct((pages, PAGE, case.kv_heads, 2, case.head_dim), jnp.bfloat16)
    metadata = ints(case.batch), ints(pages), ints(case.batch + 1), ints(3)
    args = rows(case.heads), rows(case.kv_heads), rows(case.kv_heads), cache, *metadata
    return call, args, {"donate_argnums": (3,)}


for _name, _case in CASES.items():  # tpu_static wants a name of a module for each
    globals()[_name.replace(" ", "_")] = lambda name=_name, case=_case: (
        tokamax(case) if name.startswith("tokamax") else ours(case)
    )


def products(segment: dict, slots: str = "slots") -> float:
    return segment[slots].get("MATMUL", 0)


def decode_cycles(case: Case, kernel: dict) -> float:
    """Sequences of one length, of whole blocks: four streams at the same block, all but an item's last in the loop."""
    walk = max(kernel["loops"], key=lambda l: l["cycles_total"])
    inner = [l for l in kernel["loops"] if l["id"].startswith(walk["id"] + ".") and l["depth"] == walk["depth"] + 1]
    fast = next(l for l in inner if products(l, "own_slots"))
    # Loops over the pages of a partial block do not run.
    loops = [l for l in inner if l is not fast and not (l["trip"] is None and (l["waits"] or l["dma_per_iteration"]))]
    # Regions for a stream alone do not run: they have a quarter of the work of the region for all four.
    most = max(products(s) for s in walk["segments"])
    computed = [s for s in walk["segments"] if products(s)]
    divided = [s for s in walk["segments"] if s["start"] > computed[-1]["end"]]
    stored = max(s["slots"].get("VSTORE", 0) for s in divided)
    alone = [s for s in computed if products(s) < most]
    alone += [s for s in divided if 0 < s["slots"].get("VSTORE", 0) < stored]
    last = sum(s["bundles"] for s in walk["segments"]) - sum(s["bundles"] for s in alone)
    last += sum(l["cycles_per_iteration"] * (l["trip"] or 1) for l in loops)
    c = case.blocks(several=False)
    items, blocks = case.batch // c.streams, case.context // (c.pages * PAGE)
    rest = kernel["cycles"] - walk["cycles_total"]
    return items * ((blocks - 1) * fast["cycles_per_iteration"] + last) + rest


def prefill_cycles(case: Case, kernel: dict) -> float:
    """One sequence. A block that every row of a tile sees is one piece, the last is taken in chunks."""
    loops = {l["id"]: l for l in kernel["loops"]}
    walk = max((l for l in kernel["loops"] if l["depth"] == 0), key=lambda l: l["cycles_total"])
    inner = [l for l in kernel["loops"] if l["id"].startswith(walk["id"] + ".") and l["own_slots"].get("MATMUL")]
    whole, chunks = (l for l in inner if l["depth"] == 1)
    free, masked = (l for l in inner if l["depth"] == 2)
    c = case.blocks(several=True)
    keys, chunk, step = c.pages * PAGE, c.chunk * PAGE, c.sub * tpu.subs_of(case.kv_heads)
    head = next(s["bundles"] for s in walk["segments"] if products(s))
    free_head, masked_head = (s["bundles"] for s in chunks["segments"] if products(s))
    item = sum(s["bundles"] for s in walk["segments"] if s["slots"].get("VSTORE", 0) > 500 and not products(s))
    trip = sum(s["bundles"] for s in walk["segments"] if not products(s)) - item
    total = 0.0
    for start in range(0, case.tokens, c.tokens):
        first = case.context - case.tokens + start
        end, steps = first + min(c.tokens, case.tokens - start), -(-min(c.tokens, case.tokens - start) // step)
        total += item
        for block in range(0, end, keys):
            total += trip
            if block + keys <= first + 1:
                total += head + steps * whole["cycles_per_iteration"]
                continue
            for begin in range(block, min(block + keys, end), chunk):
                seen = begin + chunk <= first + 1
                total += (free_head if seen else masked_head) + 20
                total += steps * (free if seen else masked)["cycles_per_iteration"]
    write = next(l for l in kernel["loops"] if "hbm_to_vmem" in l["dma_per_iteration"] or l["waits"] == 3)
    total += (case.tokens // PAGE + 1) * write["cycles_per_iteration"]
    return total + loops["L0"]["cycles_per_iteration"]


def tokamax_cycles(case: Case, report: dict) -> float:
    """Its step times the steps (blocks of 4 x 2048 keys; tiles of 256 queries x 512 keys), and XLA's relayouts."""
    decode = case.tokens == 1
    kernel = next(c for c in report["computations"] if c["name"].startswith("RPAd" if decode else "RPAp"))
    step = max(l["cycles_per_iteration"] for l in kernel["loops"] if l["depth"] == 1)
    if decode:
        steps = case.batch * case.context // (4 * 2048)
    else:
        firsts = range(case.context - case.tokens, case.context, 256)
        steps = sum(-(-(first + 256) // 512) for first in firsts)
    other = [c for c in report["computations"] if not c["name"].startswith(("RPA", "rpa_metadata"))]
    return (steps - 1) * step + kernel["cycles"] + sum(c["cycles"] for c in other)


def main() -> None:
    import tpu_static

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of: {', '.join(CASES)}")
    cases = parser.parse_args().cases or list(CASES)
    if unknown := set(cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    print("| case | kernel | cycles | us | bytes us | products us | spills | VMEM MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for name in cases:
        case = CASES[name]
        report = tpu_static.measure(f"{__file__}:{name.replace(' ', '_')}")
        if "error" in report:
            print(f"| {name} | {report['error'][:200]} |", flush=True)
            continue
        start = "RPA" + "dp"[case.tokens > 1] if name.startswith("tokamax") else "paged_attention_"
        start += "" if name.startswith("tokamax") else ("several" if case.tokens > 1 else "one")
        kernel = next(c for c in report["computations"] if c["name"].startswith(start))
        if name.startswith("tokamax"):
            cycles = tokamax_cycles(case, report)
        else:
            cycles = prefill_cycles(case, kernel) if case.tokens > 1 else decode_cycles(case, kernel)
            others = [c for c in report["computations"] if c is not kernel]
            # The kernel that has nothing to do runs none of its regions.
            cycles += sum(c["cycles_min" if c["name"].startswith("paged_attention_") else "cycles"] for c in others)
        bytes_us, products_us = case.floors()
        print(
            f"| {name} | {kernel['name']} | {cycles:.0f} | {cycles / GHZ / 1e3:.1f} | {bytes_us:.1f} | "
            f"{products_us:.1f} | {kernel['vector_spills']} | {kernel['vmem_bytes'] / 2**20:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
