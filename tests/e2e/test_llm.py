# SPDX-License-Identifier: Apache-2.0
"""LLM on the demo model: generating, looking inside, changing parameters. Nothing depends on what it has learnt."""

import re
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from qwen_spmd import LLM, SamplingParams
from qwen_spmd.serve.engine import EngineStopped
from qwen_spmd.serve.scheduler import Output

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 256}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
# Long and varied, whatever the model knows.
RANDOM = SamplingParams(temperature=2.0, max_tokens=32, ignore_eos=True, seed=1)
CHAT = [{"role": "user", "content": "What is 12 + 30?"}]
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm():
    """One for all tests here. After them, the end of `with` has closed it."""
    with LLM(dtype="float32", compilation_cache=None, progress=False, **SIZES) as llm:
        yield llm
        assert llm.engine.stats().alive
    assert not llm.engine.stats().alive
    with pytest.raises(EngineStopped):
        llm.generate("Hi")


def test_generate(llm):
    (answer,) = llm.generate(PROMPT, GREEDY)
    assert answer.prompt_tokens == llm.tokenizer.encode(PROMPT)
    assert len(answer.tokens) == 20
    assert answer.text == llm.tokenizer.decode(answer.tokens, skip_special_tokens=True)
    assert answer.finish_reason == "length"


def test_ids_are_a_prompt_too(llm):
    ids = llm.tokenizer.encode(PROMPT)
    assert llm.generate(ids, GREEDY) == llm.generate([ids], GREEDY) == llm.generate([PROMPT], GREEDY)


def test_chat_is_the_template_and_generate(llm):
    text, _ = llm.tokenizer.render_chat(CHAT)
    assert llm.chat(CHAT, GREEDY) == llm.chat([CHAT], GREEDY) == llm.generate(text, GREEDY)
    thinking = llm.chat(CHAT, GREEDY, chat_template_kwargs={"enable_thinking": True})
    assert thinking[0].prompt_tokens != llm.chat(CHAT, GREEDY)[0].prompt_tokens


def test_the_models_own_sampling_is_the_default(llm):
    own = SamplingParams(**llm.tokenizer.sampling, max_tokens=None)
    assert own.temperature > 0
    for answer in llm.generate([PROMPT], own) + llm.generate([PROMPT]):
        assert answer.finish_reason in ("stop", "length")
        # A stop id is the last token, if it is one.
        assert not set(answer.tokens[:-1]) & set(llm.tokenizer.stop_ids)
        assert (answer.tokens[-1] in llm.tokenizer.stop_ids) == (answer.finish_reason == "stop")


def test_one_params_for_all_or_one_for_each(llm):
    """More prompts than run at once, in the order in which they were given."""
    prompts = [PROMPT + "!" * i for i in range(9)]
    each = [RANDOM.replace(seed=i % 3, max_tokens=1 + 2 * i) for i in range(9)]
    answers = llm.generate(prompts, each)
    assert [len(answer.tokens) for answer in answers] == [p.max_tokens for p in each]
    assert answers == [llm.generate(prompt, p)[0] for prompt, p in zip(prompts, each)]
    assert llm.generate(prompts[:3], RANDOM) == llm.generate(prompts[:3], [RANDOM] * 3)


def test_seeds(llm):
    one, two, again = llm.generate([PROMPT] * 3, [RANDOM, RANDOM.replace(seed=2), RANDOM])
    assert one == again != two
    free = llm.generate([PROMPT] * 2, RANDOM.replace(seed=None))
    assert free[0].tokens != free[1].tokens


def test_stop_strings(llm):
    (full,) = llm.generate(PROMPT, RANDOM)
    stop = re.search(r"(?<=.{5})[!-~]{3}", full.text, re.DOTALL).group()
    end = full.text.index(stop)
    for include, text in ((False, full.text[:end]), (True, full.text[: end + 3])):
        (answer,) = llm.generate(PROMPT, RANDOM.replace(stop=("never in it", stop), include_stop_str_in_output=include))
        assert (answer.text, answer.finish_reason) == (text, "stop")
        assert answer.tokens == full.tokens[: len(answer.tokens)]
        assert len(answer.tokens) < len(full.tokens)


def test_stop_ids(llm):
    (full,) = llm.generate(PROMPT, RANDOM)
    stop = full.tokens[5]
    (answer,) = llm.generate(PROMPT, RANDOM.replace(stop_token_ids=(stop,)))
    assert answer.tokens == full.tokens[: full.tokens.index(stop) + 1]
    assert answer.finish_reason == "stop"


def test_logits_agree_with_greedy_decoding(llm):
    """The whole sequence at once and token by token choose the same."""
    (answer,) = llm.generate(PROMPT, GREEDY)
    ids = answer.prompt_tokens + answer.tokens
    logits = llm.logits(ids)
    assert (logits.shape, logits.dtype) == ((len(ids), llm.cfg.vocab_size), np.float32)
    assert logits[len(answer.prompt_tokens) - 1 : -1].argmax(-1).tolist() == answer.tokens
    np.testing.assert_allclose(llm.logits(PROMPT), logits[: len(answer.prompt_tokens)], atol=1e-3)


