# SPDX-License-Identifier: Apache-2.0
"""Record what transformers makes of the demo model: prompts and greedy tokens in float32, to demo_tokens.json.

Needs torch and transformers (made with 5.24.0): python tests/oracles/make_demo_tokens.py
"""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "qwen_spmd/demo/model"
NEW = 96
CHATS = [
    ("What is 37 + 48?", {}),
    ("What is 4821 + 2764?", {"enable_thinking": True}),
    ("Sort these numbers: 31, 7, 88, 12, 54", {}),
    ('How many "r" are in "garden"?', {"enable_thinking": True}),
    ("What weekday is 9 days after Saturday?", {"enable_thinking": True}),
    ("Order as JSON: 24 cherries, 9 peaches and 9 salads", {}),
    ("Tell me a short story.", {}),
    ("Something that it was never trained on: größer, 漢字, 🙂", {}),
    ("Repeat this: mM30onm9B", {}),
]
SYSTEM = [{"role": "system", "content": "You are helpful."}]


def main() -> None:
    torch.set_grad_enabled(False)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    records = []
    for i, (text, options) in enumerate(CHATS):
        messages = SYSTEM * (i % 2) + [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **options
        )["input_ids"]
        out = model.generate(ids, do_sample=False, max_new_tokens=NEW)[0, ids.shape[1] :]
        records.append(
            {"messages": messages, "options": options, "prompt_ids": ids[0].tolist(), "new_ids": out.tolist()}
        )
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    (HERE / "demo_tokens.json").write_text(f"[\n{lines}\n]\n")


main()
