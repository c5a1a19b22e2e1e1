# SPDX-License-Identifier: Apache-2.0
"""Softmax and top-k in one launch: a warp holds a row's logits in registers and takes the largest X times.

Probabilities are compared by their bits, as integers: a warp reduces integers in one instruction, floats in ten.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen_spmd.pallas.triton import ShapeDtypeStruct, launch


@triton.jit
def top_experts(
    logits,
    valid,
    experts,
    gates,
    T: tl.constexpr,
    S: tl.constexpr,
    E: tl.constexpr,
    X: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    t = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    logit = tl.load(logits + t * E + e, mask=e < E, other=float("-inf")).to(tl.float32)
    for s in tl.static_range(1, S):
        logit += tl.load(logits + (s * T + t) * E + e, mask=e < E, other=0.0).to(tl.float32)
    p = tl.exp(logit - tl.max(logit, 0))
    p = p / tl.sum(p, 0)
    # Numbers from 0 on are in the order of their bits. Below: what is not a number, then what is taken or no expert.
    left = tl.where(e < E, tl.where(p == p, p.to(tl.int32, bitcast=True), -1), -2)
    x = tl.arange(0, BLOCK_X)
    chosen = tl.zeros([BLOCK_X], tl.int32)
    bits = tl.zeros([BLOCK_X], tl.int32)
    for i in tl.static_range(X):
        largest = tl.max(left, 0)
        best = tl.min(tl.where(left == largest, e, E), 0)
        chosen = tl.where(x == i, best, chosen)
        bits = tl.where(x == i, largest, bits)
        left = tl.where(e == best, -2, left)
    gate = bits.to(tl.float32, bitcast=True)
    if NORMALISE:
        gate = gate / tl.sum(gate, 0)
    chosen = tl.where(tl.load(valid + t) != 0, chosen, -1)
    tl.store(experts + t * X + x, chosen, mask=x < X)
    tl.store(gates + t * X + x, gate, mask=x < X)


def router(
    parts_STE: jax.Array, valid_T: jax.Array, experts_per_row: int, normalise: bool
) -> tuple[jax.Array, jax.Array]:
    (S, T, E), X = parts_STE.shape, experts_per_row
    experts, gates = launch(
        top_experts,
        parts_STE,
        valid_T.astype(jnp.int8),
        out=(ShapeDtypeStruct((T, X), jnp.int32), ShapeDtypeStruct((T, X), jnp.float32)),
        grid=(T,),
        warps=1,
        T=T,
        S=S,
        E=E,
        X=X,
        NORMALISE=normalise,
        BLOCK_E=triton.next_power_of_2(E),
        BLOCK_X=triton.next_power_of_2(X),
    )
    return experts, gates
