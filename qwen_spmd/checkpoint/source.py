# SPDX-License-Identifier: Apache-2.0
"""A folder of either format: opened for reading, where loading and converting begin, and told from others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qwen_spmd.checkpoint import huggingface, manifest, orbax
from qwen_spmd.checkpoint.pieces import Source
from qwen_spmd.config import ModelConfig


def open_source(folder: Path, cfg: ModelConfig, dtype: Any) -> Source:
    """Leaves that declare a dtype keep it whatever `dtype` is. ValueError with all that is wrong, by name."""
    made = manifest.read(folder)
    if made is not None and made["to"] == "orbax":
        return orbax.open_source(folder, cfg, dtype, made)
    return huggingface.open_source(folder, cfg, dtype)


def identity(folder: Path) -> str:
    """A digest by which nodes see that they have the same model. ValueError for an unfinished conversion.

    It is of the checksums in the manifest, and else what `huggingface.identity` has: nodes need the same format.
    """
    made = manifest.read(folder)
    if made is not None and made["to"] == "orbax":
        return manifest.digest(made)
    return huggingface.identity(folder)
