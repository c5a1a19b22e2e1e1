# SPDX-License-Identifier: Apache-2.0
"""The demo's tasks, graders, chat template and tokenizer. No jax, no weights."""

import dataclasses
import itertools
import random

import jinja2
import numpy as np
import pytest

from qwen_spmd.demo import chat, data, evaluate, vocabulary
from qwen_spmd.demo.conversation import Conversation, ask, split_of
from qwen_spmd.demo.tasks import TASKS, draw, draw_dressed

NAMES = list(TASKS)


def completion(conversation: Conversation) -> str:
    """What a perfect model would generate after the prompt."""
    whole = chat.render(conversation.messages, tools=conversation.tools, prompt=False)
    prompt = chat.render_prompt(conversation)
    assert whole.startswith(prompt)
    return whole[len(prompt) :].removesuffix("\n")


@pytest.mark.parametrize("name", NAMES)
def test_task(name):
    task = TASKS[name]
    items = [task.make(random.Random(i)) for i in range(20)]
    assert items == [task.make(random.Random(i)) for i in range(20)], "not deterministic"
    assert len({str(c.messages) for c in items}) > 5
    for conversation in items:
        text = completion(conversation)
        assert text.endswith("<|im_end|>")
        if task.graded:
            assert task.grade(conversation, text)
            assert task.grade(conversation, text.removesuffix("<|im_end|>"))
            assert not task.grade(conversation, "")
            assert not task.grade(conversation, _corrupted(text))
        if conversation.enable_thinking:
            assert "\n</think>\n\n" in text
            assert not task.grade(conversation, text.replace("</think>", ""))


def _corrupted(text: str) -> str:
    """Another letter or digit in the middle of the final answer, none of the markup's."""
    start = max(text.rfind("</think>\n\n") + 10 if "</think>" in text else 0, text.rfind("<parameter=") + 1)
    start = text.find("\n", start) if start and text[start - 1] == "<" else start
    at = next(i for i in range(start, len(text)) if text[i].isalnum())
    return f"{text[:at]}{'7' if text[at] != '7' else '8'}{text[at + 1 :]}"


@pytest.mark.parametrize("name", NAMES)
def test_splits_are_disjoint(name):
    rng = random.Random(0)
    train = {str(draw(TASKS[name], rng, "train").prompt) for _ in range(200)}
    test = {str(draw(TASKS[name], rng, "test").prompt) for _ in range(20)}
    assert not train & test


def test_split_ignores_system_text_and_thinking():
    plain = ask("What is 1 + 1?", "2")
    other = Conversation([{"role": "system", "content": "Be brief."}, *plain.messages], enable_thinking=True)
    assert split_of(plain) == split_of(other)


def test_training_never_sees_a_held_out_question():
    """Also not as an earlier turn of another conversation."""
    rng = random.Random(0)
    for _ in range(300):
        _, conversation = draw_dressed(rng)
        bare = dataclasses.replace(conversation, messages=conversation.messages[-2:])
        if conversation.tools is None and len(conversation.messages) == 2:
            assert split_of(bare) == "train"


def test_dressed_answers_are_the_same():
    rng = random.Random(1)
    for _ in range(200):
        task, conversation = draw_dressed(rng)
        if task.graded:
            assert task.grade(conversation, completion(conversation))


def test_encode_marks_what_the_assistant_says():
    rng = random.Random(2)
    for _ in range(200):
        _, conversation = draw_dressed(rng)
        encoded = chat.encode(conversation)
        prompt = chat.tokenizer().encode(chat.render_prompt(conversation), add_special_tokens=False).ids
        assert encoded.tokens_T[: encoded.answer_start].tolist() == prompt
        answer = encoded.tokens_T[encoded.answer_start :]
        assert chat.tokenizer().decode(answer, skip_special_tokens=False) == completion(conversation)
        assert encoded.spoken_T[encoded.answer_start :].all()
        turns = sum(m["role"] == "assistant" for m in conversation.messages)
        assert np.sum(np.diff(encoded.spoken_T.astype(int)) == 1) == turns


def test_chunks_are_deterministic_and_whole():
    shapes = data.Shape(4, 512), data.Shape(1, 4096)
    steps = data.chunk(0, 3, *shapes, 0.5)
    again = data.chunk(0, 3, *shapes, 0.5)
    assert [[b.tokens_BT.shape for b in step] for step in steps] == [[(4, 512), (1, 4096)]] + [[(4, 512)]] * 3
    pad = chat.tokenizer().token_to_id(data.PAD)
    for batch, same in zip(itertools.chain(*steps), itertools.chain(*again), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(batch, same, strict=True))
        assert ((batch.item_BT < 0) == (batch.task_BT < 0)).all()
        assert (batch.tokens_BT[batch.item_BT < 0] == pad).all()
        assert not batch.weight_BT[batch.item_BT < 0].any()
        starts = np.diff(batch.item_BT, axis=1, prepend=-2) != 0  # of conversations and of the padding at the end
        np.testing.assert_array_equal(batch.offset_BT == 0, starts)
        for item in range(batch.item_BT[0].max() + 1):  # sqrt(n) for n tokens to predict
            weights = batch.weight_BT[0][batch.item_BT[0] == item]
            assert np.isclose(weights.sum(), np.count_nonzero(weights) ** 0.5)
    assert not np.array_equal(steps[0][0].tokens_BT, data.chunk(0, 4, *shapes, 0.5)[0][0].tokens_BT)


