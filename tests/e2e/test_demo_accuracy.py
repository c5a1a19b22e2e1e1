# SPDX-License-Identifier: Apache-2.0
"""The demo model knows, through the serving engine, what its model card says."""

import re

import numpy as np

from qwen_spmd import LLM, SamplingParams
from qwen_spmd.demo import MODEL_DIR
from qwen_spmd.demo.chat import render_prompt
from qwen_spmd.demo.evaluate import MAX_TOKENS, evaluate

ITEMS = 10


def test_the_card_is_true():
    listed = re.findall(r"^\| (\w+) \| .* \| [\d.]+% \|$", (MODEL_DIR / "README.md").read_text(), re.M)
    assert len(listed) >= 10
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 5120}
    with LLM(compilation_cache=None, progress=False, **sizes) as llm:

        def generate(conversations):
            prompts = [render_prompt(conversation) for conversation in conversations]
            return [completion.text for completion in llm.generate(prompts, params)]

        accuracy = evaluate(generate, listed, ITEMS)
    # The card lists tasks from 95 % up; ten items of one may miss that, all of them together may not.
    assert min(accuracy.values()) >= 0.8, accuracy
    assert np.mean(list(accuracy.values())) >= 0.95, accuracy
