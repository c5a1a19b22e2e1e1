# SPDX-License-Identifier: Apache-2.0
"""Triton kernels on a CPU, in Triton's own interpreter, on numpy arrays: for tests.

It does not see races, limits of shared memory and registers, layouts, or the rounding of tensor cores; an access out of
bounds may crash the process. What no output writes holds NaN (or the largest integer), so that a gap shows.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import triton.language as tl
from jax.core import Tracer
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

if TYPE_CHECKING:
    from qwen_spmd.pallas.triton import Launch

_LOCK = threading.RLock()  # the interpreter patches triton.language while it runs
_TYPES = {
    "bfloat16": "bf16",
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint64": "u64",
    "uint32": "u32",
    "uint16": "u16",
    "uint8": "u8",
    "bool": "i1",
}


class _DType(str):
    """Triton's name of a dtype, with the size that tensor descriptors ask for."""

    itemsize: int


class _Tensor:
    """As much of a torch tensor as the interpreter's launcher asks for, over a numpy array that it works on."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, _DType(_TYPES[array.dtype.name])
        self.dtype.itemsize = array.itemsize
        self.shape = array.shape

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> _Tensor:
        return self

    def cpu(self) -> _Tensor:
        return self

    def copy_(self, other: Any) -> None:
        pass

    def new_empty(self, *_: Any, **__: Any) -> _Tensor:
        return _Tensor(self.array)

    def set_(self, *_: Any) -> _Tensor:
        return self

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.array.itemsize for s in self.array.strides)

    def element_size(self) -> int:
        return self.array.itemsize


def interpret(l: Launch) -> tuple[jax.Array, ...]:
    """Run a launch: at once on concrete arrays, through a callback within a traced program."""
    from qwen_spmd.pallas.triton import Descriptor

    blocks = [x.block_shape if isinstance(x, Descriptor) else None for x in l.operands]
    arrays = [x.array if isinstance(x, Descriptor) else x for x in l.operands]

    def run(*arrays: Any) -> tuple[np.ndarray, ...]:
        with _LOCK, _helpers_too():
            _repair()
            buffers = [np.array(a, order="C", copy=True) for a in arrays]
            same_as = {output: operand for operand, output in l.alias.items()}
            outputs = [buffers[same_as[i]] if i in same_as else _poison(o) for i, o in enumerate(l.out)]
            fresh = [o for i, o in enumerate(outputs) if i not in same_as]
            names = list(inspect.signature(l.kernel.fn).parameters)
            operands = [
                _Tensor(b) if block is None else _descriptor(b, block) for b, block in zip(buffers, blocks, strict=True)
            ]
            bound = dict(zip(names, [*operands, *map(_Tensor, fresh)], strict=False))
            InterpretedFunction(l.kernel.fn)[l.grid](**bound, **l.constexprs)
            return tuple(outputs)

    if any(isinstance(a, Tracer) for a in arrays):
        return tuple(jax.pure_callback(run, l.out, *arrays))
    return tuple(map(jnp.asarray, run(*(np.asarray(a) for a in arrays))))


def _poison(s: jax.ShapeDtypeStruct) -> np.ndarray:
    if jnp.issubdtype(s.dtype, jnp.floating):
        return np.full(s.shape, np.nan, s.dtype)
    return np.full(s.shape, True if s.dtype == bool else np.iinfo(s.dtype).max, s.dtype)


def _descriptor(array: np.ndarray, block_shape: tuple[int, ...]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    tensor = _Tensor(array)
    return TensorDescriptor(tensor, list(array.shape), list(tensor.stride()), list(block_shape))


@contextlib.contextmanager
def _helpers_too() -> Iterator[None]:
    """@triton.jit functions that a kernel calls run interpreted as well."""
    made: dict[int, InterpretedFunction] = {}

    def call(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        if id(self) not in made:
            made[id(self)] = InterpretedFunction(self.fn)
        return made[id(self)](*args, **kwargs)

    compiled, JITFunction.__call__ = JITFunction.__call__, call
    try:
        yield
    finally:
        JITFunction.__call__ = compiled


def _to_float32(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even, as uint16."""
    return np.asarray(x, np.float32).astype(jnp.bfloat16).view(np.uint16)