def test_trace(llm):
    ids = llm.tokenizer.encode(PROMPT)
    trace, cfg = llm.trace(PROMPT), llm.cfg
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(trace))
    assert trace.hidden.shape == (cfg.num_layers, len(ids), cfg.hidden_size)
    experts, gates = trace.routing.experts_TX, trace.routing.gates_TX
    assert experts.shape == gates.shape == (cfg.num_layers, len(ids), cfg.moe.experts_per_token)
    assert trace.routing.logits_TE.shape == (cfg.num_layers, len(ids), cfg.moe.num_experts)
    np.testing.assert_array_equal(experts[..., 0], trace.routing.logits_TE.argmax(-1))
    np.testing.assert_allclose(gates.sum(-1), 1, rtol=1e-5)
    # The last layer's residual stream is what the logits come from.
    last, scale = trace.hidden[-1], 1 + np.asarray(llm.params.norm)
    normed = last / np.sqrt((last**2).mean(-1, keepdims=True) + cfg.norm_eps) * scale
    np.testing.assert_allclose(normed @ np.asarray(llm.params.lm_head).T, llm.logits(PROMPT), atol=1e-3)


def test_changed_params_change_what_it_says(llm):
    params, before = llm.params, llm.generate(PROMPT, GREEDY)
    try:
        llm.params = params.replace(lm_head=-params.lm_head)
        (answer,) = llm.generate(PROMPT, GREEDY)
        assert answer != before[0]
        assert answer.tokens[0] == llm.logits(PROMPT)[-1].argmax()
    finally:
        llm.params = params
    assert llm.generate(PROMPT, GREEDY) == before


def test_nothing_asked_nothing_answered(llm):
    assert llm.generate([], GREEDY) == llm.chat([], GREEDY) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(["a", "b"], [GREEDY]), "params has 1 entries, there are 2 prompts"),
        (lambda llm: llm.generate([5] * 256), "a prompt has 256 tokens, it must have fewer than 256"),
        (lambda llm: llm.generate(""), "prompt"),
        (lambda llm: llm.generate([10**6]), "prompt holds id 1000000"),
        (lambda llm: llm.logits([]), "tokens must be at least one id"),
        (lambda llm: llm.trace([-1]), "tokens must be at least one id, each from 0 to"),
        (lambda llm: llm.chat([{"role": "nobody", "content": "Hi"}]), "nobody"),
    ],
)
def test_errors_name_what_is_wrong_and_leave_nothing_behind(llm, call, message):
    with pytest.raises(ValueError, match=message):
        call(llm)
    assert (llm.engine.stats().running, llm.engine.stats().waiting) == (0, 0)
    assert llm.generate(PROMPT, GREEDY.replace(max_tokens=1))


def test_a_bad_prompt_among_good_ones(llm):
    with pytest.raises(ValueError, match="prompt holds id"):
        llm.generate([[5], [10**6], [5]], GREEDY)
    assert len(llm.generate(PROMPT, GREEDY)[0].tokens) == 20


def test_no_such_model(tmp_path):
    with pytest.raises(ValueError, match="there is no such folder"):
        LLM(tmp_path / "none")


def test_text_is_whole_when_the_engine_is_ahead(llm, monkeypatch):
    """The loop may have ended a request before this side has read its first output."""

    def submit(request):
        request.output, request.finish_reason = [72, 73], "length"
        llm._deliver([Output(request, [72])])
        llm._deliver([Output(request, [73], "length")])

    monkeypatch.setattr(llm.engine, "submit", submit)
    answer = llm.generate([[1]], SamplingParams(max_tokens=2))[0]
    assert answer.text == llm.tokenizer.decode([72, 73])


def test_calls_from_threads_take_turns(llm):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    want = [llm.generate([[50 + i]] * 2, params) for i in range(3)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda i: llm.generate([[50 + i]] * 2, params), range(3))) == want


def test_params_of_another_dtype_are_refused_and_change_nothing(llm):
    held, old = llm.engine.weights, llm.params
    with pytest.raises(ValueError, match=r"norm is float"):
        llm.params = old.replace(norm=old.norm.astype("float16"))
    assert llm.engine.weights is held


def test_on_several_devices(llm):
    """Looking inside and changing parameters is the same on a mesh."""
    limits = SIZES | {"max_num_seqs": 8, "ep": 4, "tp": 2}
    with LLM(dtype="float32", compilation_cache=None, progress=False, **limits) as many:
        assert many.generate(PROMPT, GREEDY)[0].tokens == llm.generate(PROMPT, GREEDY)[0].tokens
        np.testing.assert_allclose(many.logits(PROMPT), llm.logits(PROMPT), atol=1e-3)
        here, there = llm.trace(PROMPT), many.trace(PROMPT)
        np.testing.assert_allclose(there.hidden, here.hidden, atol=1e-3)
        np.testing.assert_array_equal(there.routing.experts_TX, here.routing.experts_TX)

        def without(llm, expert):
            block = llm.params.blocks[0]
            ffn = block.ffn.replace(w_down=block.ffn.w_down.at[:, expert].set(0))
            return llm.params.replace(blocks=(block.replace(ffn=ffn), *llm.params.blocks[1:]))

        expert, old = int(here.routing.experts_TX[0, 0, 0]), (llm.params, many.params)
        llm.params, many.params = without(llm, expert), without(many, expert)
        np.testing.assert_allclose(many.logits(PROMPT), llm.logits(PROMPT), atol=1e-3)
        assert np.abs(many.logits(PROMPT) - here_logits(llm, old[0])).max() > 1e-2
        with pytest.raises(ValueError, match="lm_head is missing"):
            many.params = many.params.replace(lm_head=None)


def here_logits(llm, params):
    """Logits with these parameters, which stay."""
    llm.params = params
    return llm.logits(PROMPT)