def test_a_conversation_longer_than_a_row_is_refused():
    conversation = chat.encode(draw_dressed(random.Random(0))[1])
    with pytest.raises(ValueError, match="a row 8"):
        data.pack([(conversation, 0)], data.Shape(2, 8))


CALL = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
USER = {"role": "user", "content": " Hi "}
CALLS = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    "messages, options, expected",
    [
        ([USER], {}, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        (
            [USER],
            {"enable_thinking": True},
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n",
        ),
        (
            [{"role": "system", "content": "Be."}, USER],
            {"prompt": False},
            "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n",
        ),
        (  # reasoning of turns before the last question is dropped, of later ones shown
            [
                USER,
                {"role": "assistant", "content": "<think>\na\n</think>\n\nb"},
                USER,
                {"role": "assistant", "content": "d", "reasoning_content": "c"},
            ],
            {"prompt": False},
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n<think>\nc\n</think>\n\nd<|im_end|>\n",
        ),
        (  # calls, results in one user turn that is no question
            [USER, CALLS, {"role": "tool", "content": "2"}, {"role": "tool", "content": "3"}],
            {},
            f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n{CALL}<|im_end|>\n"
            "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
        (  # text before calls, two calls, values that are not text
            [
                USER,
                {
                    "role": "assistant",
                    "content": "So:",
                    "tool_calls": [
                        {"function": {"name": "f", "arguments": {"x": 1}}},
                        {"name": "g", "arguments": {"l": ["a", 1], "b": True}},
                    ],
                },
            ],
            {"prompt": False},
            f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nSo:\n\n{CALL}\n"
            '<tool_call>\n<function=g>\n<parameter=l>\n["a", 1]\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n'
            "</function>\n</tool_call><|im_end|>\n",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "See "}, {"type": "image"}, {"type": "video"}]}],
            {"prompt": False},
            "<|im_start|>user\nSee <|vision_start|><|image_pad|><|vision_end|><|vision_start|><|video_pad|>"
            "<|vision_end|><|im_end|>\n",
        ),
    ],
)
def test_template(messages, options, expected):
    assert chat.render(messages, **options) == expected


def test_template_puts_system_text_after_the_tools():
    text = chat.render([{"role": "system", "content": "Be."}, USER], tools=[TOOL])
    declared = '<tools>\n{"type": "function", "function": {"name": "f", "parameters": {}}}\n</tools>'
    assert text.startswith("<|im_start|>system\n# Tools\n\n")
    assert text.index(declared) < text.index("\n\nBe.<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize(
    "messages, error",
    [
        ([], "no messages"),
        ([{"role": "assistant", "content": "Hi"}], "no user message"),
        ([{"role": "user", "content": "<tool_response>\n1\n</tool_response>"}], "no user message"),
        ([USER, {"role": "system", "content": "Be."}], "first message"),
        ([{"role": "system", "content": [{"type": "image"}]}, USER], "cannot hold images"),
        ([USER, {"role": "robot", "content": "x"}], "unknown role: robot"),
        ([USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}], "a mapping"),
    ],
)
def test_template_errors(messages, error):
    with pytest.raises(jinja2.TemplateError, match=error):
        chat.render(messages)


TEXTS = [
    "It's 2025:  3.50\n\n\tnaïve 你好 हिन्दी 🙂 ",
    "  x\r\n\r\ny",
    "<tool_call>a</tool_call><|im_end|>",
    "{'a': [1]}",
]


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trip(text):
    tokenizer = chat.tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_tokenizer_has_the_form_of_qwen():
    tokenizer = chat.tokenizer()
    size = tokenizer.get_vocab_size()
    assert [tokenizer.id_to_token(i) for i in range(size - 26, size)] == vocabulary.ADDED
    assert tokenizer.encode("1234").tokens == list("1234")
    assert tokenizer.decode(tokenizer.encode("<think>a</think><|im_end|>").ids) == "<think>a</think>"
    assert vocabulary.rows(tokenizer) % 64 == 0


def test_evaluate_counts_right_answers():
    def half(conversations):
        return [completion(c) if i % 2 else "wrong" for i, c in enumerate(conversations)]

    names = ["small_sum", "extract", "call"]
    assert evaluate.evaluate(half, names, items=4) == dict.fromkeys(names, 0.5)
    with pytest.raises(ValueError, match="sums unknown"):
        evaluate.evaluate(half, ["sums"])
