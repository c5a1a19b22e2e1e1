# SPDX-License-Identifier: Apache-2.0
"""qwen_spmd: Qwen3 and Qwen3.5, dense and mixture-of-experts, served from one functional JAX model."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwen_spmd.llm import LLM
    from qwen_spmd.serve.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # Imported when asked for: jax takes seconds, and the server's port is bound before it loads.
    if name == "LLM":
        from qwen_spmd.llm import LLM

        return LLM
    if name == "SamplingParams":
        from qwen_spmd.serve.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'qwen_spmd' has no attribute {name!r}")
