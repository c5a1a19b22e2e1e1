# SPDX-License-Identifier: Apache-2.0
"""Adding and normalising in one launch: a program has a row in its registers."""

import jax
import triton
import triton.language as tl

from qwen_spmd.pallas.add_norm.reference import Gathered, Term
from qwen_spmd.pallas.expert_sum.gpu import row_sum
from qwen_spmd.pallas.triton import ShapeDtypeStruct, launch


@triton.jit
def add_and_normalise(x, term_0, term_1, y, pos, gates, w, total, norm, T: tl.constexpr, D: tl.constexpr,
                      S_0: tl.constexpr, S_1: tl.constexpr, X: tl.constexpr, EPS: tl.constexpr,
                      ZERO_CENTRED: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    t, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    scale = tl.load(w + d, mask=d < D, other=0.0)
    row = tl.load(x + t * D + d, mask=d < D, other=0.0)
    sum = row.to(tl.float32)
    if X > 0:
        sum += row_sum(y, pos, gates, t, d, D, X, BLOCK_D)
    for s in tl.static_range(S_0):
        sum += tl.load(term_0 + (s * T + t) * D + d, mask=d < D, other=0.0).to(tl.float32)
    for s in tl.static_range(S_1):
        sum += tl.load(term_1 + (s * T + t) * D + d, mask=d < D, other=0.0).to(tl.float32)
    row = sum.to(row.dtype)
    if S_0 + X > 0:
        tl.store(total + t * D + d, row, mask=d < D)
    sum = row.to(tl.float32)
    sum = sum * tl.rsqrt(tl.sum(sum * sum, 0) / D + EPS)
    if ZERO_CENTRED:
        out = (sum * (1.0 + scale.to(tl.float32))).to(row.dtype)
    else:
        out = sum.to(row.dtype) * scale.to(row.dtype)
    tl.store(norm + t * D + d, out, mask=d < D)


def add_norm(
    x_TD: jax.Array, terms: tuple[Term, ...], w_D: jax.Array, eps: float, zero_centred: bool
) -> tuple[jax.Array, jax.Array]:
    gathered = [t for t in terms if isinstance(t, Gathered)]
    parts = [t for t in terms if not isinstance(t, Gathered)]
    assert len(gathered) <= 1 and len(parts) <= 2, "no model adds more at once"
    T, D = x_TD.shape
    block = triton.next_power_of_2(D)
    same = ShapeDtypeStruct(x_TD.shape, x_TD.dtype)
    y, pos_TX, gates_TX = (
        (gathered[0].y_RD, gathered[0].pos_TX, gathered[0].gates_TX) if gathered else (x_TD, x_TD, x_TD)
    )
    total, norm = launch(
        add_and_normalise,
        x_TD,
        *[*parts, x_TD, x_TD][:2],
        y,
        pos_TX,
        gates_TX,
        w_D,
        out=(same if terms else ShapeDtypeStruct((1,), x_TD.dtype), same),
        grid=(T,),
        warps=max(1, min(16, block // 256)),
        T=T,
        D=D,
        S_0=len(parts[0]) if parts else 0,
        S_1=len(parts[1]) if len(parts) > 1 else 0,
        X=pos_TX.shape[1] if gathered else 0,
        EPS=eps,
        ZERO_CENTRED=zero_centred,
        BLOCK_D=block,
    )
    return total if terms else x_TD, norm
