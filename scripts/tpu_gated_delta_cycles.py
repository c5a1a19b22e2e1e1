# SPDX-License-Identifier: Apache-2.0
"""What Gated DeltaNet costs on a TPU7x core, without one: compiles ahead of time and counts the compiler's schedule.

    pip install -e '.[tpu]'
    python scripts/tpu_gated_delta_cycles.py                # all cases
    python scripts/tpu_gated_delta_cycles.py --peer         # tokamax's kernels, if it is installed

A core issues one bundle of instructions a cycle unless it waits for memory, and the compiler's last dump has bundles
also for every delay that it knows of. So cycles are bundles times how often their loops and branches run, a lower bound
of the kernel's time: what is waited for is not in it. XLA's own operations around a kernel, such as changes of layout,
count too. For the peer's kernels every branch is taken in every step of the grid.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GHZ, HBM, FLOPS = 2.2, 3.685e12, 1153e12
"""Of one core: clock, bytes of HBM a second, bfloat16 operations a second."""
BRANCH_DELAY = 6
U, J, Y, W = 64, 16, 128, 4
C = 2 * J * Y + U * Y


@dataclasses.dataclass(frozen=True)
class Case:
    seqs: int
    tokens: int
    """Of each sequence; they are fresh if these are many."""
    rec_dtype: str = "bfloat16"

    @property
    def hbm_us(self) -> float:
        bytes_of_state = U * Y * Y * (2 if self.rec_dtype == "bfloat16" else 4) + (W - 1) * C * 2
        moved = self.seqs * self.tokens * (C * 2 + U * Y * 2 + 2 * U * 4)
        return (moved + bytes_of_state * self.seqs * (1 if self.fresh else 2)) / HBM * 1e6

    @property
    def mxu_us(self) -> float:
        """Of the recurrence's own products, three with a state for each token and head."""
        return self.seqs * self.tokens * U * 6 * Y * Y / FLOPS * 1e6

    @property
    def fresh(self) -> bool:
        return self.tokens > 8


CASES = {
    "decode, 64": Case(64, 1),
    "decode, 64, float32 state": Case(64, 1, "float32"),
    "windows of 4, 32": Case(32, 4),
    "prefill, 1024": Case(1, 1024),
    "prefill, 8 x 128": Case(8, 128),
    "prefill, 1024, float32 state": Case(1, 1024, "float32"),
}


@dataclasses.dataclass
class Region:
    """Bundles start to end: a loop's, or what a branch skips."""

    start: int
    end: int
    loop: bool = False
    pipelined: bool = False
    """The compiler's own pipeline: two iterations more than steps, each of which skips some of its branches."""
    trip: int | None = None
    inner: list[Region] = dataclasses.field(default_factory=list)

    @property
    def own(self) -> int:
        return self.end - self.start - sum(x.end - x.start for x in self.inner)

    def loops(self) -> list[Region]:
        return [x for x in self.inner if x.loop]

    def branches(self) -> list[Region]:
        return [x for x in self.inner if not x.loop]

    def walk(self) -> list[Region]:
        return [self, *(y for x in self.inner for y in x.walk())]

    def all(self, times: float = 1) -> float:
        """Cycles with every branch taken; loops of unknown length once."""
        times *= (self.trip or 1) if self.loop else 1
        steps = times * (self.trip - 2) / self.trip if self.pipelined and self.trip and self.trip > 2 else times
        return times * self.own + sum(x.all(times if x.loop else steps) for x in self.inner)


