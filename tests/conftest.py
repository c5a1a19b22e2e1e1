# SPDX-License-Identifier: Apache-2.0
"""What all tests share: eight emulated CPU devices, full float32 matmuls, the oracles. Imports no jax.

Settings go through the environment, because they must be there before jax is imported and tests/host never does.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from qwen_spmd.config import ModelConfig, load_config

# Tests compile much and compute little: less optimisation halves their time.
XLA_FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}".strip()
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"


class Oracle(NamedTuple):
    """A tiny checkpoint and what transformers computes with it (oracles/README.md)."""

    folder: Path
    cfg: ModelConfig
    npz: np.lib.npyio.NpzFile


@pytest.fixture(scope="session")
def oracle() -> Iterator[Callable[[str], Oracle]]:
    """`oracle(name)` for "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"."""
    with ExitStack() as stack:

        @functools.cache
        def get(name: str) -> Oracle:
            folder = Path(__file__).parent / "oracles" / name
            return Oracle(folder, load_config(folder), stack.enter_context(np.load(folder / "oracle.npz")))

        yield get
