# SPDX-License-Identifier: Apache-2.0
"""The OpenAI API, through its own client and through bare HTTP, from a live server with a scripted engine."""

import json
import socket
import threading

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from qwen_spmd.serve import http as http_module

USER = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "tiny", "messages": USER}
MIXED = "Käse 🎉🎉 你好 e\u0301 👩\u200d🔬 and plain words"


def chat(live, **body):
    return live.http.post("/v1/chat/completions", json=CHAT | body)


def complete(live, prompt="abc", **body):
    return live.http.post("/v1/completions", json={"model": "tiny", "prompt": prompt} | body)


def events(response):
    """The data of a stream, which must be well formed and end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    assert data.pop() == "[DONE]"
    return [json.loads(item) for item in data]


def error(response, status, *parts):
    """The error of a response; its message has these parts."""
    assert response.status_code == status, response.text
    body = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert all(part in body["message"] for part in parts), body["message"]
    return body


def metric(live, name, **labels):
    for family in text_string_to_metric_families(live.http.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name and sample.labels.items() >= {"model_name": "tiny", **labels}.items():
                return sample.value
    raise AssertionError(f"no {name}")


# Answers


def test_chat_answer(live):
    answer = live.openai.chat.completions.create(**CHAT)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "tiny"
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello!", "stop")
    prompt = len(live.tokenizer.render_chat(USER)[1])
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": prompt,
        "completion_tokens": 7,
        "total_tokens": prompt + 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert live.engine.requests[0].prompt == live.tokenizer.render_chat(USER)[1]


def test_completion_answer(live):
    answer = live.openai.completions.create(model="tiny", prompt="abc")
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello!", "stop")
    assert live.engine.requests[0].prompt == live.tokenizer.encode("abc")
    assert live.engine.requests[0].params.max_tokens == 16


@pytest.mark.parametrize("window", [1, 3, 100])
@pytest.mark.parametrize("options", [{}, {"stop": ["and"]}, {"n": 3}, {"max_tokens": 9}], ids=str)
def test_stream_is_the_plain_answer(live, window, options):
    live.says(MIXED, window=window)
    plain = live.openai.chat.completions.create(**CHAT, **options)
    texts, reasons, roles = {}, {}, {}
    with live.openai.chat.completions.create(**CHAT, **options, stream=True) as stream:
        for chunk in stream:
            assert chunk.object == "chat.completion.chunk"
            [choice] = chunk.choices
            assert choice.index not in reasons, "nothing comes after the end"
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            roles.setdefault(choice.index, choice.delta.role)
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
                assert not choice.delta.content, "the end is a chunk of its own"
    assert texts == {choice.index: choice.message.content for choice in plain.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in plain.choices}
    assert set(roles.values()) == {"assistant"}


def test_completion_stream_is_the_plain_answer(live):
    live.says(MIXED)
    plain = complete(live, max_tokens=100).json()["choices"][0]
    chunks = events(complete(live, max_tokens=100, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == plain["text"] == MIXED
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "stop"]


def test_characters_are_whole_in_every_chunk(live):
    live.says(MIXED)
    chunks = [chunk["choices"][0]["delta"].get("content", "") for chunk in events(chat(live, stream=True))]
    assert "".join(chunks) == MIXED
    assert "\ufffd" not in "".join(chunks)
    assert len(chunks) > 20


def test_max_tokens_in_the_middle_of_a_character(live):
    live.says("a🎉")
    answer = chat(live, max_tokens=3).json()
    assert (answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]) == ("a\ufffd", "length")


def test_usage_comes_last_and_alone(live):
    chunks = events(chat(live, stream=True, stream_options={"include_usage": True}))
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 7
    assert "usage" not in events(chat(live, stream=True))[0]
    options = {"continuous_usage_stats": True, "include_usage": True}
    counts = [c["usage"]["completion_tokens"] for c in events(chat(live, stream=True, stream_options=options))]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 7)


def test_stop_strings(live):
    live.says("one two three", end="")
    answer = chat(live, stop="o th").json()
    assert answer["choices"][0]["message"]["content"] == "one tw"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len("one two th")
    assert live.engine.aborted == [(live.engine.requests[0].id, "stop")]
    assert (
        chat(live, stop=["x", "two"], include_stop_str_in_output=True).json()["choices"][0]["message"]["content"]
        == "one two"
    )


def test_stop_ids(live):
    live.says("abc<|im_end|>def<|endoftext|>")

    def text(**options):
        return chat(live, **options).json()["choices"][0]["message"]["content"]

    assert text() == "abc"
    assert text(ignore_eos=True, max_tokens=8) == "abcdef"
    assert text(ignore_eos=True, max_tokens=8, skip_special_tokens=False) == "abc<|im_end|>def<|endoftext|>"
    [b] = live.tokenizer.encode("b")
    assert text(stop_token_ids=[b]) == "a"
    assert text(stop_token_ids=[b], include_stop_str_in_output=True) == "ab"
    assert chat(live, stop_token_ids=[b]).json()["usage"]["completion_tokens"] == 2
    assert text(min_tokens=5) == "abcdef"


def test_n_choices(live):
    live.engine.script = lambda request: live.tokenizer.encode(f"{request.seed}<|im_end|>")
    for stream in (False, True):
        texts = {}
        response = chat(live, n=3, seed=2**32 - 2, stream=stream)
        for chunk in events(response) if stream else [response.json()]:
            for choice in chunk["choices"]:
                text = choice["delta"].get("content", "") if stream else choice["message"]["content"]
                texts[choice["index"]] = texts.get(choice["index"], "") + text
        assert texts == {0: str(2**32 - 2), 1: str(2**32 - 1), 2: "0"}
    a, b = live.engine.requests[:2]
    assert (a.params, a.prompt, a.max_len, a.stop_ids) == (b.params, b.prompt, b.max_len, b.stop_ids)
    usage = chat(live, n=3).json()["usage"]
    assert usage["prompt_tokens"] == len(a.prompt)
    assert len({request.seed for request in live.engine.requests}) >= 6, "without a seed, all are random"


def test_many_prompts(live):
    live.engine.script = lambda request: [*request.prompt, *live.tokenizer.encode("<|im_end|>")]
    ids = live.tokenizer.encode("xyz")
    for prompt, texts in [("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), (ids, ["xyz"]), ([ids, ids[:1]], ["xyz", "x"])]:
        answer = complete(live, prompt, n=2).json()
        assert [choice["text"] for choice in answer["choices"]] == [text for text in texts for _ in range(2)]
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(texts)))
        assert answer["usage"]["prompt_tokens"] == len("".join(texts))


@pytest.mark.parametrize("stream", [False, True])
def test_echo(live, stream):
    ids = live.tokenizer.encode("abc")
    response = complete(live, [ids, ids[:1]], echo=True, stream=stream)
    texts = ["", ""]
    for chunk in events(response) if stream else [response.json()]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["abcHello!", "aHello!"]


def test_chat_template_options(live):
    def prompt(**body):
        assert chat(live, **body).status_code == 200
        return live.tokenizer.decode(live.engine.requests[-1].prompt, skip_special_tokens=False)

    assert prompt() == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(chat_template_kwargs={"enable_thinking": False}).endswith("assistant\n<think></think>")
    assert prompt(add_generation_prompt=False).endswith("Hi<|im_end|>\n")
    messages = [*USER, {"role": "assistant", "content": "Well"}]
    assert prompt(messages=messages, continue_final_message=True).endswith("assistant\nWell")


def test_default_chat_template_options(start):
    live = start("--default-chat-template-kwargs", '{"enable_thinking": false}')
    live.says("a")
    chat(live)
    chat(live, chat_template_kwargs={"enable_thinking": True})
    ends = [live.tokenizer.decode(request.prompt)[-8:] for request in live.engine.requests]
    assert [end == "</think>" for end in ends] == [True, False]


def test_sampling_options(live):
    chat(live)
    params = live.engine.requests[-1].params
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 1.0), "what the model's authors recommend"
    sampling = {"temperature": 0, "top_k": 10**9, "top_p": 0.5, "min_p": 0.1, "min_tokens": 2, "seed": -5}
    chat(live, **sampling, priority=3)
    request = live.engine.requests[-1]
    assert (request.params.temperature, request.params.top_p, request.params.min_p) == (0, 0.5, 0.1)
    assert (request.params.top_k, request.params.min_tokens, request.priority) == (live.engine.vocab_size, 2, 3)
    assert request.seed == 2**32 - 5


def test_seedless_requests_repeat_under_a_server_seed(start):
    seeds = []
    for _ in range(2):
        live = start("--seed", "5")
        live.says("a")
        chat(live)
        chat(live)
        seeds.append([request.seed for request in live.engine.requests])
    assert seeds[0] == seeds[1]
    assert seeds[0][0] != seeds[0][1]


def test_max_tokens_is_clamped_to_the_room(live):
    for body in ({}, {"max_tokens": 10**6}, {"max_completion_tokens": 10**6}):
        assert chat(live, **body).status_code == 200
        assert live.engine.requests[-1].max_len == live.engine.max_model_len
    chat(live, max_completion_tokens=5, max_tokens=9)
    assert live.engine.requests[-1].params.max_tokens == 5
    assert complete(live, [1] * 255).status_code == 200
    body = error(complete(live, [1] * 256), 400, "prompt has 256 tokens", "at most 255", "max_model_len is 256")
    assert (body["param"], body["code"]) == ("prompt", "context_length_exceeded")


def test_control_tokens_typed_by_a_user_are_text(live):
    chat(live, messages=[{"role": "user", "content": "<|im_end|>"}])
    [end] = live.tokenizer.encode("<|im_end|>")
    assert live.engine.requests[0].prompt.count(end) == 1


# Refusals

WRONG = [
    ({"temperature": "hot"}, "temperature", 'temperature is "hot", it must be a number'),
    ({"temperature": True}, "temperature", "temperature is true, it must be a number"),
    ({"temperature": -1}, "temperature", "temperature is -1.0, it must be from 0"),
    ({"top_p": 0}, "top_p", "top_p is 0.0, it must be above 0"),
    ({"top_k": 1.5}, "top_k", "top_k is 1.5, it must be a 64-bit integer"),
    ({"top_k": -2}, "top_k", "top_k is -2"),
    ({"min_p": 2}, "min_p", "min_p is 2.0"),
    ({"seed": 10**30}, "seed", "64-bit integer"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0, it must be at least 1"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens is -1"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "min_tokens is 9, it must be at most max_tokens (5)"),
    ({"min_tokens": 1000}, "min_tokens", "min_tokens is 1000, it must be at most max_tokens"),
    ({"n": 0}, "n", "n is 0"),
    ({"n": 1000}, "n", "n is 1000, it must be from 1 to 128"),
    ({"stream": "yes"}, "stream", 'stream is "yes", it must be true or false'),
    ({"stop": [""]}, "stop", 'stop is [""]'),
    ({"stop": ["a"] * 17}, "stop", "at most 16 strings"),
    ({"stop": {"a": 1}}, "stop", "it must be a list"),
    ({"stop_token_ids": [300]}, "stop_token_ids[0]", "stop_token_ids[0] is 300, it must be a token id from 0 to 299"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "stop_token_ids[0] is -1"),
    ({"stop_token_ids": list(range(15))}, "stop_token_ids", "stop_token_ids has 15 ids, it must have at most 14"),
    ({"priority": "high"}, "priority", 'priority is "high"'),
    ({"priority": 10**400}, "priority", "it must be a 64-bit integer"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream must be true"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "an object with include_usage"),
    ({"messages": []}, "messages", "messages is missing or empty"),
    ({"messages": None}, "messages", "messages is missing or empty"),
    ({"messages": "hi"}, "messages", 'messages is "hi", it must be a list'),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "it must be 'text'"),
    ({"messages": [{"role": "user", "content": "long " * 99}]}, "messages", "max_model_len is 256"),
    ({"chat_template_kwargs": {"enable_thinkin": 1}}, "chat_template_kwargs", "chat_template_kwargs.enable_thinkin"),
    ({"chat_template_kwargs": {"messages": []}}, "messages", "must be the field messages"),
    ({"chat_template_kwargs": {"tools": []}}, "tools", "must be the field tools"),
    ({"continue_final_message": True}, "continue_final_message", "the last message must be the assistant's"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "must be false"),
    ({"temprature": 1}, "temprature", "unknown field 'temprature', did you mean temperature?"),
    ({"prompt": "a"}, "prompt", "unknown field 'prompt'"),
    ({"zzz": None}, "zzz", "unknown field 'zzz', the fields are"),
    ({"tools": [{"type": "function"}]}, "tools", "it is not supported yet"),
    ({"tool_choice": "required"}, "tool_choice", 'must be absent or "none" or "auto": it is not supported yet'),
    ({"logprobs": True}, "logprobs", "it is not supported yet"),
    ({"top_logprobs": 3}, "top_logprobs", "it is not supported yet"),
    ({"presence_penalty": 0.5}, "presence_penalty", "it is not supported yet"),
    ({"repetition_penalty": 1.1}, "repetition_penalty", "it is not supported yet"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "it is not supported yet"),
    ({"response_format": {"type": "json_object"}}, "response_format", "it is not supported yet"),
    ({"structured_outputs": {"json": {}}}, "structured_outputs", "it is not supported yet"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "it is not supported yet"),
    ({"store": True}, "store", "it is not supported yet"),
]


@pytest.mark.parametrize(("body", "param", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_field_is_named_and_reaches_no_engine(live, body, param, message):
    assert error(chat(live, **body), 400, message)["param"] == param
    assert live.engine.requests == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": None}, "prompt is missing"),
        ({"prompt": []}, "prompt is []"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": [[]]}, "prompt is empty"),
        ({"prompt": 5}, "prompt is 5"),
        ({"prompt": [300]}, "prompt[0] is 300, it must be a token id from 0 to 299"),
        ({"prompt": [True]}, "prompt[0] is true"),
        ({"prompt": ["a", 1]}, 'prompt[0] is "a"'),
        ({"prompt": [[1], "a"]}, 'prompt[1] is "a"'),
        ({"prompt": [[1], [-1]]}, "prompt[1][0] is -1"),
        ({"messages": []}, "unknown field 'messages'"),
        ({"echo": 1}, "echo is 1"),
        ({"logprobs": 0}, "logprobs is 0"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
    ],
    ids=str,
)
def test_a_wrong_completion_is_named(live, body, message):
    error(live.http.post("/v1/completions", json={"prompt": "a"} | body), 400, message)
    assert live.engine.requests == []


def test_fields_that_ask_for_nothing_pass(live):
    body = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "n": 1, "logprobs": False}
    body |= {"tools": [], "tool_choice": "none", "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}}
    body |= {"response_format": {"type": "text"}, "top_logprobs": None, "stop": None, "stream_options": None}
    body |= {"parallel_tool_calls": True, "reasoning_effort": None, "temperature": None}
    assert chat(live, **body).status_code == 200
    assert live.engine.requests[0].params.temperature == 0.6


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"temperature": NaN}', "NaN is not a JSON number"),
        (b'{"temperature": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"model": "\\ud800"}', "not JSON"),
        (b'{"model": "\xff"}', "not JSON"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_body_that_is_no_json_object(live, raw, message):
    response = live.http.post("/v1/chat/completions", content=raw, headers={"content-type": "application/json"})
    error(response, 400, message)


def test_requests_that_are_no_requests(live, monkeypatch):
    url = "/v1/chat/completions"
    error(live.http.post(url, content="model=x", headers={"content-type": "text/plain"}), 415, "text/plain")
    error(live.http.post(url, content="{}"), 415, "application/json")
    assert (
        live.http.post(url, content="{}", headers={"content-type": "application/json; charset=utf-8"}).status_code
        == 400
    )
    response = live.http.get(url)
    error(response, 405, "GET /v1/chat/completions")
    assert response.headers["allow"] == "POST"
    error(live.http.get("/v1/nothing"), 404, "/v1/nothing")
    monkeypatch.setattr(http_module, "MAX_BODY_BYTES", 100)
    error(chat(live, user="x" * 100), 413, "more than 100 bytes")
    headers = {"content-type": "application/json"}
    error(live.http.post(url, content=iter([b"x" * 60, b"x" * 60]), headers=headers), 413, "more than 100 bytes")


def test_models(live):
    assert [model.id for model in live.openai.models.list()] == ["tiny", "alias"]
    card = live.openai.models.retrieve("alias")
    assert (card.object, card.max_model_len) == ("model", 256)
    with pytest.raises(openai.NotFoundError) as caught:
        live.openai.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="model is 'other', it must be 'tiny' or 'alias'"):
        live.openai.chat.completions.create(model="other", messages=USER)
    assert chat(live, model="alias").json()["model"] == "alias"
    assert live.http.post("/v1/chat/completions", json={"messages": USER}).json()["model"] == "tiny"


def test_a_bug_is_a_500(live, monkeypatch):
    monkeypatch.setattr(live.tokenizer, "render_chat", lambda **options: 1 / 0)
    error(chat(live), 500, "ZeroDivisionError")


# Load, disconnects, death


def test_a_full_queue_is_429(live, monkeypatch):
    live.engine.hold.set()
    monkeypatch.setattr(live.engine, "capacity", 2)
    response = chat(live, n=3)
    error(response, 429, "2 requests wait")
    assert response.headers["retry-after"] == "1"
    assert [reason for _, reason in live.engine.aborted] == ["abort", "abort"], "those that had a place gave it back"
    with pytest.raises(openai.RateLimitError):
        live.openai.chat.completions.create(**CHAT, n=3)


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(live, monkeypatch, stream, queued):
    monkeypatch.setattr(live.engine, "max_model_len", 10**7)
    live.engine.script = lambda request: [1] * 10**6
    if queued:
        live.engine.hold.set()
    body = json.dumps(CHAT | {"stream": stream, "n": 2, "ignore_eos": True}).encode()
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    head += [f"Content-Length: {len(body)}", "", ""]
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall("\r\n".join(head).encode() + body)
        live.wait(lambda: len(live.engine.requests) == 2)
        if not queued:
            live.wait(lambda: live.engine.requests[0].output)
        assert live.engine.aborted == []
    live.wait(lambda: len(live.engine.aborted) == 2)
    assert live.engine.aborted == [(request.id, "abort") for request in live.engine.requests]


def test_the_openai_client_may_close_a_stream(live):
    live.engine.hold.set()
    with live.openai.chat.completions.create(**CHAT, stream=True):
        live.wait(lambda: live.engine.requests)
    live.wait(lambda: live.engine.aborted)


def in_background(call):
    """A thread with the result of `call` as `result`."""
    thread = threading.Thread(target=lambda: setattr(thread, "result", call()), daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("silently", [False, True])
def test_a_dead_engine_ends_all_requests(start, silently):
    live = start()
    live.engine.hold.set()
    plain = in_background(lambda: httpx.post(live.url + "/v1/chat/completions", json=CHAT, timeout=10))
    stream = in_background(
        lambda: httpx.post(live.url + "/v1/chat/completions", json=CHAT | {"stream": True}, timeout=10)
    )
    live.wait(lambda: len(live.engine.requests) == 2)
    live.engine.die("out of memory", silently=silently)
    plain.join()
    stream.join()
    assert error(plain.result, 500, "out of memory")["type"] == "server_error"
    assert [set(event) for event in events(stream.result)] == [{"error"}]
    assert "out of memory" in stream.result.text
    error(chat(live), 500, "the engine has stopped: out of memory")
    for path in ("/health", "/ready"):
        assert live.http.get(path).status_code == 503
        assert live.http.get(path).json()["reason"] == "out of memory"
    with pytest.raises(openai.InternalServerError):
        live.openai.chat.completions.create(**CHAT)


def test_the_openai_client_sees_an_error_in_a_stream(start):
    live = start()
    live.says("abc", end="")
    with live.openai.chat.completions.create(**CHAT, stream=True) as stream:
        assert next(stream).choices[0].delta.content
        live.engine.die("lightning")
        with pytest.raises(openai.APIError, match="lightning"):
            list(stream)


def test_draining_takes_nothing_new_and_finishes_the_rest(start):
    live = start()
    live.says("done")
    live.engine.hold.set()
    running = in_background(lambda: httpx.post(live.url + "/v1/chat/completions", json=CHAT, timeout=10))
    live.wait(lambda: live.engine.requests)
    live.app.state.front.draining = True
    assert live.http.get("/ready").json()["status"] == "draining"
    assert live.http.get("/ready").status_code == 503
    assert live.http.get("/health").status_code == 200
    response = chat(live)
    assert error(response, 503, "shutting down")["code"] == "shutting_down"
    assert "retry-after" in response.headers
    live.engine.hold.clear()
    running.join()
    assert running.result.json()["choices"][0]["message"]["content"] == "done"


def test_health(live):
    assert live.http.get("/health").json()["status"] == "ok"
    assert live.http.get("/ready").json() == {"status": "ready"}
    live.engine.facts.step_age_s = 301.0
    for path in ("/health", "/ready"):
        response = live.http.get(path)
        assert (response.status_code, response.json()["status"]) == (503, "stuck")
        assert "301.0 s" in response.json()["reason"]


def test_metrics(start):
    live = start()
    live.says("Hello!", window=4)
    chat(live)
    chat(live, max_tokens=2)
    live.engine.hold.set()
    with live.openai.chat.completions.create(**CHAT, stream=True):
        live.wait(lambda: len(live.engine.requests) == 3)
    live.wait(lambda: live.engine.aborted)
    prompt = len(live.engine.requests[0].prompt)
    assert metric(live, "vllm:request_success_total", finished_reason="stop") == 1
    assert metric(live, "vllm:request_success_total", finished_reason="length") == 1
    assert metric(live, "vllm:request_success_total", finished_reason="abort") == 1
    assert metric(live, "vllm:prompt_tokens_total") == 2 * prompt
    assert metric(live, "vllm:generation_tokens_total") == 7 + 2
    assert metric(live, "vllm:inter_token_latency_seconds_count") == 3
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time",
                 "request_decode_time", "request_inference_time", "request_time_per_output_token"):  # fmt: skip
        assert metric(live, f"vllm:{name}_seconds_count") == 2
        assert metric(live, f"vllm:{name}_seconds_bucket", le="+Inf") == 2
        assert 0 <= metric(live, f"vllm:{name}_seconds_sum") < 2
    assert metric(live, "vllm:request_generation_tokens_sum") == 9
    live.engine.facts.running, live.engine.facts.waiting = 3, 4
    values = {"vllm:num_requests_running": 3, "vllm:num_requests_waiting": 4, "vllm:kv_cache_usage_perc": 0.25}
    values |= {"vllm:num_preemptions_total": 6, "qwen_spmd:recurrent_slot_usage_perc": 0.5}
    values |= {"qwen_spmd:rank_imbalance": 1.5, "qwen_spmd:expert_imbalance": 1.25}
    values |= {"qwen_spmd:compiles_total": 5, "qwen_spmd:compiles_after_ready_total": 0}
    values |= {"qwen_spmd:step_tokens_total": 70, "qwen_spmd:padding_tokens_total": 30, "qwen_spmd:steps_total": 7}
    assert {name: metric(live, name) for name in values} == values
    assert [metric(live, "qwen_spmd:rank_requests_running", rank=rank) for rank in "01"] == [2, 1]
    assert [metric(live, "qwen_spmd:rank_tokens_total", rank=rank) for rank in "01"] == [40, 30]


# Around the API


def test_request_ids(live):
    response = live.http.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "my-id"})
    assert response.headers["x-request-id"] == "my-id"
    assert response.json()["id"] == "chatcmpl-my-id"
    assert live.engine.requests[0].id.startswith("chatcmpl-my-id-")
    ids = {chat(live).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    error(live.http.get("/health", headers={"X-Request-Id": "a b"}), 400, "X-Request-Id is 'a b'")


def test_two_requests_may_have_one_id(live):
    live.engine.hold.set()
    headers = {"X-Request-Id": "twin"}
    twins = [
        in_background(lambda: httpx.post(live.url + "/v1/chat/completions", json=CHAT, headers=headers)) for _ in "ab"
    ]
    live.wait(lambda: len(live.engine.requests) == 2)
    live.engine.hold.clear()
    for twin in twins:
        twin.join()
        assert twin.result.json()["choices"][0]["message"]["content"] == "Hello!"


def test_api_keys(start):
    live = start("--api-key", "first", "sécond")
    for path in ("/health", "/ready", "/metrics"):
        assert live.http.get(path).status_code == 200
    for header in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic first"},
    ):
        assert error(live.http.get("/v1/models", headers=header), 401)["code"] == "invalid_api_key"
    for key in ("first", "sécond"):
        response = live.http.get("/v1/models", headers={"Authorization": f"Bearer {key}".encode()})
        assert response.status_code == 200
    with pytest.raises(openai.AuthenticationError):
        live.openai.models.list()


def test_cors(start):
    live = start("--allowed-origins", "https://a.example", "--api-key", "k")
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    response = live.http.options("/v1/models", headers={"Origin": "https://a.example", **ask})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    response = live.http.get("/health", headers={"Origin": "https://b.example"})
    assert "access-control-allow-origin" not in response.headers


def test_no_cors_unless_asked_for(live):
    assert (
        "access-control-allow-origin" not in live.http.get("/health", headers={"Origin": "https://a.example"}).headers
    )


def test_version(live):
    assert live.http.get("/version").json()["version"]


def test_many_at_once(live):
    """One event loop and one engine thread serve them all, and nobody gets another's tokens."""
    live.engine.script = lambda request: [*request.prompt, *live.tokenizer.encode("<|im_end|>")]
    threads = [
        in_background(lambda i=i: httpx.post(live.url + "/v1/completions", json={"prompt": f"<{i}>"}))
        for i in range(24)
    ]
    for i, thread in enumerate(threads):
        thread.join()
        assert thread.result.json()["choices"][0]["text"] == f"<{i}>"
