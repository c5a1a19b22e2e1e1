# SPDX-License-Identifier: Apache-2.0
"""Device kernels, one folder per op: Pallas for TPU, jax-triton for NVIDIA GPUs, and the plain jnp reference of each.

An op's `__init__` is its contract and dispatch, `reference` the oracle (also what a CPU runs), `gpu` the Triton kernels
and what launches them, `cases` the named shapes that its parity test and the benchmark share. Kernels know nothing of
models.
"""

import importlib.util
from typing import Any, Literal

Impl = Literal["reference", "gpu", "tpu"]


def impl_for(device: Any) -> Impl:
    """The implementation that a device of this platform runs.

    A TPU runs the reference: of the ops of a step only paged attention has a TPU kernel yet. In "tpu", the others are
    the reference, too.
    """
    if device.platform not in ("gpu", "cuda"):
        return "reference"
    capability = str(getattr(device, "compute_capability", "9.0"))  # described devices may not say
    if capability.split(".")[0] not in ("9", "10"):
        raise ValueError(
            f"{device.device_kind} has compute capability {capability}; there are kernels for 9.0 (Hopper) and 10.x "
            "(Blackwell)"
        )
    if importlib.util.find_spec("jax_triton") is None:
        raise ModuleNotFoundError("kernels for NVIDIA GPUs need jax-triton: pip install 'qwen-spmd[gpu]'")
    return "gpu"
