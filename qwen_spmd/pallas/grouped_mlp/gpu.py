# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls in Triton: gate and up with SwiGLU, then down, each in one launch over the experts that have rows.

A tile is BLOCK_R rows of one expert by BLOCK_O of its outputs. Where an expert has few rows, the product is computed
transposed, with the weights on the side of the matrix unit that takes 64 at least. Gate and up of many rows in bfloat16
are another kernel on Hopper, in Gluon.

Microscaled weights have a kernel of their own, for Blackwell's block-scaled products. Rows are quantised before it,
each once: XLA may fuse that into what made them.
"""

import jax
import jax.numpy as jnp
import triton

from qwen_spmd.pallas.grouped_mlp import hopper
from qwen_spmd.pallas.grouped_mlp.kernels import AFTER, BEFORE, EACH, NEVER, grouped_matmul
from qwen_spmd.pallas.grouped_mlp.kernels_mx import grouped_matmul_mx
from qwen_spmd.pallas.scaled import GROUP, Microscaled, Scaled
from qwen_spmd.pallas.triton import Descriptor, ShapeDtypeStruct, capability, compiled, configs, launch, processors

Weights = jax.Array | Scaled | Microscaled


def grouped_mlp(
    x_TD: jax.Array,
    rows_R: jax.Array,
    sizes_E: jax.Array,
    w_gate: Weights,
    w_up: Weights,
    w_down: Weights,
    layer: jax.Array,
    expected: int,
) -> jax.Array:
    h_RM = gate_up(x_TD, rows_R, sizes_E, w_gate, w_up, layer, expected)
    return down(h_RM, rows_R, sizes_E, w_down, layer, expected)


def gate_up(
    x_TD: jax.Array,
    rows_R: jax.Array,
    sizes_E: jax.Array,
    w_gate: Weights,
    w_up: Weights,
    layer: jax.Array,
    expected: int,
) -> jax.Array:
    """silu(x[rows] w_gate) * (x[rows] w_up), [R, M]."""
    return _grouped("gate_up", x_TD, rows_R, sizes_E, w_gate, w_up, layer, expected)


def down(
    h_RM: jax.Array, rows_R: jax.Array, sizes_E: jax.Array, w_down: Weights, layer: jax.Array, expected: int
) -> jax.Array:
    """h w_down, [R, D]."""
    return _grouped("down", h_RM, rows_R, sizes_E, w_down, None, layer, expected)


def _grouped(
    kernel: str,
    x: jax.Array,
    rows_R: jax.Array,
    sizes_E: jax.Array,
    w: Weights,
    w_up: Weights | None,
    layer: jax.Array,
    expected: int,
) -> jax.Array:
    if isinstance(w, Microscaled):
        return _microscaled(kernel, x, rows_R, sizes_E, w, w_up, layer, expected)
    _, E, I, O = w.shape
    R = rows_R.shape[0]
    values, block = (w.values, w.block) if isinstance(w, Scaled) else (w, (0, 0))
    c = _config(kernel, x, values, expected)
    if c["hopper"] and _on_hopper(x, values) and w_up is not None:
        return _gate_up_on_hopper(x, rows_R, sizes_E, values, w_up, layer)
    block_o, block_i, block_r = c["block_o"], c["block_i"], c["block_r"]
    when = NEVER
    if block[0]:
        when = EACH if block[0] % block_i else BEFORE if c["scale_weights"] else AFTER
    # Without edges in the way; rows beyond an expert's are another's and are not kept.
    tma = bool(c["tma"]) and I % block_i == 0 and O % block_o == 0
    tma_rows = bool(c["tma_rows"]) and tma and w_up is None and R >= block_r and x.dtype == jnp.bfloat16

    def operands(w: Weights) -> tuple:
        """(weights, scales); an array that is not read stands for scales where there are none."""
        values, scales = (w.values, w.scales) if isinstance(w, Scaled) else (w, sizes_E)
        return (Descriptor(values.reshape(-1, O), (block_i, block_o)) if tma else values), scales

    (w_0, s_0), (w_1, s_1) = operands(w), operands(w if w_up is None else w_up)
    (out,) = launch(
        grouped_matmul,
        Descriptor(x, (block_r, block_i)) if tma_rows else x,
        rows_R,
        sizes_E,
        layer,
        w_0,
        w_1,
        s_0,
        s_1,
        out=(ShapeDtypeStruct((R, O), x.dtype),),
        grid=_programs(R, E, O, block_r, block_o, c["programs"]),
        warps=c["warps"],
        stages=c["stages"],
        E=E,
        I=I,
        O=O,
        GATED=w_up is not None,
        SWAP=bool(c["swap"]),
        TMA=tma,
        TMA_ROWS=tma_rows,
        SCALE_I=block[0],
        SCALE_O=block[1],
        WHEN=when.value,
        BLOCK_E=triton.next_power_of_2(E),
        BLOCK_R=block_r,
        BLOCK_I=block_i,
        BLOCK_O=block_o,
        FLATTEN=bool(c["flatten"]),
    )
    return out


def _programs(R: int, E: int, O: int, block_r: int, block_o: int, each: int) -> tuple[int]:
    """`each` for a processor, but no more than tiles: one of each expert, and those that are full, by columns."""
    return (min((min(R, E) + R // block_r) * triton.cdiv(O, block_o), each * processors()),)


def _microscaled(
    kernel: str,
    x: jax.Array,
    rows_R: jax.Array,
    sizes_E: jax.Array,
    w: Microscaled,
    w_up: Microscaled | None,
    layer: jax.Array,
    expected: int,
) -> jax.Array:
    if capability() < 100:
        raise ValueError(
            f"{w.format} weights need compute capability 10.0 (Blackwell) or above, not {capability() / 10}, which "
            "takes bfloat16, float32, and 8-bit weights with a scale for each block"
        )
    _, E, I, O = w.shape
    R = rows_R.shape[0]
    quantised = w.rows(x)
    c = _config_mx(kernel, w, expected)
    block_o, block_i, block_r = c["block_o"], c["block_i"], c["block_r"]
    x_pack, w_pack = (1 if q.values.dtype == jnp.float8_e4m3fn else 2 for q in (quantised, w))
    # Beside e4m3, e2m1 lie in shared memory with gaps, which jax_triton's descriptors do not make.
    tma = bool(c["tma"]) and x_pack == w_pack and I % block_i == 0 and O % block_o == 0

    def operands(w: Microscaled) -> tuple:
        values = w.values.reshape(-1, I // w_pack)
        return Descriptor(values, (block_o, block_i // w_pack)) if tma else values, *_scales(w)

    (w_0, s_0, scale_0), (w_1, s_1, scale_1) = operands(w), operands(w if w_up is None else w_up)
    (out,) = launch(
        grouped_matmul_mx,
        quantised.values,
        quantised.scales,
        *_scales(quantised),
        rows_R,
        sizes_E,
        layer,
        w_0,
        w_1,
        s_0,
        s_1,
        scale_0,
        scale_1,
        out=(ShapeDtypeStruct((R, O), x.dtype),),
        grid=_programs(R, E, O, block_r, block_o, c["programs"]),
        warps=c["warps"],
        stages=c["stages"],
        E=E,
        I=I,
        O=O,
        GATED=w_up is not None,
        TMA=tma,
        X_PACK=x_pack,
        W_PACK=w_pack,
        GROUP=GROUP[w.format],
        SCALED=w.scale is not None,
        BLOCK_E=triton.next_power_of_2(E),
        BLOCK_R=block_r,
        BLOCK_I=block_i,
        BLOCK_O=block_o,
    )
    return out


def _on_hopper(x: jax.Array, w: jax.Array) -> bool:
    """Whether that kernel can run here and takes these."""
    _, _, I, O = w.shape
    divides = I % hopper.BLOCK_I.value == 0 and O % hopper.BLOCK_O.value == 0
    return capability() == 90 and compiled() and x.dtype == w.dtype == jnp.bfloat16 and divides


def _gate_up_on_hopper(
    x_TD: jax.Array, rows_R: jax.Array, sizes_E: jax.Array, w_gate: jax.Array, w_up: Weights, layer: jax.Array
) -> jax.Array:
    assert not isinstance(w_up, Scaled)
    _, E, I, O = w_gate.shape
    R = rows_R.shape[0]
    block_r, block_i, block_o = hopper.BLOCK_R.value, hopper.BLOCK_I.value, hopper.BLOCK_O.value
    (out,) = launch(
        hopper.gate_up_matmul,
        x_TD,
        rows_R,
        sizes_E,
        layer,
        *(Descriptor(w.reshape(-1, O), (block_i, block_o), hopper.LAYOUT.value) for w in (w_gate, w_up)),
        out=(ShapeDtypeStruct((R, O), x_TD.dtype),),
        grid=_programs(R, E, O, block_r, block_o, 1),
        warps=hopper.WARPS.value,
        options=hopper.REGISTERS,
        E=E,
        I=I,
        O=O,
        BLOCK_E=max(32, triton.next_power_of_2(E)),
    )
    return out


def _scales(w: Microscaled) -> tuple[jax.Array, jax.Array]:
    """Of groups and of matrices; an array that is not read stands for one that is None."""
    return w.scales, w.scales if w.scale is None else w.scale


def _config_mx(kernel: str, w: Microscaled, expected: int) -> configs.Config:
    """By the mean number of an expert's rows; tiles have room for twice as many. Nobody has measured these."""
    _, E, I, O = w.shape
    mean = triton.next_power_of_2(max(1, triton.cdiv(expected, E)))
    block_r = min(max(16, 2 * mean), 128)
    rule = {"tma": 1, "block_r": block_r, "block_o": 128, "block_i": 128, "warps": 4, "stages": 4}
    if block_r < 64:
        rule |= {"programs": 2}
    else:
        rule |= {"programs": 1, "warps": 8 if kernel == "gate_up" else 4}
    return configs.choose("grouped_mlp", kernel, f"{w.format} {I}x{O}, {mean} rows of {E}", rule)


