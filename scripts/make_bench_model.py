# SPDX-License-Identifier: Apache-2.0
"""Write a Qwen3.5-MoE of 214 M random parameters, to measure with: `python scripts/make_bench_model.py DIR`.

The shape is that of the demo, scaled up; the tokenizer is the demo's. A Hugging Face folder that other engines load.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax

from qwen_spmd import params
from qwen_spmd.config import from_hf
from qwen_spmd.demo import export

SHAPE = {
    "vocab_size": 32768,
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "mtp_num_hidden_layers": 0,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [6, 5, 5],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = export.hf_config(SHAPE)
    cfg = from_hf(config)
    weights = params.init(cfg, cfg.dtype, jax.random.key(args.seed))
    export.export(weights, config, args.out, "Random weights, for speed measurements.\n")
    print(f"{args.out}: {params.num_params(weights) / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
