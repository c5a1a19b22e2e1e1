# SPDX-License-Identifier: Apache-2.0
"""ModelConfig from config.json: the families, what is refused, and the sizes of the published models."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import pytest

from qwen_spmd.config import Rope, from_hf, load_config
from qwen_spmd.params import abstract, num_params

# Qwen3.5: name, D, layers, N, K, U, experts, experts per token, expert width, shared width, dense width, tied,
# parameters in billions of the text model without MTP.
QWEN3_5 = [
    ("397B-A17B", 4096, 60, 32, 2, 64, 512, 10, 1024, 1024, None, False, 396.3),
    ("122B-A10B", 3072, 48, 32, 2, 64, 256, 8, 1024, 1024, None, False, 122),
    ("35B-A3B", 2048, 40, 16, 2, 32, 256, 8, 512, 512, None, False, 34.7),
    ("27B", 5120, 64, 24, 4, 48, None, None, None, None, 17408, False, 26.9),
    ("9B", 4096, 32, 16, 4, 32, None, None, None, None, 12288, False, 8.95),
    ("4B", 2560, 32, 16, 4, 32, None, None, None, None, 9216, True, 4.2),
    ("2B", 2048, 24, 8, 2, 16, None, None, None, None, 6144, True, 1.88),
    ("0.8B", 1024, 24, 8, 2, 16, None, None, None, None, 3584, True, 0.75),
]
# Qwen3: name, D, layers, N, K, experts, experts per token, expert width, dense width, tied, billions of parameters.
QWEN3 = [
    ("235B-A22B", 4096, 94, 64, 4, 128, 8, 1536, 12288, False, 235.1),
    ("30B-A3B", 2048, 48, 32, 4, 128, 8, 768, 6144, False, 30.5),
    ("Coder-480B-A35B", 6144, 62, 96, 8, 160, 8, 2560, 8192, False, 480.2),
    ("0.6B", 1024, 28, 16, 8, None, None, None, 3072, True, 0.6),
    ("1.7B", 2048, 28, 16, 8, None, None, None, 6144, True, 1.7),
    ("4B", 2560, 36, 32, 8, None, None, None, 9728, True, 4.0),
    ("8B", 4096, 36, 32, 8, None, None, None, 12288, False, 8.2),
    ("14B", 5120, 40, 40, 8, None, None, None, 17408, False, 14.8),
    ("32B", 5120, 64, 64, 8, None, None, None, 25600, False, 32.8),
]


def qwen3_5(name="35B-A3B") -> dict:
    """config.json of a published Qwen3.5 model, with the fields that its file has."""
    _, d, layers, n, k, u, e, x, width, shared, dense, tied, _ = next(m for m in QWEN3_5 if m[0] == name)
    kind = "qwen3_5_moe" if e else "qwen3_5"
    text = {
        "model_type": f"{kind}_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": d,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": u,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": n,
        "num_hidden_layers": layers,
        "num_key_value_heads": k,
        "rms_norm_eps": 1e-6,
        "vocab_size": 248320,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    }
    if e:
        text |= {
            "mlp_only_layers": [],
            "moe_intermediate_size": width,
            "num_experts": e,
            "num_experts_per_tok": x,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": shared,
        }
    else:
        text |= {"intermediate_size": dense}
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration" if e else "Qwen3_5ForConditionalGeneration"],
        "model_type": kind,
        "image_token_id": 248056,
        "text_config": text,
        "tie_word_embeddings": tied,
        "transformers_version": "4.57.0.dev0",
        "vision_config": {"model_type": kind, "hidden_size": 1152, "head_dim": 72},
    }


def qwen3(name="30B-A3B") -> dict:
    """config.json of a published Qwen3 model, with the fields that its file has."""
    _, d, layers, n, k, e, x, width, dense, tied, _ = next(m for m in QWEN3 if m[0] == name)
    hf = {
        "architectures": ["Qwen3MoeForCausalLM" if e else "Qwen3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": d,
        "intermediate_size": dense,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "model_type": "qwen3_moe" if e else "qwen3",
        "num_attention_heads": n,
        "num_hidden_layers": layers,
        "num_key_value_heads": k,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    if e:
        hf |= {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": width,
            "norm_topk_prob": True,
            "num_experts": e,
            "num_experts_per_tok": x,
        }
    return hf


PUBLISHED = [
    *(pytest.param(qwen3_5(m[0]), m[-1], id=f"Qwen3.5-{m[0]}") for m in QWEN3_5),
    *(pytest.param(qwen3(m[0]), m[-1], id=f"Qwen3-{m[0]}") for m in QWEN3),
]
if __name__=="__main__":
    for p in PUBLISHED:
        c=from_hf(p.values[0]); print(p.id, p.values[1], num_params(abstract(dataclasses.replace(c,mtp=False),"bfloat16"))/1e9, num_params(abstract(c,"bfloat16"))/1e9)
