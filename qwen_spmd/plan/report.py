# SPDX-License-Identifier: Apache-2.0
"""The plan as text and as JSON. Not here: what the numbers are (`memory`, `roofline`, `compile`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from qwen_spmd.plan.compile import Program
from qwen_spmd.plan.hardware import GIB
from qwen_spmd.plan.memory import Case, Memory, remedies
from qwen_spmd.plan.roofline import Roofline, Step, decode, prefill

Table = Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Workload:
    """Prompts of `isl` tokens, answers of `osl`, so many at once."""

    isl: int
    osl: int
    concurrency: int


def memory_text(m: Memory, programs: Sequence[Program]) -> str:
    case, seqs = m.case, m.case.sequences
    source = "of the compiled programs" if programs else "estimated"
    note = "scales are not counted, 1/4096" if case.weight_dtype == "float8_e4m3fn" else ""
    rows = [
        ("weights, the same on every device", m.replicated, ""),
        ("weights, a part on each", m.sharded, note),
        ("KV pages", m.pages * m.page_bytes, f"{m.pages - 1:,} of {case.page_size} tokens: {seqs} sequences a rank"),
        ("recurrent slots", m.slots * m.slot_bytes, f"{m.slots - 1}"),
        ("temporaries", m.temporaries, source),
        ("free", m.free, f"of {m.budget / GIB:,.2f}, {case.utilization:.0%} of the memory"),
    ]
    lines = [f"{kind:34} {size / GIB:8,.2f}  {note}".rstrip() for kind, size, note in rows]
    title = "MEMORY of each device, GiB"
    if m.free < 0:
        return "\n".join([title, *lines])
    fits = [
        f"longest context at this concurrency: {m.longest_context:,} tokens",
        f"most concurrency at this context:    {m.most_sequences:,} sequences",
    ]
    return "\n".join([title, *lines, *fits])


def unfit_text(m: Memory) -> str:
    """By how much it does not fit, and what would."""
    ways = remedies(m.case) or ["no single change of the weights' dtype, the limits, the layout or the size is enough"]
    return "\n".join(
        [f"does not fit: {-m.free / GIB:,.2f} GiB a device too much. What would:", *(f"  {w}" for w in ways)]
    )


def steps_of(case: Case, w: Workload) -> dict[str, Step]:
    """The steps whose bounds a plan shows, of one rank."""
    ranks = case.layout.ranks
    context = w.isl + w.osl / 2
    return {
        f"decode, {w.concurrency} sequences at {context:,.0f} tokens": decode(w.concurrency / ranks, context),
        f"prefill, {case.batched_tokens * ranks:,} tokens of prompts of {w.isl:,}": prefill(case.batched_tokens, w.isl),
    }


def roofline_text(r: Roofline, case: Case, w: Workload) -> str:
    """Bounds by building block, and the rates that follow."""
    parts = []
    for title, step in steps_of(case, w).items():
        rows: list[Sequence[str]] = [("", "GFLOP", "HBM GB", "net MB", "flops ms", "HBM ms", "net ms", "bound ms")]
        for b in r.blocks(step):
            t = b.times(r.topology, r.assumptions)
            sizes = (
                f"{(b.flops + b.fp8_flops) / 1e9:,.1f}",
                f"{b.hbm / 1e9:,.3f}",
                f"{(b.network + b.core) / 1e6:,.2f}",
            )
            rows.append((b.name, *sizes, *(f"{s * 1e3:.3f}" for s in (*t.values(), max(t.values())))))
        seconds = r.seconds(step)
        rate = step.tokens * r.layout.ranks / seconds / r.topology.chips
        rows.append(("step", *[""] * 6, f"{seconds * 1e3:.3f}"))
        parts.append(f"ROOFLINE of one device: {title}\n{_table(rows)}\n{rate:,.0f} tokens/s/chip")
    seconds, rate = r.serve_rate(w.isl, w.osl, w.concurrency, case.batched_tokens)
    parts.append(
        f"{w.isl:,} in, {w.osl:,} out, {w.concurrency} at once: {seconds:.2f} s a request, {rate:,.0f} tokens/s/chip "
        f"in and out, {rate * w.osl / (w.isl + w.osl):,.0f} of them out"
    )
    a = ", ".join(f"{f.name} {getattr(r.assumptions, f.name)}" for f in dataclasses.fields(r.assumptions))
    return "\n\n".join([*parts, f"A bound, not a forecast. It takes for granted: {a}"])


def program_text(p: Program) -> str:
    """What the compiler made of one program."""
    window = isinstance(p.key, int)
    if isinstance(p.key, int):
        name = f"decode window of {p.key} sequences a rank"
    else:
        name = f"ragged step of {p.key[0]:,} tokens and {p.key[1]} sequences a rank"
    arguments, aliased, temporaries, code = (n / GIB for n in (p.arguments, p.aliased, p.temporaries, p.code))
    lines = [
        f"COMPILED {name}: traced in {p.lower_s:.1f} s, compiled in {p.compile_s:.1f} s",
        f"arguments {arguments:,.2f} GiB a device, of which {aliased:,.2f} are updated in place; "
        f"temporaries {temporaries:,.2f}; code {code:,.3f}",
        f"the compiler counts {p.flops / 1e9:,.1f} GFLOP and {p.bytes_accessed / 1e9:,.1f} GB, each loop's body once "
        f"({p.unknown_loops} loops have a length that is known at run time only)",
    ]
    if p.collectives:
        rows = [
            ("collectives of an iteration" if window else "collectives", "devices", "times", "MB each", "MB received")
        ]
        for c in p.collectives:
            sizes = (f"{c.received / 1e6:,.3f}", f"{c.received * c.count / 1e6:,.2f}")
            rows.append((c.kind, str(c.group), str(c.count), *sizes))
        lines.append(_table(rows))
    return "\n".join([*lines, *(p.problems or ["no copies of weights or state; all state is updated in place"])])


def as_json(m: Memory, r: Roofline, w: Workload, programs: Sequence[Program]) -> dict[str, Any]:
    """Everything that the text says, in bytes and seconds."""
    memory = {f.name: getattr(m, f.name) for f in dataclasses.fields(m) if f.name != "case"}
    memory |= {k: getattr(m, k) for k in ("used", "free", "longest_context", "most_sequences")}
    case = {f.name: getattr(m.case, f.name) for f in dataclasses.fields(m.case) if f.name not in ("cfg", "topology")}
    lay = m.case.layout
    bounds = {}
    for title, step in steps_of(m.case, w).items():
        blocks = [dataclasses.asdict(b) | {"times": b.times(r.topology, r.assumptions)} for b in r.blocks(step)]
        bounds[title] = {"seconds": r.seconds(step), "tokens": step.tokens * lay.ranks, "blocks": blocks}
    seconds, rate = r.serve_rate(w.isl, w.osl, w.concurrency, m.case.batched_tokens)
    return {
        "case": case | {"topology": dataclasses.asdict(r.topology), "dp": lay.dp, "ep": lay.ep, "tp": lay.tp},
        "memory": memory,
        "assumptions": dataclasses.asdict(r.assumptions),
        "roofline": bounds,
        "workload": dataclasses.asdict(w) | {"seconds_a_request": seconds, "tokens_per_s_per_chip": rate},
        "programs": [dataclasses.asdict(p) | {"problems": p.problems} for p in programs],
    }


def _table(rows: Table) -> str:
    """Columns as wide as their widest entry, the first to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    line = lambda row: "  ".join(c.ljust(n) if i == 0 else c.rjust(n) for i, (c, n) in enumerate(zip(row, widths)))  # noqa: E731
    return "\n".join(line(row).rstrip() for row in rows)
