# SPDX-License-Identifier: Apache-2.0
"""Softmax and top-k in one launch: a program holds a row's logits in registers and takes the largest X times."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from qwen_spmd.pallas.triton import ShapeDtypeStruct, launch


@triton.jit
def top_experts(
    logits,
    experts,
    gates,
    E: tl.constexpr,
    X: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    t = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    logit = tl.load(logits + t * E + e, mask=e < E, other=float("-inf")).to(tl.float32)
    p = tl.exp(logit - tl.max(logit, 0))
    p = p / tl.sum(p, 0)
    # Below all probabilities, in this order: what is not a number, what is taken or no expert.
    left = tl.where(e < E, tl.where(p == p, p, -1.0), -2.0)
    x = tl.arange(0, BLOCK_X)
    chosen = tl.zeros([BLOCK_X], tl.int32)
    gate = tl.zeros([BLOCK_X], tl.float32)
    for i in tl.static_range(X):
        largest, best = tl.max(left, 0), tl.argmax(left, 0)
        chosen = tl.where(x == i, best, chosen)
        gate = tl.where(x == i, largest, gate)
        left = tl.where(e == best, -2.0, left)
    if NORMALISE:
        gate = gate / tl.sum(gate, 0)
    tl.store(experts + t * X + x, chosen, mask=x < X)
    tl.store(gates + t * X + x, gate, mask=x < X)


def router(logits_TE: jax.Array, experts_per_row: int, normalise: bool) -> tuple[jax.Array, jax.Array]:
    (T, E), X = logits_TE.shape, experts_per_row
    experts, gates = launch(
        top_experts,
        logits_TE,
        out=(ShapeDtypeStruct((T, X), jnp.int32), ShapeDtypeStruct((T, X), jnp.float32)),
        grid=(T,),
        warps=1 if E <= 256 else 2,
        E=E,
        X=X,
        NORMALISE=normalise,
        BLOCK_E=triton.next_power_of_2(E),
        BLOCK_X=triton.next_power_of_2(X),
    )
    return experts, gates
