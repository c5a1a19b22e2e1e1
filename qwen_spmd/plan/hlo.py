# SPDX-License-Identifier: Apache-2.0
"""Reading a compiled program's text: how often each part runs, its collectives, and copies that should not be there.

Not here: compiling it (`compile`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

MOVES = ("copy", "copy-start", "convert", "transpose", "slice", "dynamic-slice", "pad", "reverse")

_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_CALLS = re.compile(
    r"\b(body|condition|calls|to_apply|true_computation|false_computation|branch_computations)=(\{[^}]*\}|%[\w.\-]+)"
)
_NAME = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Op:
    """One instruction: `type` is the text of its result's type, `args` what stands in its parentheses and after."""

    name: str
    type: str
    code: str
    args: str
    root: bool


@dataclasses.dataclass(frozen=True)
class Collective:
    """Equal collectives of a program: `count` executions, each with a result of so many bytes on each device.

    received   bytes that come from other devices in one execution
    """

    kind: str
    group: int
    result_bytes: int
    received: int
    count: int


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy as large as an array of weights or state, or a layer of one; `of` names which."""

    op: str
    of: str
    bytes: int
    count: int


class Module:
    """A program's computations, and how often each runs in one run of the whole."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Op]] = {}
        self.entry, current = "", list[Op]()
        for line in text.splitlines():
            if line.endswith("{") and not line.startswith((" ", "HloModule")):
                name = _NAME.search(line)[1]  # type: ignore[index]
                current = self.computations[name] = []
                if line.startswith("ENTRY"):
                    self.entry = name
            elif (op := _op(line)) is not None:
                current.append(op)
        if not self.entry:
            raise ValueError("the text is no HLO module: it has no ENTRY")
        self.runs: dict[str, int] = dict.fromkeys(self.computations, 0)
        self.unknown_loops = 0
        self._count(self.entry, 1)

    def ops(self) -> Iterator[tuple[Op, int]]:
        """Every instruction that runs and how often. A loop of unknown length counts as one turn."""
        for name, ops in self.computations.items():
            if n := self.runs[name]:
                yield from ((op, n) for op in ops)

    def _count(self, name: str, times: int) -> None:
        self.runs[name] += times
        for op in self.computations[name]:
            if op.code in ("async-update", "async-done"):
                continue  # they name what their async-start has run
            calls = dict(_CALLS.findall(op.args))
            n = times
            if op.code == "while":
                trips = self._trips(_NAME.search(calls["condition"])[1])  # type: ignore[index]
                self.unknown_loops += trips is None
                n = times * (1 if trips is None else trips)
            for called in calls.values():
                for child in _NAME.findall(called):
                    self._count(child, n)

    def _trips(self, condition: str) -> int | None:
        """Turns of a loop that counts from 0 to a constant, else None."""
        ops = {op.name: op for op in self.computations[condition]}
        last = next(op for op in ops.values() if op.root)
        if last.code == "fusion":  # its parameters are what the fusion is called with
            given = [ops[name] for name in _NAME.findall(last.args.split(")")[0])]
            inside = self.computations[_NAME.search(dict(_CALLS.findall(last.args))["calls"])[1]]  # type: ignore[index]
            ops = {op.name: given[int(op.args.split(")")[0])] if op.code == "parameter" else op for op in inside}
            last = next(op for op in inside if op.root)
        if last.code != "compare" or "direction=LT" not in last.args:
            return None
        limit = ops[_NAME.findall(last.args)[1]]
        value = limit.args.split(")")[0]
        return int(value) if limit.code == "constant" and value.isdecimal() else None

    def collectives(self) -> list[Collective]:
        """All collectives, equal ones together, in order of the bytes that they bring."""
        found: dict[tuple[str, int, int, int], int] = {}
        for op, n in self.ops():
            kind = op.code.removesuffix("-start")
            if kind not in COLLECTIVES:
                continue
            # An asynchronous one has its operands in its type, too; its result is the last but for small contexts.
            sizes = [array_bytes(*a) for a in _ARRAY.findall(op.type)]
            result = (max(sizes) if kind == "all-gather" else sizes[-1]) if op.code != kind else sum(sizes)
            group = group_size(op.args)
            key = (kind, group, result, _received(kind, group, result))
            found[key] = found.get(key, 0) + n
        rows = [Collective(*key, count) for key, count in found.items()]
        return sorted(rows, key=lambda c: -c.received * c.count)

    def copies(self, arrays: dict[str, tuple[int, ...]]) -> list[Copy]:
        """Copies in device memory of whole arrays, or of a layer of one: name -> local shape, layers first.

        A copy may permute axes or cast, so shapes are compared without order and dtypes not at all. Passed over: what
        is below 1 MiB, prefetches into a core's own memory (space S(1)), and what a fusion only computes inside.
        """
        whole: dict[tuple[int, ...], list[str]] = {}
        for name, shape in arrays.items():
            for axes in {tuple(shape), _axes(shape)}:
                whole.setdefault(axes, []).append(name)
        types = {op.name: op.type for ops in self.computations.values() for op in ops}
        fused = self._fused()

        def source(op: Op) -> str | None:
            shape = _shape(op.type)
            if names := whole.get(shape) or whole.get(_axes(shape)):
                return " or ".join(names)
            # Activations may have a layer's shape; what is cut out of a stack reads the stack.
            for operand in _NAME.findall(op.args.split("), ")[0]):
                stack = _shape(types.get(operand, ""))
                if (names := whole.get(stack)) and _axes(stack[1:]) == _axes(shape):
                    return f"a layer of {' or '.join(names)}"
            return None

        found: dict[tuple[str, str, int], int] = {}
        for name, ops in self.computations.items():
            for op in ops if name not in fused else ():
                if not self.runs[name] or not self._moves(op):
                    continue
                array = _ARRAY.search(op.type)
                if array is None or "S(1)" in op.type or array_bytes(*array.groups()) < 1 << 20:
                    continue
                if (of := source(op)) is not None:
                    key = (op.name, of, array_bytes(*array.groups()))
                    found[key] = found.get(key, 0) + self.runs[name]
        return sorted((Copy(*key, n) for key, n in found.items()), key=lambda c: -c.bytes * c.count)

    def _moves(self, op: Op) -> bool:
        """Whether an instruction only moves its operand, perhaps a part of it, into an array of its own."""
        if op.code != "fusion":
            return op.code in MOVES
        if "output_to_operand_aliasing" in op.args:
            return False
        ops = {o.name: o for o in self.computations[_NAME.search(dict(_CALLS.findall(op.args))["calls"])[1]]}  # type: ignore[index]
        last = next(o for o in ops.values() if o.root)
        while last.code == "bitcast" and (before := ops.get(_NAME.findall(last.args)[0])) is not None:
            last = before
        return last.code in MOVES or (last.code == "fusion" and self._moves(last))

    def _fused(self) -> set[str]:
        """Computations within fusions: what they compute is in no memory but their last result."""
        inside = [
            name
            for ops in self.computations.values()
            for op in ops
            if op.code == "fusion"
            for name in _NAME.findall(dict(_CALLS.findall(op.args))["calls"])
        ]
        return set(inside)


