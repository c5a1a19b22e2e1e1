# SPDX-License-Identifier: Apache-2.0
"""ChatTemplate: OpenAI chat messages to the text of a prompt, through the checkpoint's own Jinja template.

Not here: token ids.
"""

from __future__ import annotations

import datetime
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.meta
import jinja2.sandbox

ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatTemplate:
    """
    source           the template
    named_tokens     bos_token, eos_token, ...: templates may read them
    control_tokens   tokens that only the template may write
    """

    def __init__(self, source: str, named_tokens: Mapping[str, str], control_tokens: Iterable[str]) -> None:
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._reads = jinja2.meta.find_undeclared_variables(env.parse(source))
            self._template = env.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from None
        self._named_tokens = dict(named_tokens)
        self._control_tokens = sorted(control_tokens, key=len, reverse=True)  # the longest match, as tokenizers have it
        self._control = re.compile("|".join(map(re.escape, self._control_tokens)) or r"(?!)")

    def render(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[tuple[str, bool]]:
        """The prompt as parts (text, literal), where control tokens in a literal part are words of the caller.

        ValueError names what is wrong with a message, or says what the template did not like.
        `kwargs` are variables of the template, such as `enable_thinking`.
        """
        self._check(kwargs)
        messages = read_messages(messages)
        if continue_final_message:
            if add_generation_prompt:
                raise ValueError("continue_final_message is true, add_generation_prompt must be false with it")
            if messages[-1]["role"] != "assistant":
                raise ValueError("continue_final_message is true, the last message must be the assistant's")
        marks = _Marks(self._control, self._control_tokens)
        end = marks.new("end")
        try:
            messages, tools = marks.hide(messages), marks.hide(tools)
            if continue_final_message:
                messages[-1]["content"] += end
            text = self._template.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **(self._named_tokens | kwargs),
            )
        except Exception as error:  # templates are programs over the caller's data: anything can come out of them
            raise ValueError(f"messages do not fit the model's chat template: {error}") from error
        if continue_final_message:
            text, found, _ = text.partition(end)
            if not found:
                raise ValueError("continue_final_message is true, but the chat template left the last message out")
        return marks.parts(text)

    def _check(self, kwargs: Mapping[str, Any]) -> None:
        own = {"messages", "tools", "documents", *self._named_tokens}
        for name in kwargs:
            if name in own:
                raise ValueError(f"chat_template_kwargs.{name} cannot be set, the server sets it")
            # Clients send enable_thinking to every model, and one that never thinks does as it says.
            if name not in self._reads and name != "enable_thinking":
                free = ", ".join(sorted(self._reads - own - {"add_generation_prompt"})) or "none"
                raise ValueError(
                    f"chat_template_kwargs.{name} is not read by the chat template, those it reads: {free}"
                )


class _Marks:
    """Stand-ins for the control tokens that callers typed, while a template works on their text.

    The template sees the same text otherwise: what it looks for (`</think>`, a prefix, blanks at the ends) it finds.
    Afterwards the control tokens in its output are its own. A random name makes a stand-in impossible to forge.
    """

    def __init__(self, control: re.Pattern[str], tokens: list[str]) -> None:
        self._control, self._tokens = control, tokens
        self._name = secrets.token_hex(8)
        self._used = False

    def new(self, what: object) -> str:
        return f"\ufdd0{self._name}.{what}\ufdd1"

    def hide(self, value: Any) -> Any:
        if isinstance(value, str):
            hidden = self._control.sub(lambda match: self.new(self._tokens.index(match[0])), value)
            self._used |= hidden != value
            return hidden
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        if isinstance(value, dict):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        return value

    def parts(self, text: str) -> list[tuple[str, bool]]:
        if not self._used:
            return [(text, False)]
        # Cut at the template's control tokens, where tokenizers cut too: between them no id depends on the cut.
        parts, start = [], 0
        for match in self._control.finditer(text):
            parts += [(self._show(text[start : match.start()]), True), (match[0], False)]
            start = match.end()
        parts.append((self._show(text[start:]), True))
        return [part for part in parts if part[0]]

    def _show(self, text: str) -> str:
        return re.sub(f"\ufdd0{self._name}\\.(\\d+)\ufdd1", lambda match: self._tokens[int(match[1])], text)


def read_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages of the OpenAI API in the form that templates expect. ValueError names the part that is wrong."""
    if not messages:
        raise ValueError("messages is empty, it must have at least one message")
    return [_read_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _read_message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{where} is {_short(message)}, it must be an object")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{where}.role is {_short(role)}, it must be one of {', '.join(ROLES)}")
    # Other keys stay as they are: a template may read them, and clients send back whole answers.
    out = {key: value for key, value in message.items() if value is not None}
    out["role"] = "system" if role == "developer" else role
    out["content"] = _read_content(f"{where}.content", message.get("content"), optional=role == "assistant")
    if isinstance(out.get("reasoning"), str):
        out.setdefault("reasoning_content", out["reasoning"])
    if out.get("tool_calls"):
        calls = out["tool_calls"]
        if role != "assistant" or not isinstance(calls, list):
            raise ValueError(f"{where}.tool_calls is {_short(calls)}, it must be a list, of an assistant message")
        out["tool_calls"] = [_read_tool_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    return out


def _read_content(where: str, content: Any, *, optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if not isinstance(content, list):
        raise ValueError(f"{where} is {_short(content)}, it must be a string or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"{where}[{i}].type is {_short(kind)}, it must be 'text'")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{where}[{i}].text is {_short(part.get('text'))}, it must be a string")
        texts.append(part["text"])
    return "".join(texts)


def _read_tool_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where} is {_short(call)}, it must be an object with function.name and function.arguments")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            decoded = json.loads(arguments)
        except ValueError:
            decoded = None
        # What a model once wrote wrong stays in the chat as it was: one bad call must not end the whole session.
        arguments = decoded if isinstance(decoded, dict) else {"arguments": arguments}
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}.function.arguments is {_short(arguments)}, it must be a JSON object in a string")
    return {**call, "function": {**function, "arguments": arguments}}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Not Jinja's own, which escapes for HTML: models were trained on plain JSON. `options` are those of json.dumps."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