def _config(kernel: str, x: jax.Array, w: jax.Array, expected: int) -> configs.Config:
    """By the mean number of an expert's rows."""
    _, E, I, O = w.shape
    mean = triton.next_power_of_2(max(1, triton.cdiv(expected, E)))
    rule = {"tma": 1, "tma_rows": 1, "flatten": 0, "scale_weights": 1}
    rule |= {"hopper": int(kernel == "gate_up" and mean >= 512)}
    rule |= (_many_rows if mean > 32 else _few_rows)(kernel, mean, min(E, expected), O, w.dtype.itemsize)
    c = configs.choose("grouped_mlp", kernel, f"{w.dtype.name} {I}x{O}, {mean} rows of {E}", rule)
    fit = lambda size, block: min(block, max(16, triton.next_power_of_2(size)))  # noqa: E731
    c = c | {"block_o": fit(O, c["block_o"]), "block_i": fit(I, c["block_i"])}
    if O % c["block_o"] and O % 32 == 0:  # smaller tiles cost less than edges, which rule out tensor descriptors
        c |= {"block_o": O & -O}
    if x.dtype == jnp.float32:  # twice the bytes; computed without the matrix unit
        c |= {"block_r": min(32, c["block_r"]), "block_o": min(64, c["block_o"]), "block_i": 16, "stages": 2}
    elif w.dtype.itemsize > x.dtype.itemsize:
        c |= {"block_i": c["block_i"] // 2}
    return c


def _few_rows(kernel: str, mean: int, experts: int, O: int, itemsize: int) -> configs.Config:
    """Weights are read at the memory's speed: small tiles, several programs a processor. Half the experts have more
    rows than the mean, and some have far more: tiles have room for twice as many, where that costs nothing."""
    block_r = 16 if mean <= 2 else 32 if mean <= 8 else 64
    rule = {"block_r": block_r, "block_o": 64, "block_i": 64, "warps": 4, "stages": 4, "swap": 1, "programs": 2}
    if itemsize == 1:  # converting them needs the registers
        rule |= {"block_r": min(32, block_r)}
        if kernel == "gate_up":
            rule |= {"block_i": 128, "stages": 3}
        else:
            rule |= {"block_o": 128, "programs": 3, "scale_weights": 0}
    elif kernel == "gate_up":
        if experts * O < 64 * processors():  # not a tile for each processor
            rule |= {"block_o": 32, "block_i": 128, "swap": 0}
        elif block_r == 64:
            rule |= {"stages": 3, "programs": 3}
    elif experts * O >= 2 * 128 * processors():
        rule |= {"block_o": 128, "block_i": 128, "stages": 2, "programs": 3 if block_r == 16 else 2}
    return rule


def _many_rows(kernel: str, mean: int, experts: int, O: int, itemsize: int) -> configs.Config:
    rule = {"block_r": 128, "block_o": 128, "block_i": 64, "warps": 8, "stages": 4, "swap": 0, "programs": 1}
    if itemsize == 1:
        rule |= {"swap": 1}
    elif kernel == "down" and O % 256 == 0:
        rule |= {"block_o": 256, "stages": 3, "flatten": 1}
    elif kernel == "gate_up" and mean <= 128:  # still bound by memory
        rule |= {"block_o": 64, "warps": 4, "stages": 3, "programs": 2}
    return rule
