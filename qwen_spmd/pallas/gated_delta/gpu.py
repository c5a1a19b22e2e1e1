# SPDX-License-Identifier: Apache-2.0
"""What Gated DeltaNet launches on a GPU: the kernels of `kernels.py`, their work lists and tiles."""

import math

import jax
import jax.numpy as jnp
import triton

from qwen_spmd.pallas.gated_delta import kernels
from qwen_spmd.pallas.gated_delta.kernels import CHUNK
from qwen_spmd.pallas.pieces import cut
from qwen_spmd.pallas.triton import ShapeDtypeStruct, configs, launch, processors
from qwen_spmd.state import Ragged


def gated_delta(
    qkv_TC: jax.Array,
    b_TU: jax.Array,
    a_TU: jax.Array,
    conv_w_WC: jax.Array,
    a_log_U: jax.Array,
    dt_bias_U: jax.Array,
    conv: jax.Array,
    rec: jax.Array,
    layer: jax.Array,
    rows: Ragged,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    inputs = (qkv_TC, b_TU, a_TU, conv_w_WC, a_log_U, dt_bias_U)
    if rows.one_token:
        return _decode(inputs, conv, rec, None, layer, rows)
    o, conv, rec = _chunked(inputs, conv, rec, layer, rows)
    return _decode(inputs, conv, rec, o, layer, rows)


def _sizes(inputs: tuple[jax.Array, ...], rec: jax.Array) -> dict[str, int]:
    _, R, U, Y, Z = rec.shape
    W, C = inputs[3].shape
    return {"R": R, "C": C, "W": W, "J": (C - U * Z) // (2 * Y), "U": U, "Y": Y, "Z": Z}


def _decode(
    inputs: tuple[jax.Array, ...],
    conv: jax.Array,
    rec: jax.Array,
    o_TUZ: jax.Array | None,
    layer: jax.Array,
    rows: Ragged,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sequences with one token, and zeros in rows without a sequence; in `o_TUZ` if there are others."""
    sizes = _sizes(inputs, rec)
    qkv_TC, B = inputs[0], len(rows.kv_len_B)
    J, U, Z, C = (sizes[c] for c in "JUZC")
    # A value head in each program, less where that leaves processors without any.
    few = 2 * B * J < processors()
    rule = {"block_z": 64, "warps": 4, "split": U // J, "prefetch": 0, "stages": 1}
    if few:
        rule = {"block_z": 16, "warps": 1, "split": U // J * max(1, Z // 16), "prefetch": 1, "stages": 1}
    name = f"{rec.dtype.name} {J}/{U} heads of {sizes['Y']}x{Z}, {B} sequences"
    c = configs.choose("gated_delta", "decode", name, rule)
    block_z = min(Z, c["block_z"])
    split = math.gcd(c["split"], U // J * (Z // block_z))  # parts are of equal size
    live_B = (rows.q_len_B == 1).astype(jnp.int8)
    where = (rows.q_start_B, live_B, rows.read_slot_B, rows.write_slot_B, rows.fresh_B.astype(jnp.int8))
    given = () if o_TUZ is None else (o_TUZ,)
    out = tuple(ShapeDtypeStruct(x.shape, x.dtype) for x in (conv, rec))
    conv, rec, o_TUZ = launch(
        kernels.decode,
        *inputs,
        conv,
        rec,
        layer,
        *where,
        *given,
        out=(*out, ShapeDtypeStruct((len(qkv_TC), U, Z), qkv_TC.dtype)),
        alias={6: 0, 7: 1} | ({14: 2} if given else {}),
        grid=(B, J, split),
        warps=c["warps"],
        T=len(qkv_TC),
        B=B,
        ONE_TOKEN=rows.one_token,
        SPLIT=split,
        BLOCK_Z=block_z,
        PREFETCH=bool(c["prefetch"]),
        STAGES=c["stages"],
        **sizes,
    )
    if split > 1:
        (conv,) = launch(
            kernels.shift_all,
            qkv_TC,
            layer,
            *where,
            conv,
            out=out[:1],
            alias={7: 0},
            grid=(B, triton.cdiv(C, 1024)),
            R=sizes["R"],
            C=C,
            W=sizes["W"],
            BLOCK_C=1024,
        )
    return o_TUZ, conv, rec


def _chunked(
    inputs: tuple[jax.Array, ...], conv: jax.Array, rec: jax.Array, layer: jax.Array, rows: Ragged
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sequences with several tokens; the other rows are left as they are."""
    sizes = _sizes(inputs, rec)
    qkv_TC, (T, B) = inputs[0], (len(inputs[0]), len(rows.kv_len_B))
    J, U, Y, Z = (sizes[c] for c in "JUYZ")
    dtype = qkv_TC.dtype
    ends_B = cut(rows.q_start_B[:-1], jnp.where(rows.q_len_B > 1, rows.q_len_B, 0), CHUNK).ends_G
    fresh_B = rows.fresh_B.astype(jnp.int8)
    most = T // CHUNK + min(B, T // 2 + 1)  # chunks: those that are full, and a last one of each sequence
    name = f"{dtype.name} {J}/{U} heads of {Y}x{Z}"
    of_heads = {"B": B, "BLOCK_B": triton.next_power_of_2(B), "J": J, "U": U, "Y": Y, "Z": Z}
    of_key = ShapeDtypeStruct((most, J, CHUNK, Y), dtype)
    of_value = ShapeDtypeStruct((most, U, CHUNK, Z), dtype)
    square = ShapeDtypeStruct((most, U, CHUNK, CHUNK), dtype)
    each = ShapeDtypeStruct((most, U, CHUNK), jnp.float32)
    c = configs.choose("gated_delta", "convolve", name, {"warps": 8})
    q, k, v = launch(
        kernels.convolve,
        qkv_TC,
        inputs[3],
        conv,
        layer,
        rows.q_start_B,
        ends_B,
        rows.read_slot_B,
        fresh_B,
        out=(of_key, of_key, of_value),
        grid=(2 + U // J, J, most),
        warps=c["warps"],
        R=sizes["R"],
        C=sizes["C"],
        W=sizes["W"],
        **of_heads,
    )
    # float32 products go without the matrix unit, and take more registers than there are.
    c = configs.choose("gated_delta", "chunks", name, {"warps": 16 if dtype == jnp.float32 else 4})
    qk, inverse, decay, to_end = launch(
        kernels.chunks,
        inputs[1],
        inputs[2],
        *inputs[4:],
        rows.q_start_B,
        ends_B,
        q,
        k,
        out=(square, square, each, each),
        grid=(U, most),
        warps=c["warps"],
        **{name: size for name, size in of_heads.items() if name != "Z"},
    )
    # A single sequence should occupy most processors, too.
    few = 2 * U * triton.cdiv(Z, 64) < processors()
    rule = {"block_z": 32 if few else 64, "warps": 4, "stages": 3}
    if dtype == jnp.float32:  # would not fit into shared memory
        rule |= {"block_z": 16, "stages": 1, "warps": 8}
    c = configs.choose("gated_delta", "recurrence", name, rule)
    block_z = min(Z, c["block_z"])
    pools = tuple(ShapeDtypeStruct(x.shape, x.dtype) for x in (conv, rec))
    conv, rec, o_TUZ = launch(
        kernels.recurrence,
        q,
        k,
        qk,
        inverse,
        v,
        decay,
        to_end,
        qkv_TC,
        layer,
        rows.q_start_B,
        ends_B,
        rows.read_slot_B,
        rows.write_slot_B,
        fresh_B,
        conv,
        rec,
        out=(*pools, ShapeDtypeStruct((T, U, Z), dtype)),
        alias={14: 0, 15: 1},
        grid=(Z // block_z, U, B),
        warps=c["warps"],
        stages=c["stages"],
        B=B,
        BLOCK_Z=block_z,
        **sizes,
    )
    return o_TUZ, conv, rec
