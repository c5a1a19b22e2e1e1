# SPDX-License-Identifier: Apache-2.0
"""Request bodies of the OpenAI API: JSON to Ask, or an ApiError that names the field, the value and what is allowed.

Not here: single fields (`fields.py`), chat messages (`chat_template.py`), answers (`responses.py`), tokens.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any

from qwen_spmd.serve.fields import (
    CHAT,
    COMPLETION,
    INERT,
    NEUTRAL,
    SAMPLING,
    STREAM_OPTIONS,
    ApiError,
    array,
    bad_request,
    wrong,
)
from qwen_spmd.serve.request import SamplingParams

MAX_PROMPTS = 1024
COMPLETION_MAX_TOKENS = 16
"""Of /v1/completions when the body says nothing, as OpenAI and vLLM have it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """What a body asks for. `chat` is messages and template variables, `prompts` is texts or token ids: one is set.

    params   with the model's defaults; max_tokens does not yet know how long the prompt is
    """

    model: str | None
    chat: dict[str, Any] | None = None
    prompts: list[str] | list[list[int]] | None = None
    params: SamplingParams
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    skip_special_tokens: bool
    priority: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defaults:
    """What the server knows when a body is read."""

    vocab_size: int
    sampling: Mapping[str, Any]
    chat_template_kwargs: Mapping[str, Any]


def parse_json(raw: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        body = json.loads(raw, parse_constant=refuse)
        # Half of a surrogate pair can be written as an escape. It is no text, and no answer could repeat it.
        if b"\\u" in raw:
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body is not a JSON object")
    return body


def parse_chat(body: Mapping[str, Any], defaults: Defaults) -> Ask:
    values = _read(body, CHAT)
    if not values.get("messages"):
        raise ApiError(
            400, "messages is missing or empty, it must be a list with at least one message", param="messages"
        )
    if "max_completion_tokens" in values:  # the newer name
        values["max_tokens"] = values["max_completion_tokens"]
    continued = values.get("continue_final_message", False)
    chat = {
        **defaults.chat_template_kwargs,
        **values.get("chat_template_kwargs", {}),
        "messages": values["messages"],
        "add_generation_prompt": values.get("add_generation_prompt", not continued),
        "continue_final_message": continued,
    }
    for name in values.get("chat_template_kwargs", {}):
        if name in CHAT or name == "tools":
            raise ApiError(400, f"chat_template_kwargs.{name} must be the field {name} of the body", param=name)
    return _ask(values, defaults, chat=chat)


def parse_completion(body: Mapping[str, Any], defaults: Defaults) -> Ask:
    values = _read(body, COMPLETION)
    if "prompt" not in values:
        raise ApiError(
            400, "prompt is missing, it must be a string or a list of token ids, or a list of these", param="prompt"
        )
    if "max_tokens" not in body:
        values["max_tokens"] = COMPLETION_MAX_TOKENS
    return _ask(values, defaults, prompts=_prompts(values["prompt"], defaults.vocab_size))


def _read(body: Mapping[str, Any], fields: Mapping[str, Callable[[str, Any], Any]]) -> dict[str, Any]:
    """The values that are set, each checked. Null is the same as not set."""
    values = {}
    for name, value in body.items():
        if name in fields:
            if value is not None:
                values[name] = fields[name](name, value)
        elif name in NEUTRAL:
            # `False == 0`, and a flag is not a number to the API.
            neutral = any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in NEUTRAL[name])
            if value is not None and not neutral:
                allowed = " or ".join(["absent", *(json.dumps(v) for v in NEUTRAL[name])])
                raise wrong(name, value, f"{allowed}: it is not supported yet")
        elif name not in INERT:
            near = difflib.get_close_matches(name, [*fields, *NEUTRAL, *INERT], n=1)
            hint = f"did you mean {near[0]}?" if near else "the fields are " + ", ".join(sorted(fields))
            raise ApiError(400, f"unknown field {name[:80]!r}, {hint}", param=name[:80])
    return values


def _ask(values: dict[str, Any], defaults: Defaults, **prompt: Any) -> Ask:
    options = {}
    if "stream_options" in values:
        if not values.get("stream", False):
            raise ApiError(400, "stream_options is set, stream must be true with it", param="stream_options")
        for name, value in values["stream_options"].items():
            if name not in STREAM_OPTIONS:
                raise wrong("stream_options", values["stream_options"], f"an object with {', '.join(STREAM_OPTIONS)}")
            options[name] = value is not None and STREAM_OPTIONS[name](f"stream_options.{name}", value)
    given = {name: values[name] for name in (*SAMPLING, "max_tokens") if name in values}
    if "top_k" in given:
        given["top_k"] = min(given["top_k"], defaults.vocab_size)
    for i, id in enumerate(given.get("stop_token_ids", ())):
        _check_id(f"stop_token_ids[{i}]", id, defaults.vocab_size)
    try:
        params = SamplingParams(**(dict(defaults.sampling) | given))
    except ValueError as error:
        raise bad_request(error) from None
    return Ask(
        model=values.get("model"),
        params=params,
        n=values.get("n", 1),
        stream=values.get("stream", False),
        include_usage=options.get("include_usage", False),
        continuous_usage=options.get("continuous_usage_stats", False),
        echo=values.get("echo", False),
        skip_special_tokens=values.get("skip_special_tokens", True),
        priority=values.get("priority", 0),
        **prompt,
    )


def _prompts(value: Any, vocab_size: int) -> list[str] | list[list[int]]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value or (len(value) > MAX_PROMPTS and not isinstance(value[0], int)):
        raise wrong("prompt", value, f"a string or a list of token ids, or a list of 1 to {MAX_PROMPTS} of these")
    if all(isinstance(item, str) for item in value):
        return value
    if not isinstance(value[0], list):
        value = [value]
    for i, ids in enumerate(value):
        name = "prompt" if len(value) == 1 else f"prompt[{i}]"
        for j, id in enumerate(array(name, ids)):
            _check_id(f"{name}[{j}]", id, vocab_size)
    return value


def _check_id(name: str, id: Any, vocab_size: int) -> None:
    if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < vocab_size:
        raise wrong(name, id, f"a token id from 0 to {vocab_size - 1}")
