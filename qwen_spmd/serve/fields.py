# SPDX-License-Identifier: Apache-2.0
"""The fields of request bodies: which there are, what each may be, and ApiError, which says what is wrong with one.

Not here: what they mean together (`protocol.py`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

MAX_N = 128
MAX_STOPS, MAX_STOP_CHARS = 16, 1024


class ApiError(Exception):
    """An answer that is no success, as the OpenAI API words it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def bad_request(error: ValueError) -> ApiError:
    """Of a check made elsewhere: its messages begin with the field that they are about."""
    field = re.split(r"[ .\[]", str(error))[0]
    return ApiError(400, str(error), param=field if field in CHAT | COMPLETION else None)


# One function per type of value: the value as it is used from there on, or ApiError.


def wrong(name: str, value: Any, allowed: str) -> ApiError:
    shown = json.dumps(value, ensure_ascii=False)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return ApiError(400, f"{name} is {shown}, it must be {allowed}", param=name)


def string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong(name, value, "a string")
    return value


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value


def integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**64:
        raise wrong(name, value, "a 64-bit integer")
    return value


def count(name: str, value: Any) -> int:
    if integer(name, value) < 1:
        raise wrong(name, value, "at least 1")
    return value


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise wrong(name, value, "a number")
    return float(value)


def array(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise wrong(name, value, "a list")
    return value


def mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(name, value, "an object")
    return value


def stops(name: str, value: Any) -> tuple[str, ...]:
    value = [value] if isinstance(value, str) else array(name, value)
    if len(value) > MAX_STOPS or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARS for s in value):
        raise wrong(name, value, f"at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters")
    return tuple(value)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(integer(f"{name}[{i}]", id) for i, id in enumerate(array(name, value)))


def n_choices(name: str, value: Any) -> int:
    if count(name, value) > MAX_N:
        raise wrong(name, value, f"from 1 to {MAX_N}")
    return value


SAMPLING: dict[str, Callable[[str, Any], Any]] = {
    "temperature": number,
    "top_p": number,
    "top_k": integer,
    "min_p": number,
    "seed": integer,
    "min_tokens": integer,
    "stop": stops,
    "stop_token_ids": token_ids,
    "include_stop_str_in_output": boolean,
    "ignore_eos": boolean,
}
SHARED = SAMPLING | {
    "model": string,
    "max_tokens": count,
    "n": n_choices,
    "stream": boolean,
    "stream_options": mapping,
    "skip_special_tokens": boolean,
    "priority": integer,
}
CHAT = SHARED | {
    "messages": array,
    "max_completion_tokens": count,
    "chat_template_kwargs": mapping,
    "add_generation_prompt": boolean,
    "continue_final_message": boolean,
}
COMPLETION = SHARED | {"prompt": lambda name, value: value, "echo": boolean}

STREAM_OPTIONS = {"include_usage": boolean, "continuous_usage_stats": boolean, "include_obfuscation": boolean}

# Fields of the API that change no answer of this server, whatever their value.
INERT = frozenset(
    (
        "metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention", "request_id",
        "safety_identifier", "service_tier", "spaces_between_special_tokens", "user",
    )
)  # fmt: skip

# Fields that are not supported yet, and the values at which they ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "allowed_token_ids", "audio", "cache_salt", "chat_template", "guided_choice", "guided_grammar",
            "guided_json", "guided_regex", "kv_transfer_params", "prompt_logprobs", "reasoning_effort",
            "structured_outputs", "thinking_token_budget", "truncate_prompt_tokens", "web_search_options",
        ),
        (),
    ),
    **dict.fromkeys(
        (
            "add_special_tokens", "logprobs", "return_token_ids", "return_tokens_as_token_ids", "store",
            "use_beam_search",
        ),
        (False,),
    ),
    **dict.fromkeys(("bad_words", "documents", "functions", "logits_processors", "tools"), ([],)),
    **dict.fromkeys(("logit_bias", "mm_processor_kwargs"), ({},)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_logprobs"), (0,)),
    **dict.fromkeys(("best_of", "length_penalty", "repetition_penalty"), (1,)),
    "function_call": ("none",),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "verbosity": ("medium",),
}  # fmt: skip
