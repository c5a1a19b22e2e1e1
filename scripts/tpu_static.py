#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Static cost report for a JAX function compiled ahead of time for a TPU.

No TPU is needed: libtpu compiles for a named topology on a CPU host.  The tool
compiles one function in a subprocess with the compiler's low-level dumps
switched on, parses them, and reports for every kernel the schedule the TPU core
would run, next to the time the data movement and the matrix units need at best.

    python tpu_static.py pkg.module:factory
    python tpu_static.py path/to/file.py:factory --topology tpu7x:2x2x1 --json out.json
    python tpu_static.py file.py:f1 file.py:f2 --trip 'mykernel:L0.1=8' --keep DIR

Needs jax, libtpu and numpy (and whatever the factory imports).

Factory
-------
`factory` takes no arguments, runs in the subprocess and returns

    (fn, args)  or  (fn, args, options)

`args` is a tuple of `jax.ShapeDtypeStruct` or arrays (only shapes, types and,
if set, shardings are used).  `options` is a dict; every key is optional:

    mesh          ordered dict axis -> size, or a callable devices -> Mesh.
                  Default: one device, axis "d".
    in_specs      tuple of PartitionSpec, one per argument (default: replicated)
    in_shardings, out_shardings, donate_argnums, static_argnums  passed to jit
    compiler_options   dict for `lowered.compile`
    flops         useful FLOPs per device, for the MXU floor
    hbm_bytes     HBM bytes per device that the job must move, for the HBM floor
    mxu           "bf16" (default), "fp8" or "f32": which peak the floor uses
    trips         dict "kernel-name-prefix:loop-id" -> trip count, for loops
                  whose count is only known at run time
    prob          dict "kernel-name-prefix:bundle-address" -> probability that a
                  guarded region starting there runs (default 1)

If the factory needs the mesh itself (a `shard_map` over it), it calls
`tpu_static.current_mesh({"x": 8})` - in the subprocess this returns a mesh of
the target's devices - and returns the same mesh under "mesh".

What is reported
----------------
* per device memory from XLA: arguments, outputs, temporaries, generated code;
* XLA's own estimates (`optimal_seconds`, `bytes accessed`, `flops`).  A Pallas
  kernel without a `cost_estimate` counts as its operand and result bytes only;
* collectives found in the optimised HLO, with their operand and result bytes;
* Mosaic kernels (TensorCore and SparseCore custom calls) found in the HLO;
* per TensorCore computation: bundles, the loop nest with trip counts, static
  cycles, slot use, vector/scalar spills and fills, VMEM and SMEM allocations,
  DMA issued per loop iteration.
* per SparseCore routine: bundles and loops (cycles of one iteration; their trip
  counts are register values, so no total is given).

What the numbers mean, and how far to trust them
------------------------------------------------
The core is a statically scheduled VLIW machine: one bundle issues per cycle
when nothing stalls, and the compiler inserts empty bundles for every latency
it knows (functional units, MXU issue intervals, branch delay slots).  So

    static cycles = sum over bundles of (product of the enclosing trip counts)

is what the core needs if no bundle ever waits.  We count in the
`packed-bundles-post-ra` dump, *before* runs of empty bundles are folded into
delays, because the final bundle file hides those cycles (a taken branch costs
its six delay slots there, yet they are not all listed).

Trustworthy: the static length of a loop body and of the whole kernel for known
trip counts.  Doubling the vector work of a kernel bound by it doubles the
body; a dense matmul body comes out within a few per cent of the MXU limit.
The figure is a lower bound on the time of the core's instruction stream.

Checked against public TPU7x timings (tokamax 0.0.17 ships an autotuning cache and
perf-test limits; they may come from slightly older kernel code, and its timings
of kernels that update state in place include a copy of that state):

    batched RPA prefill   least squares over five shapes: 6.1 - 6.3 us per
                          (256 x 512) step; static 12980 cycles = 5.9 us at
                          2.2 GHz.  XLA's relayouts around it: 46 - 52 us per
                          1024 tokens measured, 52 us static.  Fixed part of a
                          call (launches, scheduling kernels, not modelled): 100 us
    router top-k          8192 x 512: measured 65 us, static 48 us
    gated delta rule      64 heads, per 64 tokens: measured 20.4 us, static
                          13.8 us (kernel 11.5, XLA relayouts 2.3)
    gmm_v2 fp8            memory bound: measured 1.2 (gate/up) - 1.5 (down) x HBM
    RPA / delta decode    memory bound: 72 - 75 % of the HBM peak, copy included

So: trust ratios between variants of one kernel, and read an absolute time as a
lower bound that real kernels exceed by 1.05 to 1.5 times, plus the fixed cost of
every launch.  For a memory-bound kernel expect 70 - 85 % of the HBM peak.

XLA's `optimal_seconds` is `bytes accessed` over 3.686 TB/s: for a collective it
holds local memory traffic only, no inter-chip time, so it is not an estimate of
the collective.  The report gives its bytes and the ring phases XLA chose.

Not seen: any run-time stall.  `dma.done.wait`, semaphore waits, HBM bandwidth
and latency, DMA start-up, VMEM bank or ICI contention, instruction fetch, and
other cores sharing the chip's HBM are all absent.  Hence the report also gives
the HBM floor (bytes / bandwidth) and, as the estimate for a kernel that
overlaps the two perfectly, max(static, HBM floor).  A kernel that starts a DMA
and waits for it at once is slower than that: look at `waits` in the loop table.