def schedule(dump: Path) -> tuple[Region, list[str]]:
    """A computation's regions and bundles, from its dump."""
    bundles = [
        x for x in dump.read_text(errors="replace").splitlines() if re.match(r"^ *(0x[0-9a-f]+|0) .*?: ?[> ]*\{", x)
    ]
    prefix = re.sub(r"-\d+-packed-bundles-post-ra\.txt$", "", dump.name)
    (behind,) = dump.parent.glob(f"{prefix}-*-post-bundle-packing-post-ra.txt")
    trips: dict[int, int] = {}
    bounds: list[tuple[str, ...]] = []
    for line in behind.read_text(errors="replace").splitlines():
        if found := re.match(r"\s*loop: start=(\S+), step=(\S+), limit=(\S+)", line):
            bounds.append(found.groups())
        elif (found := re.match(r"\s*\$region(\d+): .*// loop_body", line)) and bounds:
            start, step, limit = bounds.pop()
            if start.isdigit() and step.isdigit() and limit.isdigit():
                trips[int(found[1])] = -(-(int(limit) - int(start)) // int(step))
    found = {}
    for at, line in enumerate(bundles):
        for target, region in re.findall(
            r"sbr\.rel [^;]*?target bundleno = (\d+) \(0x[0-9a-f]+\), region = (\d+)", line
        ):
            first, after = int(target), min(at + 1 + BRANCH_DELAY, len(bundles))
            if first <= at:
                found[first, after, True] = Region(
                    first,
                    after,
                    loop=True,
                    pipelined=any("iteration index, stage = 1" in x for x in bundles[first : first + 8]),
                    trip=trips.get(int(region)),
                )
            elif first > after:
                found[after, first, False] = Region(after, first)
    root = Region(0, len(bundles))
    stack = [root]
    for x in sorted(found.values(), key=lambda x: (x.start, -x.end, x.loop)):
        while x.start >= stack[-1].end:
            stack.pop()
        stack[-1].inner.append(x)
        stack.append(x)
    return root, bundles


def cycles(case: Case, root: Region) -> float:
    """Of our kernel: how often each region runs, which its code (`tpu_kernel.py`) tells in this order."""
    rows, total = min(64, case.seqs * case.tokens), case.seqs * case.tokens
    blocks = total // rows
    (grid,) = root.loops()
    (step,) = grid.branches()
    init, block, first, tokens, *chunk = step.branches()
    one_token = case.tokens == 1
    steps = case.seqs if one_token else case.seqs + blocks
    live = case.seqs if case.tokens <= rows else blocks
    chunks = live if case.fresh else 0

    def of(region: Region, times: float, **inner: float) -> float:
        return times * region.own + sum(
            x.all(times * (1 if x.loop else inner.get("branches", 0))) for x in region.inner
        )

    spent = root.own + grid.own * (steps + 2) + step.own * steps
    spent += (
        of(init, 1) + of(block, blocks, branches=float(rows > case.tokens)) + of(first, case.seqs, branches=case.fresh)
    )
    (loop,) = tokens.loops()
    spent += tokens.own * (live - chunks) + loop.own * (0 if case.fresh else total)
    for x in chunk:
        spent += x.own * chunks
        for rows_of_8 in x.loops():
            full, few = sorted(rows_of_8.branches(), key=lambda y: bool(y.loops()))
            spent += chunks * rows // 8 * (rows_of_8.own + full.own)
            del few
    return spent


def peer_cycles(case: Case, root: Region) -> float:
    """Its steps are of two sequences, or of 64 rows of one."""
    grid = max((x for x in root.walk() if x.loop), key=lambda x: x.end - x.start)
    grid.pipelined = False
    grid.trip = case.seqs * case.tokens // 64 if case.fresh else case.seqs // 2
    return root.all()


def ours(case: Case) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    import jax
    import jax.numpy as jnp
    from jax.experimental.layout import Format, Layout

    from qwen_spmd.pallas.gated_delta import cases

    n, T = case.seqs, case.seqs * case.tokens
    drawn = cases.Case(
        "",
        ((case.tokens, case.tokens if case.fresh else case.tokens + 8),) * n,
        key_heads=J,
        value_heads=U,
        key_dim=Y,
        value_dim=Y,
        rows=T,
        batch=n,
        dtype="bfloat16",
        rec_dtype=case.rec_dtype,
        one_token=case.tokens == 1,
    )
    x = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, cases.inputs(drawn)))
    run = lambda conv, rec, rest: cases.run(dataclasses.replace(rest, conv=conv, rec=rec), "tpu")  # noqa: E731
    # Left to itself, XLA stores a pool of three inputs a slot with slots in the tiles, and copies all of it twice.
    rows = lambda sharding: Format(Layout((0, 1, 2, 3)), sharding)  # noqa: E731
    placed = lambda s: {"in_shardings": (rows(s), s, s), "out_shardings": (s, rows(s), s)}  # noqa: E731
    return (
        run,
        (x.conv, x.rec, dataclasses.replace(x, conv=None, rec=None)),
        {"donate_argnums": (0, 1), "place": placed},
    )


