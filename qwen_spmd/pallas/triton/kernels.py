# SPDX-License-Identifier: Apache-2.0
"""What several ops' kernels call."""

import triton
import triton.language as tl


@triton.jit
def silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def find(ends, i, B: tl.constexpr, BLOCK_B: tl.constexpr):
    """(group of the i-th piece, its number within the group), of B groups that end before piece `ends`."""
    b = tl.arange(0, BLOCK_B)
    end = tl.load(ends + b, mask=b < B, other=2147483647)
    group = tl.sum((end <= i).to(tl.int32), 0)
    first = tl.max(tl.where(b < group, end, 0), 0)
    return group, i - first
