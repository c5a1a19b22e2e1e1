# SPDX-License-Identifier: Apache-2.0
"""Compiling recorded launches for a GPU that is not here, with the compiler that the triton package brings.

`python -m qwen_spmd.pallas.triton.offline --op paged_attention --case prefill` prints what each kernel of the cases
whose names hold that needs: registers, spilled bytes, shared memory, and the matrix instructions it uses.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from qwen_spmd.pallas.triton import Descriptor, Launch, recorded

SHARED_LIMIT = 232448
"""Bytes of shared memory that a block can have, on Hopper and Blackwell."""

OPS = (
    "add_norm",
    "expert_sort",
    "expert_sum",
    "gated_delta",
    "grouped_mlp",
    "linear",
    "paged_attention",
    "router",
)

_TYPES = {
    "bfloat16": "bf16",
    "float32": "fp32",
    "float16": "fp16",
    "float8_e4m3fn": "fp8e4nv",
    "int64": "i64",
    "int32": "i32",
    "int8": "i8",
    "uint8": "u8",
    "uint32": "u32",
    "bool": "i1",
}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Of one kernel. spills: bytes stored to and loaded from memory for want of registers, as counted in the code.

    shared          bytes of a block           tensor_columns  of Blackwell's tensor memory
    instructions    how often each machine instruction stands in the code, modifiers and all; empty where this triton's
                    disassembler does not know the GPU
    """

    kernel: str
    capability: int
    registers: int
    spills: int
    shared: int
    tensor_columns: int
    ptx: str
    instructions: collections.Counter[str]

    def matrix_instructions(self) -> list[str]:
        return sorted(name for name in self.instructions if re.match(r"[HQ]GMMA|UTC\w*MMA|HMMA|QMMA", name))


def launches(module: Any, case: Any, capability: int) -> list[Launch]:
    """What the op of a `cases` module launches for one of its cases, each kernel with its constants once."""

    def inputs() -> Any:
        # Shapes are all that counts, and full cases fill gigabytes: nothing that is drawn is kept.
        return jax.tree.map(jax.numpy.asarray, module.inputs(case))

    abstract = module.abstract(case) if hasattr(module, "abstract") else jax.eval_shape(inputs)
    with recorded(capability) as found:
        jax.eval_shape(lambda x: module.run(x, "gpu"), abstract)
    return list({_key(l): l for l in found}.values())


def compile_launch(l: Launch, capability: int) -> Compiled:
    """Compile, disassemble and count. What triton raises for a kernel that does not compile goes through."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    signature, constants, attributes = _signature(l)
    in_gluon = isinstance(l.kernel, GluonJITFunction)
    source = (GluonASTSource if in_gluon else ASTSource)(l.kernel, signature, constants, attributes)
    options = {"num_warps": l.warps, "num_stages": l.stages, **l.options}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])
        usage = _tool("cuobjdump", "--dump-resource-usage", str(cubin))
        code = _tool("cuobjdump", "-sass", str(cubin))
    registers = re.search(r"REG:(\d+)", usage)
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code)
    instructions = collections.Counter(lines)
    return Compiled(
        kernel=l.kernel.__name__,
        capability=capability,
        registers=int(registers.group(1)) if registers else 0,
        spills=sum(n * _bytes(name) for name, n in instructions.items() if name.startswith(("LDL", "STL"))),
        shared=made.metadata.shared,
        tensor_columns=getattr(made.metadata, "tmem_size", 0) or 0,
        ptx=made.asm["ptx"],
        instructions=instructions,
    )


def _signature(l: Launch) -> tuple[dict[str, str], dict, dict]:
    """(type of each parameter, constants, what is known of divisibility), as triton's ASTSource takes them."""
    names = l.kernel.arg_names
    outputs = [o for i, o in enumerate(l.out) if i not in l.alias.values()]
    types: dict[str, str] = {}
    for name, x in zip(names, [*l.operands, *outputs], strict=False):
        if isinstance(x, Descriptor):
            block = ",".join(map(str, x.block_shape))
            layout = f",{x.layout!r}" if x.layout is not None else ""
            types[name] = f"tensordesc<{_TYPES[x.array.dtype.name]}[{block}]{layout}>"
        else:
            types[name] = f"*{_TYPES[x.dtype.name]}"
    types |= dict.fromkeys(l.constexprs, "constexpr")
    constants = {(names.index(name),): value for name, value in l.constexprs.items()}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, t in types.items() if t.startswith("*")}
    return {n: types[n] for n in names}, constants, aligned


def _bytes(instruction: str) -> int:
    """That each thread moves: LDL.128 moves 16."""
    width = re.search(r"\.(64|128)\b", instruction)
    return int(width.group(1)) // 8 if width else 4


def _key(l: Launch) -> tuple:
    """Equal for launches of the same code."""
    return l.kernel.fn, *_signature(l)[0].items(), l.warps, l.stages, *sorted({**l.options, **l.constexprs}.items())


def _tool(name: str, *args: str) -> str:
    import triton

    exe = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([exe, *args], capture_output=True, text=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=OPS, help="all if absent")
    parser.add_argument("--case", default="", help="part of the names of cases")
    parser.add_argument("--target", type=int, nargs="+", default=[90, 100], help="compute capabilities")
    args = parser.parse_args()
    seen, bad = set(), 0
    for op in (args.op,) if args.op else OPS:
        module = importlib.import_module(f"qwen_spmd.pallas.{op}.cases")
        for case in module.CASES:
            if args.case not in case.name:
                continue
            for capability in (c for c in args.target if c >= getattr(case, "capability", 90)):
                for l in launches(module, case, capability):
                    if (key := (capability, _key(l))) in seen:
                        continue
                    seen.add(key)
                    c = compile_launch(l, capability)
                    bad += c.spills > 0 or c.shared > SHARED_LIMIT
                    print(
                        f"{op}: {case.name}: {c.kernel} sm_{capability}: {l.warps} warps, {c.registers} registers, "
                        f"{c.spills} bytes spilled, {c.shared} shared, {c.tensor_columns} tensor columns, "
                        f"{' '.join(c.matrix_instructions())}",
                        flush=True,
                    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