def _scaled(lines: np.ndarray, scales: TensorHandle, kind: Any) -> np.ndarray:
    """[lines, elements] in float32: bytes that hold one e4m3 or two e2m1, the first in the low bits, times scales."""
    values = lines.view(np.uint8)
    if kind.name == "E2M1":
        codes = np.stack([values & 15, values >> 4], -1).reshape(len(values), -1)
        values = codes.astype(np.uint8).view(jnp.float4_e2m1fn)
    else:
        assert kind.name == "E4M3", kind
        values = values.view(jnp.float8_e4m3fn)
    of = jnp.float8_e4m3fn if scales.dtype.scalar == tl.float8e4nv else jnp.float8_e8m0fnu
    each = scales.data.view(np.uint8).view(of).astype(np.float32)
    return values.astype(np.float32) * np.repeat(each, values.shape[1] // each.shape[1], 1)


_repaired = False


def _repair() -> None:
    """The interpreter holds bfloat16 as uint16, and its arithmetic computes on the integers: go through float32.

    And float32 is cut off to fewer bits where machines round; a scalar comparison leaves integers in a mask, which
    loads and stores refuse; and scaled products take scales e4m3 for e8m0.
    """
    global _repaired
    if _repaired:
        return
    _repaired = True
    dot, binary, ternary = (getattr(InterpreterBuilder, n) for n in ("create_dot", "binary_op", "ternary_op"))

    def is_bf16(h: TensorHandle) -> bool:
        return h.dtype.scalar == tl.bfloat16 and h.data.dtype == np.uint16

    def wide(h: TensorHandle) -> TensorHandle:
        return TensorHandle(_to_float32(h.data), tl.float32) if is_bf16(h) else h

    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *rest: Any) -> Any:
        return dot(self, wide(a), wide(b), d, *rest)

    def binary_op(self: Any, a: TensorHandle, b: TensorHandle, op: Any) -> Any:
        if not (is_bf16(a) and is_bf16(b)):
            return binary(self, a, b, op)
        with np.errstate(all="ignore"):
            made = op(_to_float32(a.data), _to_float32(b.data))
        return TensorHandle(made if made.dtype == np.bool_ else _to_bfloat16(made), a.dtype.scalar)

    def ternary_op(self: Any, a: TensorHandle, b: TensorHandle, c: TensorHandle, op: Any) -> Any:
        if op is np.where or not (is_bf16(a) and is_bf16(b) and is_bf16(c)):
            return ternary(self, a, b, c, op)
        return TensorHandle(_to_bfloat16(op(*(_to_float32(h.data) for h in (a, b, c)))), c.dtype.scalar)

    convert = interpreter._convert_float

    def convert_float(x: np.ndarray, of: Any, to: Any, rounding: Any) -> np.ndarray:
        if of == tl.float32 and to == tl.bfloat16:
            return _to_bfloat16(x)
        if of == tl.float32 and to == tl.float8e4nv:
            return np.asarray(x, np.float32).astype(jnp.float8_e4m3fn).view(np.uint8)
        return convert(x, of, to, rounding)

    interpreter._convert_float = convert_float
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def truth(mask: TensorHandle) -> TensorHandle:
        return TensorHandle(mask.data.astype(np.bool_), tl.int1)

    def create_masked_load(self: Any, pointers: TensorHandle, mask: TensorHandle, *rest: Any, **named: Any) -> Any:
        return load(self, pointers, truth(mask), *rest, **named)

    def create_masked_store(self: Any, pointers: TensorHandle, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return store(self, pointers, value, truth(mask), *rest, **named)

    def create_dot_scaled(
        self: Any, a: TensorHandle, a_scales: Any, a_type: Any, b: TensorHandle, b_scales: Any, b_type: Any, *rest: Any
    ) -> TensorHandle:
        """Scales are [lines, groups] of both; the contracted axis is a's last and b's first."""
        _, a_packed, b_packed, total = rest
        assert a_packed and b_packed, "two values a byte along the contracted axis only"
        with np.errstate(all="ignore"):
            product = _scaled(a.data, a_scales, a_type) @ _scaled(b.data.T, b_scales, b_type).T
        return TensorHandle(product + total.data, tl.float32)

    for method in (create_dot, create_dot_scaled, binary_op, ternary_op, create_masked_load, create_masked_store):
        setattr(InterpreterBuilder, method.__name__, method)
