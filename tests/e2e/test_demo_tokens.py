# SPDX-License-Identifier: Apache-2.0
"""The demo model is a checkpoint like any other: transformers loads it and says the same (make_demo_tokens.py)."""

import json
from pathlib import Path

import pytest

from qwen_spmd import LLM, SamplingParams

RECORDS = json.loads((Path(__file__).parents[1] / "oracles/demo_tokens.json").read_text())


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 1024, "progress": False}
    cache = tmp_path_factory.getbasetemp() / "programs"
    with LLM(dtype="float32", compilation_cache=cache, **options) as llm:
        yield llm


def test_same_prompts(llm):
    for record in RECORDS:
        assert llm.tokenizer.render_chat(record["messages"], **record["options"])[1] == record["prompt_ids"]


def test_same_tokens(llm):
    params = SamplingParams(temperature=0, max_tokens=96)
    answers = llm.generate([record["prompt_ids"] for record in RECORDS], params)
    assert [answer.tokens for answer in answers] == [record["new_ids"] for record in RECORDS]