def _op(line: str) -> Op | None:
    m = re.match(r"\s+(ROOT )?%([\w.\-]+) = ", line)
    if m is None:
        return None
    start, depth = m.end(), 0
    for end in range(start, len(line)):  # a type has no space outside of parentheses
        depth += {"(": 1, ")": -1}.get(line[end], 0)
        if line[end] == " " and depth == 0:
            code, _, args = line[end + 1 :].partition("(")
            return Op(m[2], line[start:end], code, args, m[1] is not None)
    return None


def _shape(type: str) -> tuple[int, ...]:
    """Of the first array in a type."""
    array = _ARRAY.search(type)
    return tuple(int(d) for d in array[2].split(",") if d) if array else ()


def array_bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])  # type: ignore[index]
    return math.prod(int(d) for d in dims.split(",") if d) * bits // 8


@functools.cache
def group_size(args: str) -> int:
    """Devices that take part together, of a collective's replica_groups; 2 for a permutation."""
    if "source_target_pairs" in args:
        return 2
    if m := re.search(r"replica_groups=\[\d+,(\d+)\]", args):
        return int(m[1])
    if m := re.search(r"replica_groups=\{\{([\d,]*)\}", args):
        return m[1].count(",") + 1
    if m := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", args):
        sizes = dict(re.findall(r"['\"]?(\w+)['\"]?=(\d+)", m[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"\w+", m[2]))
    raise ValueError(f"replica_groups of a form that is not known: {args[:200]}")


def _received(kind: str, group: int, result: int) -> int:
    others = group - 1
    match kind:
        case "all-gather" | "all-to-all" | "ragged-all-to-all":
            return result * others // group
        case "reduce-scatter":
            return result * others
        case "all-reduce":
            return 2 * result * others // group
        case _:
            return result


def _axes(shape: Iterable[int]) -> tuple[int, ...]:
    """What no permutation changes: sizes in order, without ones."""
    return tuple(sorted(n for n in shape if n > 1))
