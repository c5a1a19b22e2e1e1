# SPDX-License-Identifier: Apache-2.0
"""python -m qwen_spmd.plan: does a model fit on hardware, how fast can it be at most, and does it compile for it.

Exit code 0: it fits; 1: it does not, and what would is said, or the compiler refuses it; 2: a flag is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from qwen_spmd.plan import presets, report
from qwen_spmd.plan.compile import Program, Refused, Target, compile_steps
from qwen_spmd.plan.hardware import CHIPS, topology
from qwen_spmd.plan.memory import Case, memory
from qwen_spmd.plan.roofline import Assumptions, Roofline

WINDOW = 8
"""Decode iterations of a window; the program is the same for any."""

BITS_8 = "float8_e4m3fn"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)


def parser() -> argparse.ArgumentParser:
    p = _Parser(
        prog="python -m qwen_spmd.plan",
        description=__doc__.split("\n")[0].removeprefix("python -m qwen_spmd.plan: "),  # type: ignore[union-attr]
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = p.add_argument
    add("--model", required=True, help=f"{', '.join(presets.names())}; a folder, or a Hugging Face id")
    add("--topology", required=True, help=f"{', '.join(CHIPS)} and a size, as tpu7x:2x2x1 or gb200:16")
    add("--layout", default="dp_ep", help="single, dp_ep or tp_ep")
    add("--tp", type=int, default=1, help="devices that split each rank of dp_ep")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of activations, KV pages, other weights")
    add("--weight-dtype", default="bfloat16", choices=("bfloat16", "float32", BITS_8), help="of the matrices")
    add("--state-dtype", default="float32", choices=("float32", "bfloat16"), help="of the recurrent states")
    add("--isl", type=int, default=8192, help="tokens of a prompt")
    add("--osl", type=int, default=1024, help="tokens of an answer")
    add("--concurrency", type=int, default=64, help="requests that run at once, on all ranks together")
    add("--page-size", type=int, default=256, help="tokens of a KV page")
    add("--max-num-batched-tokens", type=int, default=2048, help="tokens of a step, of one rank")
    add("--memory-utilization", type=float, default=0.9, help="share of the device's memory to use")
    add("--experts-read", default="expected", choices=("expected", "all"), help="experts whose weights a step reads")
    add("--matmul-dtype", default="bfloat16", choices=("bfloat16", BITS_8), help="what 8-bit weights multiply in")
    add("--kv-dtype", default=None, choices=("bfloat16", "float32", BITS_8), help="of KV in the roofline (--dtype)")
    add("--hbm-efficiency", type=float, default=1.0, help="share of the memory's peak that is reached")
    add("--flops-efficiency", type=float, default=1.0, help="share of the arithmetic's peak")
    add("--network-efficiency", type=float, default=1.0, help="share of the network's peak")
    add("--overlap-network", action="store_true", help="collectives hide behind the rest of a step")
    routes = ("auto", "gather_scatter", "all_to_all")
    add("--moe-route", default="auto", choices=routes, help="how rows reach their experts; auto: as the server chooses")
    add("--moe-wire-dtype", default="auto", choices=("auto", "fp8"), help="of the rows on that way")
    add("--compile", action=argparse.BooleanOptionalAction, default=False, help="compile the step programs (TPU)")
    add("--json", type=Path, metavar="FILE", help="write the plan there, too")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(argv)
    try:
        return plan(args)
    except ValueError as error:
        p.error(str(error))


def plan(args: argparse.Namespace) -> int:
    """Print the plan; 0 if it fits, else 1."""
    for name in ("isl", "osl"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} is {getattr(args, name)}, it must be at least 1")
    if args.json:
        _check_writable(args.json)
    case = Case(
        cfg=dataclasses.replace(presets.model_config(args.model), mtp=False),  # no step reads it
        topology=topology(args.topology),
        layout_name=args.layout,
        tp=args.tp,
        context=args.isl + args.osl,
        concurrency=args.concurrency,
        dtype=args.dtype,
        weight_dtype=args.weight_dtype,
        state_dtype=args.state_dtype,
        page_size=args.page_size,
        batched_tokens=args.max_num_batched_tokens,
        utilization=args.memory_utilization,
    )
    assumptions = Assumptions(
        hbm=args.hbm_efficiency,
        flops=args.flops_efficiency,
        network=args.network_efficiency,
        experts_read=args.experts_read,
        matmul=args.matmul_dtype,
        kv_dtype=args.kv_dtype or args.dtype,
        state_dtype=args.state_dtype,
        overlap_network=args.overlap_network,
        moe_route=args.moe_route,
        moe_wire=args.moe_wire_dtype,
    )
    lay, topo = case.layout, case.topology
    roofline = Roofline(case.cfg, lay, topo, dtype=args.dtype, weight_dtype=args.weight_dtype, assumptions=assumptions)
    work = report.Workload(args.isl, args.osl, args.concurrency)
    chips = f"{topo.chips} chips, {topo.devices} devices" if topo.chip.cores > 1 else f"{topo.devices} devices"
    print(f"{args.model} on {topo.name} ({chips}), {lay.name}; weights {args.weight_dtype}, else {args.dtype}\n")

    programs: list[Program] = []
    refused = None
    need = memory(case, temporaries=0)
    if args.compile and need.free >= 0:
        try:
            programs = compile_steps(_target(args, case, need.pages, need.slots))
        except Refused as error:
            refused = str(error)
    temporaries = max((p.temporaries + p.code for p in programs), default=None)
    fit = memory(case, temporaries=temporaries)
    print(report.memory_text(fit, programs))
    for program in programs:
        print("\n" + report.program_text(program))
    print("\n" + report.roofline_text(roofline, case, work))
    if args.json:
        args.json.write_text(json.dumps(report.as_json(fit, roofline, work, programs), indent=1) + "\n")
    sys.stdout.flush()
    if fit.free < 0:
        print("\n" + report.unfit_text(fit), file=sys.stderr)
    if refused:
        print("\n" + refused, file=sys.stderr)
    return 1 if fit.free < 0 or refused else 0


def _check_writable(file: Path) -> None:
    """Before all the work. ValueError if the file cannot be written; it is not made."""
    try:
        file.stat()
    except FileNotFoundError:
        writable = file.parent.is_dir() and os.access(file.parent, os.W_OK)
    except OSError:
        writable = False
    else:
        writable = not file.is_dir() and os.access(file, os.W_OK)
    if not writable:
        raise ValueError(f"json is {str(file)!r}, it must be a file that can be written, in a folder that is there")


def _target(args: argparse.Namespace, case: Case, pages: int, slots: int) -> Target:
    lay = case.layout
    return Target(
        model=args.model,
        topology=args.topology,
        dp=lay.dp,
        ep=lay.ep,
        tp=lay.tp,
        dtype=case.dtype,
        weight_dtype=case.weight_dtype,
        state_dtype=case.state_dtype,
        page_size=case.page_size,
        pages=pages,
        slots=slots,
        pages_per_seq=case.pages_per_seq,
        window=WINDOW,
        keys=(case.sequences, (case.batched_tokens, case.sequences)),
        moe_route=args.moe_route,
        moe_wire=args.moe_wire_dtype,
    )


if __name__ == "__main__":
    sys.exit(main())