Guarded regions (`pl.when`, alternatives of a `lax.cond`) are counted as executed
on every iteration in `cycles`; `cycles_min` counts none of them.  The truth
lies between; `prob` narrows it, and the JSON lists each loop's `segments`, so a
caller can add up the one path that runs.  In the compiler's own grid pipelines
(N steps in N + 2 iterations) the guarded regions are counted N times.

Loops with a run-time trip count (dynamic grids, ragged work) print `trip=?` and
count once unless `trips` / `--trip` says otherwise.  Loop ids are positions in
the nest ("L0", "L0.1"); run once, read the table, then set the counts.

Clock and peaks for the derived times: 2.2 GHz; per chip 7.37 TB/s HBM,
2307 TFLOP/s bf16, 4614 TFLOP/s fp8; a device (core) has half of each.  Change
them with --clock-ghz, --hbm-tbs, --bf16-tflops or the matching arguments.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

DEFAULT_TOPOLOGY = "tpu7x:2x2x1"
SLOTS = ("MATMUL", "MATPUSH", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VLOAD:FILL", "VSTORE", "VSTORE:SPILL", "SALU")
BRANCH_DELAY = 6  # bundles after a branch that still execute
DMA_GRANULE = 32  # bytes per `size_in_granules` unit of HBM<->VMEM DMAs
MXU_CYCLES_PER_MATMUL = 1  # the slot table has one MATMUL entry per MXU cycle (measured)
NUM_MXU = 2


@dataclass
class Peaks:
    """Peaks of one device (= one core, half a chip)."""

    clock_ghz: float = 2.2
    hbm_tbs: float = 7.37 / 2
    bf16_tflops: float = 2307.0 / 2

    def flops(self, kind: str) -> float:
        scale = {"bf16": 1.0, "fp8": 2.0, "f32": 0.125}[kind]
        return self.bf16_tflops * scale * 1e12


# --------------------------------------------------------------------------
# Parsing the dumps
# --------------------------------------------------------------------------

_BUNDLE = re.compile(r"^ *(0x[0-9a-f]+|0) +((?:[A-Z]{2} ?)*): ?([> ]*)\{(.*)$")
_BRANCH = re.compile(r"sbr\.rel (?:\((!?%[\w]+)\) )?target bundleno = (\d+) \(0x[0-9a-f]+\), region = (\d+)")
_LOOP = re.compile(r"^\s*loop: start=(\S+), step=(\S+), limit=(\S+)")
_REGION = re.compile(r"^\s*\$region(\d+): .*// loop_body")
_ALLOC = re.compile(
    r"#allocation(\d+)\w* \[shape = '([^']*)', space=(\w+), size = (0x[0-9a-f]+)"
    r"(?:, offset = (0x[0-9a-f]+|\d+))?(.*?)\](?=\s|$)"
)
_TAG = re.compile(r"tag = '([^']{0,80})")
_DMA_ANY = re.compile(r"= dma\.(\w+)")


@dataclass
class Bundle:
    text: str
    slots: tuple = ()


@dataclass
class Loop:
    id: str
    start: int
    end: int  # exclusive, delay slots of the back branch included
    region: int
    trip: int | None
    trip_source: str
    pipelined: bool = False  # compiler-made grid pipeline: N steps in N + 2 iterations
    children: list = field(default_factory=list)


def parse_bundles(path: Path) -> list[Bundle]:
    """Reads a `packed-bundles-*` or `final_bundles` file, one entry per bundle."""
    bundles: list[Bundle] = []
    started = False
    for line in path.read_text(errors="replace").splitlines():
        m = _BUNDLE.match(line)
        if m:
            started = True
            bundles.append(Bundle(m.group(4)))
        elif started and bundles:  # continuation of a multi-line comment
            bundles[-1].text += "\n" + line
    return bundles


def parse_utilization(path: Path | None) -> list[tuple]:
    if path is None:
        return []
    rows, on = [], False
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith("== UTILIZATION"):
            on = True
        elif on and line.strip():
            rows.append(tuple(int(x) for x in line.split()))
    return rows


def parse_regions(path: Path | None) -> tuple[dict[int, tuple], list[dict]]:
    """From a `post-bundle-packing-post-ra` file: loop bounds and allocations."""
    bounds: dict[int, tuple] = {}
    allocs: dict[str, dict] = {}
    pending: list[tuple] = []
    if path is None:
        return bounds, []
    for line in path.read_text(errors="replace").splitlines():
        m = _LOOP.match(line)
        if m:
            pending.append(m.groups())
            continue
        m = _REGION.match(line)
        if m:
            bounds[int(m.group(1))] = pending.pop() if pending else None
            continue
        if "#allocation" in line and "[shape" in line:
            m = _ALLOC.search(line)
            if m:
                tag = _TAG.search(m.group(6))
                allocs[m.group(1)] = dict(
                    id=int(m.group(1)),
                    shape=m.group(2),
                    space=m.group(3),
                    bytes=int(m.group(4), 16),
                    scoped="scoped" in m.group(6),
                    tag=tag.group(1) if tag else "",
                )
    return bounds, list(allocs.values())


def _int(text):
    try:
        return int(text, 0)
    except (TypeError, ValueError):
        return None


def _trip_from_text(bundles, start, end, pred):
    """Falls back to the constant in the loop's exit test."""
    if not pred:
        return None
    reg = pred.lstrip("!")
    pat = re.compile(re.escape(reg) + r" = scmp\.(ge|eq)\.\w+\.totalorder (?:\([^)]*\), )?%\w+, (\d+)\b")
    for b in range(max(0, start), min(end, len(bundles))):
        m = pat.search(bundles[b].text)
        if m:
            return int(m.group(2))
    return None


def build_loops(bundles, bounds) -> tuple[list[Loop], list[tuple]]:
    """Loop nest and guarded regions from the branches of a bundle stream."""
    n = len(bundles)
    loops, guards = [], []
    for addr, b in enumerate(bundles):
        for m in _BRANCH.finditer(b.text):
            pred, target, region = m.group(1), int(m.group(2)), int(m.group(3))
            after = min(addr + 1 + BRANCH_DELAY, n)
            if target <= addr:
                trip, source = None, "run time"
                known = bounds.get(region)
                if known:
                    s, step, lim = (_int(x) for x in known)
                    if None not in (s, step, lim) and step:
                        trip, source = max(0, -(-(lim - s) // step)), "bounds"
                if trip is None:
                    # A loop region may be named differently after rotation: use the exit test.
                    t = _trip_from_text(bundles, target, after, pred)
                    if t is not None:
                        trip, source = t, "exit test"
                piped = any("iteration index, stage = 1" in bundles[i].text for i in range(target, min(target + 8, n)))
                loops.append(Loop("", target, after, region, trip, source, piped))
            elif target > after:
                guards.append((after, target))
    # One loop per header; keep the longest back edge.
    best: dict[int, Loop] = {}
    for lp in loops:
        old = best.get(lp.start)
        if old is None or lp.end > old.end:
            if old is not None and lp.trip is None:
                lp.trip, lp.trip_source = old.trip, old.trip_source
            best[lp.start] = lp
    ordered = sorted(best.values(), key=lambda l: (l.start, -l.end))
    roots: list[Loop] = []
    stack: list[Loop] = []
    for lp in ordered:
        while stack and lp.start >= stack[-1].end:
            stack.pop()
        siblings = stack[-1].children if stack else roots
        lp.id = (stack[-1].id + "." if stack else "L") + str(len(siblings))
        siblings.append(lp)
        stack.append(lp)
    return roots, sorted(set(guards))


def _weights(n, roots, guards, trips, prob):
    """Executions per bundle: (all guarded regions run, none of them run)."""
    full = [1.0] * n
    for g0, g1 in guards:
        p = prob.get(g0)
        if p is not None:
            for i in range(g0, min(g1, n)):
                full[i] *= p
    unguarded = [1.0] * n
    for g0, g1 in guards:
        for i in range(g0, min(g1, n)):
            unguarded[i] = 0.0

    def scale(lp):
        t = trips.get(lp.id, lp.trip)
        t = 1 if t is None else t
        if lp.pipelined and t > 2:
            # Its guarded regions run once per grid step, not on every iteration.
            inside = [g for g in guards if g[0] > lp.start and g[1] <= lp.end]
            for g in inside:
                outer = any(h != g and h[0] <= g[0] and g[1] <= h[1] for h in inside)
                if not outer and g[0] not in prob:
                    for i in range(g[0], g[1]):
                        full[i] *= (t - 2) / t
        for i in range(lp.start, min(lp.end, n)):
            full[i] *= t
            unguarded[i] *= t
        for c in lp.children:
            scale(c)

    for lp in roots:
        scale(lp)
    return full, unguarded


def _dmas(text):
    """[(direction, bytes or None)] of the DMAs issued in a bundle."""
    out = []
    for part in text.split(" ;; "):
        m = _DMA_ANY.search(part)
        if not m or m.group(1) in ("done", "wait"):
            continue
        s = re.search(r"/\*size_in_granules=\*/([%\w]+)", part)
        size = _int(s.group(1)) if s else None
        out.append((m.group(1), size * DMA_GRANULE if size is not None else None))
    return out


def analyse_computation(
    name, packed: Path, util: Path | None, regions: Path | None, trips: dict, prob: dict, peaks: Peaks
) -> dict:
    bundles = parse_bundles(packed)
    rows = parse_utilization(util)
    bounds, allocs = parse_regions(regions)
    roots, guards = build_loops(bundles, bounds)
    n = len(bundles)
    mine_t = {k.split(":", 1)[1]: v for k, v in trips.items() if name.startswith(k.split(":", 1)[0])}
    mine_p = {int(k.split(":", 1)[1], 0): v for k, v in prob.items() if name.startswith(k.split(":", 1)[0])}
    full, unguarded = _weights(n, roots, guards, mine_t, mine_p)
    have_util = len(rows) == n

    def slot_sum(lo, hi, w=None):
        if not have_util:
            return {}
        tot = [0.0] * len(SLOTS)
        for i in range(lo, min(hi, n)):
            f = 1.0 if w is None else w[i]
            for j, v in enumerate(rows[i][: len(SLOTS)]):
                tot[j] += f * v
        return {s: t for s, t in zip(SLOTS, tot) if t}

    def whole_body(lp):
        """Cycles of one iteration with every guarded region running."""
        inner = sum(min(c.end, n) - c.start for c in lp.children)
        return (
            min(lp.end, n)
            - lp.start
            - inner
            + sum(
                whole_body(c) * (mine_t.get(c.id, c.trip) if mine_t.get(c.id, c.trip) is not None else 1)
                for c in lp.children
            )
        )

    def describe(lp, depth, outer):
        inner = [(c.start, c.end) for c in lp.children]
        own = [i for i in range(lp.start, min(lp.end, n)) if not any(a <= i < b for a, b in inner)]
        trip = mine_t.get(lp.id, lp.trip)
        dma = {}
        waits = 0
        for i in own:
            waits += bundles[i].text.count("dma.done.wait") + bundles[i].text.count("vwait.")
            for kind, size in _dmas(bundles[i].text):
                d = dma.setdefault(kind, {"count": 0, "bytes": 0, "unknown_size": 0})
                d["count"] += 1
                if size is None:
                    d["unknown_size"] += 1
                else:
                    d["bytes"] += size
        total = sum(full[i] for i in range(lp.start, min(lp.end, n)))
        executions = outer * (1 if trip is None else trip)
        row = dict(
            id=lp.id,
            depth=depth,
            start=lp.start,
            end=lp.end,
            trip=trip,
            trip_source=("given" if lp.id in mine_t else lp.trip_source) + (", pipelined" if lp.pipelined else ""),
            own_bundles=len(own),
            total_executions=executions,
            cycles_per_iteration=whole_body(lp),
            cycles_total=total,
            own_slots=_slots_over(own, rows) if have_util else {},
            segments=_segments(own, lp, guards, rows if have_util else None),
            dma_per_iteration=dma,
            waits=waits,
        )
        out = [row]
        for c in lp.children:
            out += describe(c, depth + 1, executions)
        return out

    loop_rows = []
    for lp in roots:
        loop_rows += describe(lp, 0, 1.0)

    text = "\n".join(b.text for b in bundles)
    cycles = sum(full)
    slots = slot_sum(0, n, full)
    mxu_cycles = slots.get("MATMUL", 0.0) * MXU_CYCLES_PER_MATMUL / NUM_MXU
    vmem = [a for a in allocs if a["space"] == "vmem" and a["scoped"]]
    smem = [a for a in allocs if a["space"] == "smem" and a["scoped"]]
    return dict(
        name=name,
        bundles=n,
        cycles=cycles,
        cycles_min=sum(unguarded),
        us=cycles / peaks.clock_ghz / 1e3,
        us_min=sum(unguarded) / peaks.clock_ghz / 1e3,
        unknown_trips=[r["id"] for r in loop_rows if r["trip"] is None],
        loops=loop_rows,
        slot_ops=slots,
        mxu_issue_cycles=mxu_cycles,
        vector_spills=len(re.findall(r"vst \[vmem:\[#allocation\w*_spill", text)),
        vector_fills=len(re.findall(r"vld \[vmem:\[#allocation\w*_spill", text)),
        scalar_spills=len(re.findall(r"sst \[smem:\[#allocation\w*_spill", text)),
        scalar_fills=len(re.findall(r"sld \[smem:\[#allocation\w*_spill", text)),
        dma_waits=text.count("dma.done.wait"),
        vmem_bytes=sum(a["bytes"] for a in vmem),
        smem_bytes=sum(a["bytes"] for a in smem),
        vmem_allocations=sorted(vmem, key=lambda a: -a["bytes"])[:12],
        slot_table_matches=have_util,
    )


def _segments(own, loop, guards, rows):
    """Splits a loop's own bundles where the set of guarded regions changes.

    A kernel that picks one of several bodies (row buckets, first or last step)
    shows them as separate segments, so that a caller can add up one path.
    """
    inside = [(a, b) for a, b in guards if a > loop.start and b <= loop.end]
    if not inside:
        return []
    out = []
    for i in own:
        key = tuple((a, b) for a, b in inside if a <= i < b)
        if out and out[-1]["guards"] == key:
            out[-1]["end"] = i + 1
            out[-1]["bundles"] += 1
            out[-1]["idx"].append(i)
        else:
            out.append(dict(start=i, end=i + 1, bundles=1, guards=key, idx=[i]))
    for seg in out:
        idx = seg.pop("idx")
        seg["guards"] = [list(g) for g in seg["guards"]]
        seg["slots"] = _slots_over(idx, rows) if rows else {}
    return out


def _slots_over(idx, rows):
    tot = [0] * len(SLOTS)
    for i in idx:
        for j, v in enumerate(rows[i][: len(SLOTS)]):
            tot[j] += v
    return {s: t for s, t in zip(SLOTS, tot) if t}


def analyse_dump(dump: Path, trips=None, prob=None, peaks: Peaks | None = None, include_runtime=False) -> list[dict]:
    """All TensorCore computations found in a dump directory."""
    trips, prob, peaks = trips or {}, prob or {}, peaks or Peaks()
    groups: dict[tuple, dict] = {}
    pat = re.compile(r"^(\d+)-(.+?)-(\d+)-(.*)\.txt$")
    for p in dump.iterdir():
        m = pat.match(p.name)
        if not m:
            continue
        stamp, name, _, kind = m.groups()
        if not include_runtime and (name.startswith("<late-") or name == "TLP"):
            continue
        groups.setdefault((stamp, name), {})[kind] = p
    out = []
    for (_, name), files in sorted(groups.items()):
        packed = files.get("packed-bundles-post-ra")
        if packed is None:
            continue
        out.append(
            analyse_computation(
                name,
                packed,
                files.get("pre-delay_hlo-static-per-bundle-utilization"),
                files.get("post-bundle-packing-post-ra"),
                trips,
                prob,
                peaks,
            )
        )
    return out


_SC_BUNDLE = re.compile(r"^0x([0-9a-f]+):? +\{")
_SC_BRANCH = re.compile(r"\(pc\) =\s*sbr\.rel( @!?\w+)? \.(\w+)-\.\w+, \$(?:0x)?([0-9a-f]+)")


def analyse_sparsecore(dump: Path, peaks: Peaks | None = None) -> list[dict]:
    """Programs run by the SparseCore sequencers and vector subcores.

    One entry per routine ("scs" is the scalar sequencer, "tile..." the vector
    subcores, each of which runs the routine on its own share).  Cycles are bundles
    plus explicit delays; loops are found from backward branches and, their trip
    counts being register values, are listed with the cycles of one iteration.
    """
    peaks = peaks or Peaks()
    out = []
    root = dump / "sc_bundles"
    if not root.is_dir():
        return out
    for p in sorted(root.rglob("*.txt")):
        routine, lines, labels, cost, branches = None, [], {}, [], []

        def flush():
            if routine is None or not cost:
                return
            loops = []
            for at, label, delay in branches:
                if label in labels and labels[label] <= at:
                    lo, hi = labels[label], min(at + 1 + delay, len(cost))
                    loops.append(
                        dict(label=label, start=lo, end=hi, bundles=hi - lo, cycles_per_iteration=sum(cost[lo:hi]))
                    )
            loops.sort(key=lambda l: (l["start"], -l["end"]))
            out.append(
                dict(
                    file=p.name,
                    routine=routine,
                    bundles=len(cost),
                    cycles_once=sum(cost),
                    us_once=sum(cost) / peaks.clock_ghz / 1e3,
                    loops=loops,
                )
            )

        for line in p.read_text(errors="replace").splitlines():
            m = re.match(r"^(\.?[\w.$]+):\s*$", line)
            if m and not m.group(1).startswith("."):
                flush()
                routine, labels, cost, branches = m.group(1), {}, [], []
                continue
            if m:
                labels[m.group(1)[1:]] = len(cost)
                continue
            if _SC_BUNDLE.match(line):
                cost.append(1)
            d = re.search(r"sdelay \$(?:0x)?([0-9a-f]+)", line)
            if d and cost:
                cost[-1] += int(d.group(1), 16)
            b = _SC_BRANCH.search(line)
            if b and cost:
                branches.append((len(cost) - 1, b.group(2), int(b.group(3), 16)))
        flush()
    return out


# --------------------------------------------------------------------------
# HLO
# --------------------------------------------------------------------------

_DTYPE_BITS = dict(
    pred=8,
    s4=4,
    u4=4,
    s8=8,
    u8=8,
    s16=16,
    u16=16,
    s32=32,
    u32=32,
    s64=64,
    u64=64,
    bf16=16,
    f16=16,
    f32=32,
    f64=64,
    f8e4m3fn=8,
    f8e5m2=8,
    f8e4m3=8,
    f8e4m3b11fnuz=8,
    f4e2m1fn=4,
    f8e8m0fnu=8,
)
_SHAPE = re.compile(r"\b(\w+)\[([\d,]*)\]")
_COLLECTIVE = re.compile(
    r"^\s*(?:ROOT )?%([\w.\-]+) = (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|"
    r"collective-permute|ragged-all-to-all|collective-broadcast)(-start)?\((.*)$"
)


def shape_bytes(text: str) -> int:
    total = 0
    for dt, dims in _SHAPE.findall(text):
        if dt not in _DTYPE_BITS:
            continue
        n = 1
        for d in dims.split(","):
            if d:
                n *= int(d)
        total += n * _DTYPE_BITS[dt] // 8
    return total


def parse_collectives(hlo: str) -> list[dict]:
    """Collectives of the optimised module, async wrappers resolved to their body."""
    types = dict(re.findall(r"^\s*(?:ROOT )?%([\w.\-]+) = (\([^=]*?\)|\S+) [\w\-]+\(", hlo, re.M))
    out = []
    for line in hlo.splitlines():
        m = _COLLECTIVE.match(line)
        if not m:
            continue
        name, result, op, start, rest = m.groups()
        groups = re.search(
            r"replica_groups=(\{\{.*?\}\}|\[[^\]]*\]<=\[[^\]]*\](?:T\([\d,]*\))?"
            r"|mesh\[[^\]]*\] \{[^}]*\})",
            line,
        )
        names = re.findall(r"%([\w.\-]+)", rest.split(")")[0])
        operand_bytes = sum(shape_bytes(types.get(x, "")) for x in names)
        out.append(
            dict(
                name=name,
                op=op + (start or ""),
                result=re.sub(r"\{[^}]*\}", "", result)[:160],
                result_bytes=shape_bytes(result),
                operand_bytes=operand_bytes,
                on_sparsecore="SPARSECORE" in line,
                phases=_collective_phases(line),
                replica_groups=groups.group(1)[:120] if groups else None,
            )
        )
    return out


def _collective_phases(line: str) -> list[list[str]] | None:
    """Per colour (concurrent part), the rings it runs through, e.g. D2D, X_MESH, Y_MESH."""
    at = line.find("backend_config=")
    if at < 0:
        return None
    try:
        cfg, _ = json.JSONDecoder().raw_decode(line[at + len("backend_config=") :])
    except ValueError:
        return None
    colours = []
    for off in (cfg.get("collective_offload_config") or {}).values():
        strategies = (off.get("ici_strategy_config") or {}) if isinstance(off, dict) else {}
        for colour in strategies.get("color_strategies", []):
            colours.append(
                [
                    (r.get("explicit_strategy_ring_dim") or r.get("ring_dim", "?")).replace("ICI_RING_DIM_", "")
                    + " "
                    + r.get("ring_type", "").replace("ICI_RING_TYPE_", "")
                    for r in colour.get("phase_rings", [])
                ]
            )
    return colours or None


def parse_kernels(hlo: str) -> list[dict]:
    out = []
    for line in hlo.splitlines():
        if "tpu_custom_call" not in line:
            continue
        m = re.match(r"^\s*(?:ROOT )?%([\w.\-]+) = (.*?) custom-call", line)
        if not m:
            continue
        out.append(
            dict(
                name=m.group(1),
                core=None,
                result=re.sub(r"\{[^}]*\}", "", m.group(2))[:200],
                result_bytes=shape_bytes(m.group(2)),
            )
        )
    return out


# --------------------------------------------------------------------------
# Worker: runs in the subprocess
# --------------------------------------------------------------------------

_DEVICES = None


def current_mesh(axes: dict):
    """Mesh over the target's devices; only valid inside the worker."""
    import numpy as np
    from jax.sharding import Mesh

    if _DEVICES is None:
        raise RuntimeError("current_mesh() is only available while a factory runs")
    sizes = tuple(axes.values())
    count = int(np.prod(sizes))
    return Mesh(np.array(_DEVICES[:count]).reshape(sizes), tuple(axes))


def _load(spec: str):
    mod, fn = spec.rsplit(":", 1)
    if mod.endswith(".py") or os.sep in mod:
        path = Path(mod).resolve()
        sys.path.insert(0, str(path.parent))
        s = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(s)
        sys.modules[path.stem] = module
        s.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        module = importlib.import_module(mod)
    return getattr(module, fn)


def _worker(spec: str, topology: str, out: str) -> None:
    # Let factories `import tpu_static` and see this very module.
    sys.modules.setdefault("tpu_static", sys.modules[__name__])
    global _DEVICES
    import time
    import jax
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    import numpy as np

    topo = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    _DEVICES = list(topo.devices)
    one = Mesh(np.array(_DEVICES[:1]), ("d",))
    # Kernel libraries ask for the chip while the factory runs, so a mesh of the
    # target must be current already.
    with jax.sharding.use_abstract_mesh(one.abstract_mesh):
        got = _load(spec)()
    fn, args = got[0], got[1]
    opts = dict(got[2]) if len(got) > 2 else {}
    mesh = opts.get("mesh")
    if mesh is None:
        mesh = one
    elif isinstance(mesh, dict):
        mesh = current_mesh(mesh)
    elif callable(mesh) and not isinstance(mesh, Mesh):
        mesh = mesh(_DEVICES)
    specs = opts.get("in_specs")

    def place(a, spec):
        sh = getattr(a, "sharding", None)
        dev = list(getattr(sh, "device_set", [])) if sh is not None else []
        if not dev or dev[0].platform != "tpu":
            sh = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(np.shape(a), a.dtype, sharding=sh)

    placed = []
    for i, arg in enumerate(args):
        s = specs[i] if specs is not None else PartitionSpec()
        placed.append(jax.tree.map(lambda a, s=s: place(a, s), arg))
    jit_kw = {k: opts[k] for k in ("in_shardings", "out_shardings", "donate_argnums", "static_argnums") if k in opts}
    t0 = time.time()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(fn, **jit_kw).lower(*placed)
    t1 = time.time()
    compiled = lowered.compile(compiler_options=opts.get("compiler_options"))
    t2 = time.time()
    mem = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}
    if isinstance(cost, (list, tuple)):
        cost = cost[0]
    hlo = compiled.as_text()
    arg_bytes = [int(np.prod(a.shape)) * np.dtype(a.dtype).itemsize for a in jax.tree.leaves(placed)]
    result = dict(
        spec=spec,
        topology=topology,
        device_kind=_DEVICES[0].device_kind,
        num_devices=int(mesh.size),
        lower_s=t1 - t0,
        compile_s=t2 - t1,
        jax=jax.__version__,
        memory={
            k.replace("_size_in_bytes", ""): int(getattr(mem, k))
            for k in (
                "argument_size_in_bytes",
                "output_size_in_bytes",
                "temp_size_in_bytes",
                "alias_size_in_bytes",
                "generated_code_size_in_bytes",
            )
        },
        xla={k: float(cost[k]) for k in ("flops", "bytes accessed", "optimal_seconds") if k in cost},
        global_argument_bytes=int(sum(arg_bytes)),
        collectives=parse_collectives(hlo),
        kernels=parse_kernels(hlo),
        options={k: opts[k] for k in ("flops", "hbm_bytes", "mxu", "trips", "prob", "note") if k in opts},
    )
    Path(out).write_text(json.dumps(result))
    Path(out + ".hlo").write_text(hlo)


# --------------------------------------------------------------------------
# Driver
# --------------------------------------------------------------------------


def measure(
    spec: str,
    topology: str = DEFAULT_TOPOLOGY,
    *,
    trips: dict | None = None,
    prob: dict | None = None,
    peaks: Peaks | None = None,
    python: str | None = None,
    keep: str | None = None,
    timeout: float = 1800,
    extra_flags: str = "",
    include_runtime: bool = False,
    env: dict | None = None,
    all_passes: bool = False,
) -> dict:
    """Compiles `spec` in a subprocess and returns the report as a dict.

    A compile failure returns {"spec", "error", "stderr_tail"} instead of raising.
    """
    peaks = peaks or Peaks()
    work = Path(keep) if keep else Path(tempfile.mkdtemp(prefix="tpu_static_"))
    work.mkdir(parents=True, exist_ok=True)
    dump = work / "dump"
    shutil.rmtree(dump, ignore_errors=True)  # never mix two compilations
    for sub in ("", "sc_bundles"):
        (dump / sub).mkdir(parents=True, exist_ok=True)
    flags = " ".join(
        [
            f"--xla_jf_dump_to={dump}",
            "--xla_jf_dump_hlo_text=true",
            "--xla_jf_dump_llo_text=true",
            "--xla_jf_emit_annotations=true",
            # Only the passes read below: dumping all of them takes longer than compiling.
            "--xla_jf_dump_llo_pass_label_regex="
            + (".*" if all_passes else "packed-bundles-post-ra|post-bundle-packing-post-ra|pre-delay.*"),
            f"--xla_sc_dump_bundles_to={dump / 'sc_bundles'}",
            extra_flags,
        ]
    )
    e = dict(os.environ)
    e.update(
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_LOG_DIR="disabled",
        LIBTPU_INIT_ARGS=flags,
    )
    e.update(env or {})
    out = work / "result.json"
    cmd = [
        python or sys.executable,
        str(Path(__file__).resolve()),
        "--worker",
        spec,
        "--topology",
        topology,
        "--json",
        str(out),
    ]
    try:
        proc = subprocess.run(cmd, env=e, capture_output=True, text=True, timeout=timeout)
        if proc.returncode or not out.exists():
            err = proc.stderr.strip().splitlines()
            last = next(
                (l for l in reversed(err) if re.match(r"^[\w.]+(Error|Exception|Group)\b", l)),
                err[-1] if err else f"exit {proc.returncode}",
            )
            return dict(spec=spec, topology=topology, error=last[:600], stderr_tail="\n".join(err[-40:])[-4000:])
        rep = json.loads(out.read_text())
        opts = rep["options"]
        rep["computations"] = analyse_dump(
            dump,
            {**opts.get("trips", {}), **(trips or {})},
            {**opts.get("prob", {}), **(prob or {})},
            peaks,
            include_runtime,
        )
        rep["sparsecore"] = analyse_sparsecore(dump, peaks)
        # A kernel without a TensorCore schedule of its own runs on the SparseCore.
        scheduled = {c["name"] for c in rep["computations"]}
        for k in rep["kernels"]:
            k["core"] = "TensorCore" if k["name"] in scheduled else "SparseCore"
        rep["summary"] = summarise(rep, peaks)
        return rep
    except subprocess.TimeoutExpired:
        return dict(spec=spec, topology=topology, error=f"timeout after {timeout} s")
    finally:
        if not keep:
            shutil.rmtree(work, ignore_errors=True)


def summarise(rep: dict, peaks: Peaks) -> dict:
    o, xla, mem = rep["options"], rep["xla"], rep["memory"]
    hbm = o.get("hbm_bytes")
    source = "given"
    if hbm is None:
        hbm, source = mem["argument"] + mem["output"] - mem["alias"], "arguments + outputs"
    flops = o.get("flops", xla.get("flops", 0.0))
    static = sum(c["us"] for c in rep["computations"])
    static_min = sum(c["us_min"] for c in rep["computations"])
    hbm_us = hbm / (peaks.hbm_tbs * 1e12) * 1e6
    mxu_us = flops / peaks.flops(o.get("mxu", "bf16")) * 1e6
    floor = max(hbm_us, mxu_us)
    est = max(static, hbm_us)
    return dict(
        static_us=static,
        static_us_min=static_min,
        static_cycles=sum(c["cycles"] for c in rep["computations"]),
        unknown_trips=[f"{c['name']}:{i}" for c in rep["computations"] for i in c["unknown_trips"]],
        hbm_bytes=hbm,
        hbm_bytes_source=source,
        hbm_floor_us=hbm_us,
        flops=flops,
        mxu_floor_us=mxu_us,
        floor_us=floor,
        overlap_estimate_us=est,
        ratio_to_floor=est / floor if floor else None,
        xla_optimal_us=xla.get("optimal_seconds", 0.0) * 1e6,
        clock_ghz=peaks.clock_ghz,
        hbm_tbs=peaks.hbm_tbs,
        bf16_tflops=peaks.bf16_tflops,
    )


def _mb(x):
    return f"{x / 2**20:.2f} MiB"


def format_report(rep: dict) -> str:
    if "error" in rep:
        return f"{rep['spec']}: FAILED\n  {rep['error']}"
    s, m = rep["summary"], rep["memory"]
    L = [
        f"{rep['spec']}  on {rep['topology']} ({rep['device_kind']}, {rep['num_devices']} device(s)),"
        f" lower {rep['lower_s']:.1f} s, compile {rep['compile_s']:.1f} s",
        f"  memory/device: args {_mb(m['argument'])}, out {_mb(m['output'])}, temp {_mb(m['temp'])},"
        f" aliased {_mb(m['alias'])}, code {_mb(m['generated_code'])}",
        f"  XLA: optimal {s['xla_optimal_us']:.2f} us, bytes accessed "
        f"{rep['xla'].get('bytes accessed', 0) / 1e6:.2f} MB, flops {rep['xla'].get('flops', 0):.3g}",
        f"  static {s['static_us']:.2f} us ({s['static_cycles']:.0f} cycles at {s['clock_ghz']} GHz;"
        f" {s['static_us_min']:.2f} us with no guarded region)",
        f"  floors: HBM {s['hbm_floor_us']:.2f} us ({s['hbm_bytes'] / 1e6:.2f} MB, {s['hbm_bytes_source']}),"
        f" MXU {s['mxu_floor_us']:.2f} us",
        f"  estimate if compute and DMA overlap fully: {s['overlap_estimate_us']:.2f} us"
        + (f" = {s['ratio_to_floor']:.2f} x floor" if s["ratio_to_floor"] else ""),
    ]
    if s["unknown_trips"]:
        L.append("  loops with run-time trip counts, counted once: " + ", ".join(s["unknown_trips"]))
    for c in rep["collectives"]:
        L.append(
            f"  collective {c['op']}: in {c['operand_bytes']} B, out {c['result_bytes']} B,"
            f" groups {c['replica_groups']}"
            + (", on SparseCore" if c["on_sparsecore"] else "")
            + (f", phases {c['phases']}" if c["phases"] else "")
        )
    for k in rep["kernels"]:
        L.append(f"  kernel {k['name']} ({k['core']}): {k['result']}")
    for c in rep["computations"]:
        L.append(
            f"  == {c['name']}: {c['bundles']} bundles, {c['cycles']:.0f} cycles"
            f" (min {c['cycles_min']:.0f}) = {c['us']:.2f} us; MXU issue {c['mxu_issue_cycles']:.0f};"
            f" VMEM {_mb(c['vmem_bytes'])}; spills v{c['vector_spills']}/s{c['scalar_spills']},"
            f" fills v{c['vector_fills']}/s{c['scalar_fills']}"
        )
        for r in c["loops"]:
            dma = ", ".join(
                f"{k} x{d['count']} {d['bytes']} B" + ("+?" if d["unknown_size"] else "")
                for k, d in r["dma_per_iteration"].items()
            )
            slots = " ".join(f"{k}:{v}" for k, v in r["own_slots"].items())
            L.append(
                "     " + "  " * r["depth"] + f"{r['id']} [{r['start']:#x},{r['end']:#x}) trip="
                f"{'?' if r['trip'] is None else r['trip']} ({r['trip_source']})"
                f" {r['cycles_per_iteration']:.0f} cyc/iter, total {r['cycles_total']:.0f};"
                f" waits {r['waits']}; {slots}" + (f"; DMA {dma}" if dma else "")
            )
    for p in rep["sparsecore"]:
        loops = "; ".join(f"{l['label']} {l['cycles_per_iteration']} cyc/iter" for l in p["loops"])
        L.append(
            f"  SparseCore routine {p['routine']} ({p['file']}): {p['bundles']} bundles"
            + (f"; loops: {loops}" if loops else "")
        )
    return "\n".join(L)


def _pairs(items, conv):
    out = {}
    for it in items or ():
        k, v = it.split("=", 1)
        out[k] = conv(v)
    return out


def main(argv=None) -> int:
    ap = argparse.ArgumentParser(description="Static TPU cost report; see the module docstring.")
    ap.add_argument("spec", nargs="*", help="module:factory or file.py:factory")
    ap.add_argument("--worker", metavar="SPEC", help=argparse.SUPPRESS)
    ap.add_argument("--topology", default=DEFAULT_TOPOLOGY)
    ap.add_argument("--json", help="write the full reports here")
    ap.add_argument("--trip", action="append", metavar="KERNEL:LOOP=N")
    ap.add_argument("--prob", action="append", metavar="KERNEL:ADDR=P")
    ap.add_argument("--keep", help="keep the dumps in this directory")
    ap.add_argument("--clock-ghz", type=float, default=Peaks.clock_ghz)
    ap.add_argument("--hbm-tbs", type=float, default=Peaks.hbm_tbs, help="per device")
    ap.add_argument("--bf16-tflops", type=float, default=Peaks.bf16_tflops, help="per device")
    ap.add_argument(
        "--include-runtime", action="store_true", help="also report the top-level program and runtime stubs"
    )
    ap.add_argument("--all-passes", action="store_true", help="dump every compiler pass (slow; with --keep)")
    ap.add_argument("--timeout", type=float, default=1800)
    a = ap.parse_args(argv)
    if a.worker:
        _worker(a.worker, a.topology, a.json)
        return 0
    if not a.spec:
        ap.error("give at least one module:factory")
    peaks = Peaks(a.clock_ghz, a.hbm_tbs, a.bf16_tflops)
    reports = []
    for i, spec in enumerate(a.spec):
        keep = os.path.join(a.keep, str(i)) if a.keep and len(a.spec) > 1 else a.keep
        rep = measure(
            spec,
            a.topology,
            trips=_pairs(a.trip, lambda v: int(float(v))),
            prob=_pairs(a.prob, float),
            peaks=peaks,
            keep=keep,
            timeout=a.timeout,
            include_runtime=a.include_runtime,
            all_passes=a.all_passes,
        )
        print(format_report(rep), flush=True)
        reports.append(rep)
    if a.json:
        Path(a.json).write_text(json.dumps(reports if len(reports) > 1 else reports[0], indent=1))
    return 1 if any("error" in r for r in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
