# SPDX-License-Identifier: Apache-2.0
"""What paged attention launches on a GPU: the kernels of `kernels.py`, their work lists and tiles."""

import jax
import jax.numpy as jnp
import triton

from qwen_spmd.pallas.paged_attention import kernels
from qwen_spmd.pallas.triton import Descriptor, ShapeDtypeStruct, configs, launch, processors
from qwen_spmd.state import Ragged


def paged_attention(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    rows: Ragged,
) -> tuple[jax.Array, jax.Array]:
    """A decode row's context is cut into equal shares of all contexts, which keep all processors busy. They depend on
    the batch, and with them the last bits of the row's result."""
    if rows.one_token:
        o, kv = _decode(q_TNH, k_TKH, v_TKH, kv, None, layer, rows, rows.kv_len_B)
        return o, kv
    kv, o = _write(q_TNH, k_TKH, v_TKH, kv, layer, rows)
    o = _prefill(q_TNH, kv, o, layer, rows)
    # After `_prefill` through `o`, so that the pages need not be copied for it.
    len_B = jnp.where(rows.q_len_B == 1, rows.kv_len_B, 0)
    return _decode(q_TNH, k_TKH, v_TKH, kv, o, layer, rows, len_B)


def _sizes(q_TNH: jax.Array, kv: jax.Array, rows: Ragged) -> dict[str, int]:
    B, pages = rows.pages_BP.shape
    _, P, K, _, S, H = kv.shape
    return {"P": P, "B": B, "N": q_TNH.shape[1], "K": K, "S": S, "H": H, "PAGES": pages} | {
        "BLOCK_B": triton.next_power_of_2(B)
    }


def _limit(kv: jax.Array) -> float:
    """What pages of eight bits saturate at; 0 for others."""
    return float(jnp.finfo(kv.dtype).max) if kv.dtype.itemsize == 1 else 0.0


def _write(
    q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, kv: jax.Array, layer: jax.Array, rows: Ragged
) -> tuple[jax.Array, jax.Array]:
    """kv with the new rows in it, and a result of which the padding rows are zeros."""
    T, K, H = k_TKH.shape
    kv, o_TNH = launch(
        kernels.write,
        k_TKH,
        v_TKH,
        rows.page_T,
        rows.slot_T,
        rows.valid_T.astype(jnp.int8),
        layer,
        kv,
        out=(ShapeDtypeStruct(kv.shape, kv.dtype), ShapeDtypeStruct(q_TNH.shape, q_TNH.dtype)),
        alias={6: 0},
        grid=(T,),
        warps=1,
        P=kv.shape[1],
        N=q_TNH.shape[1],
        K=K,
        S=kv.shape[4],
        H=H,
        LIMIT=_limit(kv),
    )
    return kv, o_TNH


