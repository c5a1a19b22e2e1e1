# SPDX-License-Identifier: Apache-2.0
"""Launching Triton kernels: on a GPU through jax-triton, interpreted on a CPU, or only recorded, to be compiled.

`launch` is the one way in for every op's `gpu.py`. `interpreted()` makes it run kernels in Triton's interpreter, and
`recorded()` makes it note them without running any (`offline.py` then compiles them for a GPU that is not here).
Importing this needs neither triton nor jax_triton.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax import ShapeDtypeStruct

from qwen_spmd.mesh.vary import vary_like

__all__ = [
    "Descriptor",
    "Launch",
    "ShapeDtypeStruct",
    "capability",
    "compiled",
    "interpreted",
    "launch",
    "processors",
    "recorded",
    "target",
]


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """An operand that the kernel gets as a tensor descriptor: contiguous, read in blocks of this shape (TMA).

    layout  of a block in shared memory, which Gluon kernels need to know
    """

    array: Any
    block_shape: tuple[int, ...]
    layout: Any = None


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch, as `launch` was asked for it; operands may be ShapeDtypeStructs."""

    kernel: Any
    operands: tuple[Any, ...]
    out: tuple[ShapeDtypeStruct, ...]
    alias: dict[int, int]
    grid: tuple[int, ...]
    warps: int
    stages: int
    options: dict[str, Any]
    constexprs: dict[str, Any]


def launch(
    kernel: Any,
    *operands: Any,
    out: tuple[ShapeDtypeStruct, ...],
    grid: tuple[int, ...],
    alias: dict[int, int] | None = None,
    warps: int = 4,
    stages: int = 3,
    options: dict[str, Any] | None = None,
    vary: tuple[tuple[Any, ...], ...] | None = None,
    **constexprs: Any,
) -> tuple[jax.Array, ...]:
    """Run a `@triton.jit` or `@gluon.jit` kernel on arrays of this device; works within jit, scan and shard_map.

    The kernel's parameters are the operands in order, then pointers to the outputs that are not aliased, then its
    constexprs. Traced scalars are pointers to one element. `alias` maps an operand's index to that of the output that
    is the same memory, updated in place when nobody else needs the operand; such an output has no parameter of its own.

    warps, stages  of Triton's pipeliner; `options` are further fields of triton's CUDAOptions, such as maxnreg

    vary  the operands that each output depends on; without it, on all. An output varies over the mesh axes that they
          vary over

    Outputs are not initialised.
    """
    arrays = [x.array if isinstance(x, Descriptor) else x for x in operands]
    run = _run.get()
    made = run(Launch(kernel, operands, out, alias or {}, grid, warps, stages, options or {}, constexprs))
    return tuple(vary_like(y, *like) for y, like in zip(made, vary or [arrays] * len(out), strict=True))


def capability() -> int:
    """Compute capability that kernels are configured and compiled for: 90 is Hopper, 100 Blackwell."""
    return _capability.get() or _of_first_gpu()


def compiled() -> bool:
    """Whether kernels are compiled, as those in Gluon must be, and not interpreted."""
    return not _interpreted.get()


def processors() -> int:
    """Streaming multiprocessors of that GPU: how many persistent programs run at once, one on each."""
    return {90: 132, 100: 148, 103: 148}.get(capability(), 132)


@contextlib.contextmanager
def target(capability: int) -> Iterator[None]:
    """Within, `capability()` is this, whatever devices are here. Programs for other devices are traced so."""
    token = _capability.set(capability)
    try:
        yield
    finally:
        _capability.reset(token)


@contextlib.contextmanager
def interpreted(as_capability: int = 90) -> Iterator[None]:
    """Within, what is traced or called runs its kernels in Triton's interpreter, configured for this capability."""
    from qwen_spmd.pallas.triton.interpret import interpret

    token, flag = _run.set(interpret), _interpreted.set(True)
    try:
        with target(as_capability):
            yield
    finally:
        _run.reset(token)
        _interpreted.reset(flag)


@contextlib.contextmanager
def recorded(as_capability: int) -> Iterator[list[Launch]]:
    """Within, launches are appended to the list that this gives, and return zeros."""
    launches: list[Launch] = []

    def record(l: Launch) -> tuple[jax.Array, ...]:
        launches.append(l)
        return tuple(jax.numpy.zeros(o.shape, o.dtype) for o in l.out)

    token = _run.set(record)
    try:
        with target(as_capability):
            yield launches
    finally:
        _run.reset(token)


@functools.cache
def _of_first_gpu() -> int:
    major, minor = jax.local_devices(backend="gpu")[0].compute_capability.split(".")
    return 10 * int(major) + int(minor)


def _jax_triton(l: Launch) -> tuple[jax.Array, ...]:
    from qwen_spmd.pallas.triton.jax_call import call

    return call(l, capability())


_run: ContextVar[Callable[[Launch], tuple[jax.Array, ...]]] = ContextVar("run", default=_jax_triton)
_interpreted: ContextVar[bool] = ContextVar("interpreted", default=False)
_capability: ContextVar[int | None] = ContextVar("capability", default=None)
