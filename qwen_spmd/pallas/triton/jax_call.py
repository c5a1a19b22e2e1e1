# SPDX-License-Identifier: Apache-2.0
"""Calls through jax-triton, and what its release 0.4.1 needs to work here. Nothing else imports jax_triton.

Each repair applies only where it is missing:

- triton before 3.7 lacks names that jax_triton imports; without them it takes stubs for the whole NVIDIA backend;
- from jax 0.12 on, rules of dead-code elimination take a third argument;
- warp-specialised kernels run with more threads than num_warps says: the PTX's own .reqntid counts;
- kernels in Gluon go through the passes of those in Triton, which they must not;
- XLA assembles the PTX with the ptxas it finds, which may be older than the one triton writes for: the PTX version is
  capped.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

import jax
import triton.backends.nvidia.compiler as nvidia_compiler
import triton.backends.nvidia.driver as nvidia_driver

if TYPE_CHECKING:
    from qwen_spmd.pallas.triton import Launch

NEWEST_PTX = 90
"""PTX version that every ptxas of CUDA 13 takes."""


def _prepare_triton() -> None:
    """Before jax_triton is imported."""
    if not hasattr(nvidia_driver, "TMA_TF32"):
        nvidia_driver.TMA_TF32 = 11
    if not hasattr(nvidia_driver, "TMA_DTYPE_DEVICE_TO_HOST"):
        nvidia_driver.TMA_DTYPE_DEVICE_TO_HOST = {i: i for i in range(16)} | {8: 10, 9: 8, 10: 9}
    of_cuda = nvidia_compiler.ptx_get_version
    nvidia_compiler.ptx_get_version = lambda cuda_version: min(NEWEST_PTX, of_cuda(cuda_version))


_prepare_triton()

import jax_triton  # type: ignore[import-not-found]  # noqa: E402
from jax._src.interpreters import partial_eval  # noqa: E402
from jax_triton import triton_lib  # type: ignore[import-not-found]  # noqa: E402


class _KernelLibrary:
    """jaxlib's, with the number of warps that the PTX asks for."""

    def __init__(self, lib: Any):
        self._lib = lib

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)

    def TritonKernel(self, name: str, num_warps: int, num_ctas: int, smem: int, ptx: str, *rest: Any) -> Any:
        threads = re.search(r"\.reqntid\s+(\d+)", ptx)
        if threads:
            num_warps = max(1, int(threads.group(1)) // 32)
        return self._lib.TritonKernel(name, num_warps, num_ctas, smem, ptx, *rest)


class _GluonBackend:
    """Triton's, which lowers what a kernel in Gluon says and changes no more."""

    def __init__(self, backend: Any):
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def make_ttir(self, module: Any, *_: Any) -> Any:
        return module

    def make_ttgir(self, module: Any, *rest: Any) -> Any:
        return self._backend.gluon_to_ttgir(module, *rest)


def _prepare_jax_triton() -> None:
    def keep_all(used_outs: Any, *rest: Any) -> Any:
        eqn = rest[-1]  # (used, eqn) up to jax 0.11, (used, live, eqn) from 0.12
        return [True] * len(eqn.invars), eqn

    compile_to_ptx = triton_lib.compile_ttir_to_ptx_inplace

    def compile_either(module: Any, backend: Any, *rest: Any) -> Any:
        in_gluon = module.get_int_attr("ttg.num-warps") is not None  # which is Triton's only after its first passes
        return compile_to_ptx(module, _GluonBackend(backend) if in_gluon else backend, *rest)

    triton_lib.compile_ttir_to_ptx_inplace = compile_either
    partial_eval.dce_rules[triton_lib.triton_kernel_call_p] = keep_all
    meta = getattr(triton_lib, "TensorDescMeta", None)
    if meta is not None:
        meta.__required_keys__ = frozenset(meta.__required_keys__) - {"is_im2col"}
    if triton_lib.triton_kernel_call_lib is not None:
        triton_lib.triton_kernel_call_lib = _KernelLibrary(triton_lib.triton_kernel_call_lib)


_prepare_jax_triton()


def call(l: Launch, capability: int) -> tuple[jax.Array, ...]:
    """Within the program that is being traced, for GPUs of this capability."""
    from qwen_spmd.pallas.triton import Descriptor

    def operand(x: Any) -> Any:
        if isinstance(x, Descriptor):
            return jax_triton.TensorDescriptor.from_array(x.array, x.block_shape, x.layout)
        return x

    # jaxlib hands results to the kernel in order, and those that are aliased do not count only at the end.
    order = sorted(range(len(l.out)), key=lambda i: i in l.alias.values())
    with warnings.catch_warnings():
        # The other way of aliasing, jax.Ref, cannot pass through a scan's carry.
        warnings.simplefilter("ignore", DeprecationWarning)
        made = jax_triton.triton_call(
            *map(operand, l.operands),
            kernel=l.kernel,
            out_type=tuple(l.out[i] for i in order),
            grid=l.grid,  # type: ignore[arg-type]
            name="_".join([*l.kernel.__module__.split(".")[-2:-1], l.kernel.__name__]),  # the op's first, for profiles
            num_warps=l.warps,
            num_stages=l.stages,
            compute_capability=capability,
            backend_options=l.options,
            # What is updated in place must happen once: XLA must not compute it again to save memory.
            has_side_effect=bool(l.alias),
            input_output_aliases={operand: order.index(output) for operand, output in l.alias.items()},
            **l.constexprs,
        )
    return tuple(made[order.index(i)] for i in range(len(l.out)))
