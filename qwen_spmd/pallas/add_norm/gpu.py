# SPDX-License-Identifier: Apache-2.0
"""Adding and normalising in one launch: a program has a row in its registers."""

import jax
import triton
import triton.language as tl

from qwen_spmd.pallas.add_norm import reference
from qwen_spmd.pallas.triton import ShapeDtypeStruct, launch


@triton.jit
def add_and_normalise(x, term_0, term_1, w, total, norm, T: tl.constexpr, D: tl.constexpr, S_0: tl.constexpr,
                      S_1: tl.constexpr, EPS: tl.constexpr, ZERO_CENTRED: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    t, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    row = tl.load(x + t * D + d, mask=d < D, other=0.0)
    y = row.to(tl.float32)
    for s in tl.static_range(S_0):
        y += tl.load(term_0 + (s * T + t) * D + d, mask=d < D, other=0.0).to(tl.float32)
    for s in tl.static_range(S_1):
        y += tl.load(term_1 + (s * T + t) * D + d, mask=d < D, other=0.0).to(tl.float32)
    row = y.to(row.dtype)
    if S_0 > 0:
        tl.store(total + t * D + d, row, mask=d < D)
    y = row.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / D + EPS)
    scale = tl.load(w + d, mask=d < D, other=0.0)
    if ZERO_CENTRED:
        y = (y * (1.0 + scale.to(tl.float32))).to(row.dtype)
    else:
        y = y.to(row.dtype) * scale.to(row.dtype)
    tl.store(norm + t * D + d, y, mask=d < D)


def add_norm(
    x_TD: jax.Array, terms: tuple[jax.Array, ...], w_D: jax.Array, eps: float, zero_centred: bool
) -> tuple[jax.Array, jax.Array]:
    if len(terms) > 2:
        return reference.add_norm(x_TD, terms, w_D, eps, zero_centred)
    T, D = x_TD.shape
    block = triton.next_power_of_2(D)
    same = ShapeDtypeStruct(x_TD.shape, x_TD.dtype)
    given = [*terms, x_TD, x_TD]
    total, norm = launch(
        add_and_normalise,
        x_TD,
        *given[:2],
        w_D,
        out=(same if terms else ShapeDtypeStruct((1,), x_TD.dtype), same),
        grid=(T,),
        warps=max(1, min(16, block // 256)),
        T=T,
        D=D,
        S_0=len(terms[0]) if terms else 0,
        S_1=len(terms[1]) if len(terms) > 1 else 0,
        EPS=eps,
        ZERO_CENTRED=zero_centred,
        BLOCK_D=block,
    )
    return total if terms else x_TD, norm
