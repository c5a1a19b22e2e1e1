# SPDX-License-Identifier: Apache-2.0
"""Device kernels, one folder per op: Pallas for TPU, jax-triton for NVIDIA GPUs, and the plain jnp reference of each.

An op's `__init__` is its contract and dispatch, `reference` the oracle (also what a CPU runs), `cases` the named
shapes that its parity test and the benchmark share. Kernels know nothing of models.
"""

from typing import Any, Literal

Impl = Literal["reference"]


def impl_for(device: Any) -> Impl:
    """The implementation that a device of this platform runs."""
    return "reference"
