# SPDX-License-Identifier: Apache-2.0
"""What the ops launch at full size compiles for Hopper and Blackwell, and into the instructions that it should."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from qwen_spmd.pallas.add_norm import cases as add_norm
from qwen_spmd.pallas.expert_sort import cases as expert_sort
from qwen_spmd.pallas.expert_sum import cases as expert_sum
from qwen_spmd.pallas.gated_delta import cases as gated_delta
from qwen_spmd.pallas.grouped_mlp import cases as grouped_mlp
from qwen_spmd.pallas.linear import cases as linear
from qwen_spmd.pallas.paged_attention import cases as paged_attention
from qwen_spmd.pallas.router import cases as router
from qwen_spmd.pallas.triton import recorded
from qwen_spmd.pallas.triton.offline import SHARED_LIMIT, compile_launch, launches

MATRIX_UNIT = {90: "HGMMA", 100: "UTC"}
"""How machine instructions of the unit for whole warp groups begin: wgmma and tcgen05."""

LARGE = {"prefill", "chunks", "recurrence", "grouped_matmul", "grouped_matmul_mx", "gate_up_matmul"}
"""Kernels whose products are large enough for it."""


def short(case):
    """The same program: lengths of contexts are in no shape but the pool's."""
    seqs = tuple((q, min(k, q + 300)) for q, k in getattr(case, "seqs", ()))
    return dataclasses.replace(case, seqs=seqs) if seqs else case


def full(module, name):
    return short(next(case for case in module.CASES if case.name == name))


FEW = [
    (grouped_mlp, "Qwen3, EP=8, 1024 rows, uniform"),
    (paged_attention, "Qwen3.5 mixed"),
    (gated_delta, "Qwen3.5 short prefills"),
    (linear, "Qwen3.5-35B-A3B, delta, 64 rows"),
    (add_norm, "Qwen3.5-35B-A3B"),
]
ALL = [
    *((m, case.name) for m in (grouped_mlp, paged_attention, gated_delta) for case in m.CASES if case.full),
    *((m, case.name) for m in (linear, add_norm) for case in m.CASES if case.full),
    (expert_sort, "Qwen3.5, 8192 rows"),
    (expert_sort, "64 rows of 256"),
    (expert_sum, "Qwen3.5, 1024 rows"),
    (router, "Qwen3.5, 8192 rows"),
]


def lowest(module, name):
    return getattr(next(case for case in module.CASES if case.name == name), "capability", 90)


def parameter(module, name, capability):
    op = module.__name__.split(".")[-2]
    marks = () if (module, name) in FEW and capability == 90 else pytest.mark.slow
    return pytest.param(module, name, capability, id=f"{op}: {name}, sm_{capability}", marks=marks)


@pytest.mark.parametrize(
    ("module", "name", "capability"), [parameter(*m, c) for m in ALL for c in MATRIX_UNIT if c >= lowest(*m)]
)
def test_full_size_kernels_compile(module, name, capability):
    pytest.importorskip("triton")
    found = launches(module, full(module, name), capability)
    assert found
    for launch in found:
        kernel = compile_launch(launch, capability)
        assert kernel.shared <= SHARED_LIMIT, kernel.kernel
        assert kernel.tensor_columns <= 512, kernel.kernel
        if capability == 90:
            assert kernel.spills == 0, (kernel.kernel, kernel.registers)
        if kernel.kernel in LARGE:
            used = kernel.matrix_instructions()
            assert any(i.startswith(MATRIX_UNIT[capability]) for i in used), (kernel.kernel, used)


def test_products_of_rows_and_weights_of_two_dtypes_compile():
    pytest.importorskip("triton")
    ws = tuple(jax.ShapeDtypeStruct((256, width, 1), jnp.float32) for width in (64, 32))
    w_back = jax.ShapeDtypeStruct((64, 1, 256), jnp.float32)
    x = linear.Inputs(jax.ShapeDtypeStruct((8, 256), jnp.bfloat16), ws, w_back)
    with recorded(90) as found:
        jax.eval_shape(lambda x: linear.run(x, "gpu"), x)
    assert len(found) == 3
    assert all(compile_launch(launch, 90).spills == 0 for launch in found)


BLOCK_SCALED = {
    "mxfp8": "kind::mxf8f6f4.block_scale",
    "mxfp4": "kind::mxf8f6f4.block_scale",
    "nvfp4": "kind::mxf4nvf4.block_scale",
}


@pytest.mark.parametrize("format", BLOCK_SCALED)
def test_blackwell_multiplies_microscaled_as_they_are(format):
    pytest.importorskip("triton")
    found = launches(grouped_mlp, full(grouped_mlp, f"Qwen3.5, EP=8, 640 rows, {format}"), 100)
    assert [l.constexprs["GATED"] for l in found] == [True, False]
    for launch in found:
        kernel = compile_launch(launch, 100)
        assert BLOCK_SCALED[format] in kernel.ptx
        assert kernel.spills == 0 and kernel.shared <= SHARED_LIMIT and kernel.tensor_columns <= 512


@pytest.mark.parametrize("format", BLOCK_SCALED)
def test_hopper_refuses_microscaled(format):
    pytest.importorskip("triton")
    with pytest.raises(
        ValueError, match=f"{format} weights need compute capability 10.0 .Blackwell. or above, not 9.0"
    ):
        launches(grouped_mlp, next(case for case in grouped_mlp.CASES if case.format == format), 90)


def test_gate_and_up_of_many_rows_have_warps_of_two_kinds_on_hopper():
    pytest.importorskip("triton")
    gate_up, down = launches(grouped_mlp, full(grouped_mlp, "Qwen3, EP=8, 8192 rows, uniform"), 90)
    assert (gate_up.kernel.__name__, down.kernel.__name__) == ("gate_up_matmul", "grouped_matmul")
    kernel = compile_launch(gate_up, 90)
    assert kernel.spills == 0
    assert kernel.shared <= SHARED_LIMIT
    assert any(i.startswith("HGMMA.64x256") for i in kernel.instructions)
    assert kernel.instructions["USETMAXREG.DEALLOC.CTAPOOL"]  # registers go from those that load to those that multiply