def peer(case: Case) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    import jax
    import jax.numpy as jnp
    from tokamax._src.ops.causal_conv1d_gated_delta_rule import wrapper  # type: ignore[import-not-found]

    n, T = case.seqs, case.seqs * case.tokens
    b16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32
    names = "qkv b a conv_state recurrent_state conv_weight conv_bias a_log dt_bias query_start_loc state_indices"
    shapes = ((T, C), (T, U), (T, U), (n + 1, W - 1, C), (n + 1, U, Y, Y), (C, 1, W), (C,), (U,), (U,), (n + 1,), (n,))
    dtypes = (*[b16] * 7, f32, b16, i32, i32)
    args = {k: jax.ShapeDtypeStruct(s, d) for k, s, d in zip(names.split(), shapes, dtypes)}
    args |= {"distribution": jax.ShapeDtypeStruct((3,), i32), "seq_lens": jax.ShapeDtypeStruct((n,), i32)}

    def run(*xs: jax.Array) -> Any:
        return wrapper.fused_conv1d_gdn(**dict(zip(args, xs)), n_kq=J, n_v=U, d_k=Y, d_v=Y, kernel_size=W)

    return run, tuple(args.values()), {"donate_argnums": (3, 4), "place": lambda s: {}}


def compile_one(name: str, of_peer: bool) -> None:
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices
    mesh = Mesh(np.array(devices[:1]), ("d",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        run, args, options = (peer if of_peer else ours)(CASES[name])
        sharding = NamedSharding(mesh, PartitionSpec())
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
        place = options.pop("place")
        jax.jit(run, **options, **place(sharding)).lower(*args).compile()


def measure(name: str, of_peer: bool) -> str:
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        passes = "packed-bundles-post-ra|post-bundle-packing-post-ra"
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={passes}"
        env = {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": flags, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        env |= {"TPU_SKIP_MDS_QUERY": "1"}
        command = [sys.executable, __file__, "--compile", name, *(["--peer"] if of_peer else [])]
        subprocess.run(command, env=os.environ | env, check=True, stderr=subprocess.DEVNULL)
        inside, around, spills, vmem = 0.0, 0.0, 0, 0
        for dump in Path(folder).glob("*[0-9]-packed-bundles-post-ra.txt"):
            if "-TLP-" in dump.name or "-<late-" in dump.name:
                continue  # what calls the others
            root, bundles = schedule(dump)
            which = "gated_delta" if not of_peer else "per_seq" if case.fresh else "batched"
            if which not in dump.name:
                if "fused_conv1d_gdn" not in dump.name:  # the peer's other kernel has no rows here
                    around += root.all()
                continue
            count = peer_cycles(case, root) if of_peer else cycles(case, root)
            if count > inside:
                inside = count
                spills = sum(len(re.findall(r"= vst \[vmem:\[#allocation\d+_spill\]", x)) for x in bundles)
                (behind,) = dump.parent.glob(
                    re.sub(r"-\d+-packed.*", "", dump.name) + "-*-post-bundle-packing-post-ra.txt"
                )
                sizes = re.findall(
                    r"#allocation\d+ \[shape = '[^']*', space=vmem, size = (0x[0-9a-f]+)", behind.read_text()
                )
                vmem = sum(int(x, 16) for x in sizes)
        static = (inside + around) / GHZ / 1e3
        floor = max(case.hbm_us, case.mxu_us)
        return (
            f"| {name} | {inside / 1e3:.1f} | {around / 1e3:.1f} | {static:.1f} | {case.hbm_us:.1f} | "
            f"{case.mxu_us:.1f} | {max(static, floor) / floor:.2f} | {spills} | {vmem / 2**20:.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of: {', '.join(CASES)}")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--compile", metavar="CASE", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.compile:
        return compile_one(given.compile, given.peer)
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    print("| case | kernel, 1000 cycles | around it | static us | HBM us | MXU us | of the floor | spills | VMEM MiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in given.cases or CASES:
        print(measure(name, given.peer), flush=True)


if __name__ == "__main__":
    main()
