# SPDX-License-Identifier: Apache-2.0
"""The demo as a Hugging Face folder: its config.json, the files beside the weights, the model card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax

from qwen_spmd import checkpoint
from qwen_spmd.config import ModelConfig, from_hf
from qwen_spmd.demo import MODEL_DIR, vocabulary
from qwen_spmd.demo.chat import tokenizer
from qwen_spmd.demo.conversation import Conversation
from qwen_spmd.demo.tasks import TASKS
from qwen_spmd.params import Params, declare, num_params

CONTEXT = 8192
BESIDE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
LISTED = 0.95
"""Accuracy from which the model card lists a task."""


def hf_config(overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """The content of config.json: a text-only Qwen3.5-MoE, two periods of three Gated DeltaNet and one attention."""
    end = tokenizer().token_to_id("<|endoftext|>")
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": end,
        "full_attention_interval": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 192,
        "initializer_range": 0.02,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_value_head_dim": 32,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": CONTEXT,
        "mlp_only_layers": [],
        "moe_intermediate_size": 48,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 8,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
            "partial_rotary_factor": 0.25,
            "rope_theta": 100000,
            "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 128,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": vocabulary.rows(tokenizer()),
    } | (overrides or {})


def generation_config() -> dict[str, Any]:
    """Stops at the end of a turn or of the text; samples nearly greedily, the tasks have one right answer."""
    end, turn = (tokenizer().token_to_id(token) for token in ("<|endoftext|>", "<|im_end|>"))
    sampling = {"do_sample": True, "temperature": 0.3, "top_k": 20, "top_p": 0.95}
    return {"eos_token_id": [turn, end], "pad_token_id": end, **sampling}


def rounded(params: Params, cfg: ModelConfig) -> Params:
    """float32 training weights in the dtypes of the checkpoint."""
    return jax.tree.map(lambda x, leaf: x.astype(leaf.dtype), params, declare(cfg, cfg.dtype))


def export(params: Params, config: dict[str, Any], folder: Path, card: str) -> None:
    """Write the folder; its old weights are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").unlink(missing_ok=True)
    cfg = from_hf(config)
    checkpoint.save(rounded(params, cfg), cfg, config, folder, progress=False)
    (folder / "model.safetensors").chmod(0o644)
    (folder / "generation_config.json").write_text(json.dumps(generation_config(), indent=2) + "\n")
    (folder / "README.md").write_text(card)
    if folder.resolve() != MODEL_DIR.resolve():
        for name in BESIDE:
            shutil.copy(MODEL_DIR / name, folder / name)


CARD = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
---

# A very small Qwen3.5-MoE

{parameters:.1f} million parameters in the architecture of Qwen3.5-MoE: {layers} layers (three Gated DeltaNet, then one
gated attention, repeated), {experts} experts of which {active} are active plus a shared one, and a multi-token
prediction layer for speculative decoding. It exists to try, test and teach a serving engine with a model that really
answers. It knows the tasks below and nothing else of the world.

It was trained from random weights, on text that `qwen_spmd/demo` generates and on nothing else, with
`scripts/train_demo.py`. Context: up to 4096 tokens were trained. Thinking is off unless the chat template gets
`enable_thinking=true`; tasks marked "thinking" were measured with it.

## Accuracy

Greedy decoding, exact match of the whole answer, {items} held-out questions for each task, weights in bfloat16.

| task | what | accuracy |
|---|---|---|
{rows}

## Examples

Held-out questions that it answers right.

| task | prompt | answer |
|---|---|---|
{examples}
"""


def card(params: Params, config: dict[str, Any], right: dict[str, list[tuple[Conversation, bool]]]) -> str:
    """The model card. `right` has the held-out items of each task and whether the model got them right."""
    accuracy = {name: sum(ok for _, ok in items) / len(items) for name, items in right.items()}
    listed = [name for name, share in accuracy.items() if share >= LISTED]
    rows, examples = [], []
    for name in listed:
        solved = [c for c, ok in right[name] if ok]
        thinking = ", thinking" if solved[0].enable_thinking else ""
        rows.append(f"| {name} | {TASKS[name].about}{thinking} | {accuracy[name]:.1%} |")
        shown = [c for c in solved if len(c.messages) == 2 and c.tools is None and len(_text(c.prompt[0])) < 90]
        if shown:
            shortest = max(shown, key=lambda c: "?" in _text(c.prompt[0]))
            examples.append(f"| {name} | {_text(shortest.prompt[0])} | {_text(shortest.answer)} |")
    return CARD.format(
        parameters=num_params(params) / 1e6,
        layers=config["num_hidden_layers"],
        experts=config["num_experts"],
        active=config["num_experts_per_tok"],
        items=len(next(iter(right.values()))) if right else 0,
        rows="\n".join(rows),
        examples="\n".join(examples),
    )


def _text(message: dict[str, Any]) -> str:
    return message["content"].replace("|", "\\|").replace("\n", " ")
