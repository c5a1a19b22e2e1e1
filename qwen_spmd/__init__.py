# SPDX-License-Identifier: Apache-2.0
"""qwen_spmd: Qwen3 and Qwen3.5, dense and mixture-of-experts, served from one functional JAX model."""