def _prefill(q_TNH: jax.Array, kv: jax.Array, o_TNH: jax.Array, layer: jax.Array, rows: Ragged) -> jax.Array:
    """Fills in the rows of sequences with several tokens."""
    sizes = _sizes(q_TNH, kv, rows)
    T, B, K, H, G = len(q_TNH), sizes["B"], sizes["K"], sizes["H"], sizes["N"] // sizes["K"]
    # A tile of as many rows as the sequences fill on average: verification of drafts has a few tokens each.
    fill = triton.next_power_of_2(triton.cdiv(T, B) * G)
    rule = {
        "block_m": min(max(fill, 16), 128),
        "block_n": 64 if H > 128 else 128,
        "warps": 8 if fill >= 128 else 4,
        "stages": 3,
        "tma": 1,
    }
    c = configs.choose("paged_attention", "prefill", _shape_class(q_TNH, kv, f"{rule['block_m']} rows"), rule)
    block_m, block_n = max(c["block_m"], triton.next_power_of_2(G)), c["block_n"]
    if q_TNH.dtype == jnp.float32:
        block_m, block_n = max(16, triton.next_power_of_2(G)), 16
    tokens = block_m // G
    S = sizes["S"]
    # Rows of a tensor descriptor are numbered in 32 bits, and lie 16 bytes apart at least.
    tma = bool(c["tma"]) and S % block_n == 0 and kv.size // H < 1 << 31 and q_TNH.dtype != jnp.float32
    tiles_B = jnp.where(rows.q_len_B > 1, (rows.q_len_B + tokens - 1) // tokens, 0)
    (o_TNH,) = launch(
        kernels.prefill,
        q_TNH,
        kv,
        Descriptor(kv.reshape(-1, H), (block_n, H)) if tma else kv,
        layer,
        rows.q_start_B,
        rows.kv_len_B,
        jnp.cumsum(tiles_B).astype(jnp.int32),
        rows.pages_BP,
        o_TNH,
        out=(ShapeDtypeStruct(o_TNH.shape, o_TNH.dtype),),
        alias={8: 0},
        grid=((T // tokens + min(B, T)) * K,),
        warps=c["warps"],
        stages=c["stages"],
        TMA=tma,
        TOKENS=tokens,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        **sizes,
    )
    return o_TNH


def _decode(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    kv: jax.Array,
    o_TNH: jax.Array | None,
    layer: jax.Array,
    rows: Ragged,
    len_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Sequences whose len_B is not 0. Without `o_TNH` to fill in, the rows of the others come out as zeros."""
    sizes = _sizes(q_TNH, kv, rows)
    B, N, K, H = (sizes[c] for c in "BNKH")
    G = N // K
    if B * K * 4 <= 2 * processors():  # few sequences: parts of some blocks
        rule = {"block_n": 64, "warps": 8, "stages": 5, "programs": 1, "pieces": 1}
    else:
        rule = {"block_n": 64, "warps": 4, "stages": 3 if H > 128 else 5, "programs": 2, "pieces": 1}
        if H > 128 and kv.dtype.itemsize == 1:  # casts need registers
            rule |= {"block_n": 32, "stages": 5}
    c = configs.choose("paged_attention", "decode", _shape_class(q_TNH, kv, f"{B} sequences"), rule)
    block = 16 if q_TNH.dtype == jnp.float32 else c["block_n"]
    programs = processors() * c["programs"]
    blocks_B = jnp.where(len_B > 0, jnp.maximum((len_B - 1 + block - 1) // block, 1), 0)
    parts = programs * c["pieces"]
    part = jnp.maximum((jnp.sum(blocks_B) * K + parts - 1) // parts, 2).astype(jnp.int32)
    ends_B = jnp.cumsum(blocks_B).astype(jnp.int32)
    row_B = rows.q_start_B[:-1]
    given = () if o_TNH is None else (o_TNH,)
    kv, o_TNH, part_o, part_ms = launch(
        kernels.decode,
        q_TNH,
        k_TKH,
        v_TKH,
        kv,
        layer,
        row_B,
        len_B,
        ends_B,
        part,
        rows.pages_BP,
        *given,
        out=(
            ShapeDtypeStruct(kv.shape, kv.dtype),
            ShapeDtypeStruct(q_TNH.shape, q_TNH.dtype),
            ShapeDtypeStruct((parts, 2, G, H), jnp.float32),
            ShapeDtypeStruct((parts, 2, G, 2), jnp.float32),
        ),
        alias={3: 0} | ({10: 1} if given else {}),
        grid=(min(programs, parts),),
        warps=c["warps"],
        stages=c["stages"],
        LIMIT=_limit(kv),
        PROGRAMS=min(programs, parts),
        BLOCK_M=max(16, triton.next_power_of_2(G)),
        BLOCK_N=block,
        **sizes,
    )
    many = B * N >= 4 * processors()  # few sequences have many parts each
    block_h = H if many else min(H, 64)
    (o_TNH,) = launch(
        kernels.combine,
        row_B,
        len_B,
        ends_B,
        part,
        part_o,
        part_ms,
        o_TNH,
        out=(ShapeDtypeStruct(o_TNH.shape, o_TNH.dtype),),
        alias={6: 0},
        grid=(B, N, H // block_h),
        warps=4,
        N=N,
        K=K,
        H=H,
        ZEROS=not given,
        BLOCK_C=8 if many else 16,
        BLOCK_H=block_h,
    )
    return o_TNH, kv


def _shape_class(q_TNH: jax.Array, kv: jax.Array, what: str) -> str:
    return f"{kv.dtype.name} {q_TNH.shape[1]}/{kv.shape[2]} heads of {kv.shape[5]}, pages of {kv.shape[4]}, {what}"
