# SPDX-License-Identifier: Apache-2.0
"""Tokenizer: a model folder's vocabulary, stop ids and sampling defaults. TextStream: ids to text as they come.

Not here: what a chat looks like (`chat_template.py`).
"""

from __future__ import annotations

import codecs
import functools
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from qwen_spmd.serve.chat_template import ChatTemplate
from qwen_spmd.serve.request import SamplingParams

log = logging.getLogger(__name__)

CHAT_ENDS = ("<|im_end|>", "<|endoftext|>")
"""Both end a turn of Qwen's chats, and checkpoints often name one of them only."""

SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p")


class Tokenizer:
    """
    stop_ids   ids that end an answer of this model
    sampling   what the model's authors recommend, as arguments of SamplingParams
    special    ids of control tokens: the template writes them, a caller cannot, and `decode` can leave them out
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
        stop_ids: Iterable[int] = (),
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        decoder = json.loads(backend.to_str())["decoder"]
        if not decoder or decoder["type"] != "ByteLevel":
            found = decoder["type"] if decoder else None
            raise ValueError(
                f"tokenizer.json has the decoder {found}, it must be ByteLevel, as all Qwen models have it"
            )
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        self.special = {id: token.content for id, token in backend.get_added_tokens_decoder().items() if token.special}
        self._template = None
        if chat_template is not None:
            self._template = ChatTemplate(chat_template, named_tokens or {}, self.special.values())
        ends = {id for id, content in self.special.items() if content in CHAT_ENDS}
        self.stop_ids = tuple(sorted({*stop_ids, *ends}))
        self.sampling = dict(sampling or {})
        SamplingParams(**self.sampling)  # a bad recommendation is found now and not with the first request

    @classmethod
    def load(
        cls, folder: str | Path, *, chat_template: str | None = None, generation_config: str = "auto"
    ) -> Tokenizer:
        """From a model folder. `chat_template` and `generation_config` as the flags of the server say."""
        folder = Path(folder)
        try:
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(f"{folder / 'tokenizer.json'} cannot be read as a tokenizer: {error}") from None
        config, model = _read_json(folder / "tokenizer_config.json"), _read_json(folder / "config.json")
        generation = _read_json(folder / "generation_config.json")

        named = {name: _content(config[name]) for name in config if name.endswith("_token") and config[name]}
        named = {name: content for name, content in named.items() if isinstance(content, str)}
        sources = (generation, model, model.get("text_config", {}))
        declared = next((d["eos_token_id"] for d in sources if d.get("eos_token_id") is not None), [])
        stop_ids = [*declared] if isinstance(declared, list) else [declared]
        if (eos := backend.token_to_id(named.get("eos_token", ""))) is not None:
            stop_ids.append(eos)

        if generation_config == "vllm":
            generation = {}
        elif generation_config != "auto":
            path = Path(generation_config) / "generation_config.json"
            if not path.is_file():
                raise ValueError(f"--generation-config is {generation_config!r}, but there is no {path}")
            generation = _read_json(path)
        return cls(
            backend,
            chat_template=_template_source(folder, config) if chat_template is None else _given(chat_template),
            named_tokens=named,
            stop_ids=stop_ids,
            sampling=_sampling(generation),
        )

    # Text to ids.

    def encode(self, text: str) -> list[int]:
        """Text with control tokens in it, such as a template that the caller wrote out. Nothing is added."""
        return self._encode(self._backend, text)

    def encode_literal(self, text: str) -> list[int]:
        """As `encode`, but what looks like a control token is just its letters."""
        return self._encode(self._literal_backend, text)

    def render_chat(
        self, messages: Sequence[Any], tools: Sequence[Any] | None = None, **options: Any
    ) -> tuple[str, list[int]]:
        """A chat's prompt as text and as ids; `options` as in `ChatTemplate.render`.

        Control tokens come from the template alone: typed into a message they are text. A chat that has none of them
        typed in encodes to exactly what `encode(text)` gives.
        """
        if self._template is None:
            raise ValueError("this model has no chat template: use /v1/completions, or start with --chat-template")
        parts = self._template.render(messages, tools, **options)
        ids = [id for text, literal in parts for id in (self.encode_literal if literal else self.encode)(text)]
        return "".join(text for text, _ in parts), ids

    @functools.cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        # A copy, made when the first caller needs it, because the switch belongs to the tokenizer and not to a call.
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    @staticmethod
    def _encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
        try:
            return backend.encode(text, add_special_tokens=False).ids
        except TypeError:
            raise ValueError(f"{text[:50]!r} is no Unicode text: it has half of a surrogate pair") from None

    # Ids to text.

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        piece = self.text_bytes if skip_special_tokens else self.token_bytes
        return b"".join(map(piece, ids)).decode("utf-8", "replace")

    def text_bytes(self, id: int) -> bytes:
        """As `token_bytes`, but nothing for a control token."""
        return b"" if id in self.special else self.token_bytes(id)

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for, maybe a part of a character. Nothing for an id that is padding."""
        known = self._bytes.get(id)
        if known is None:
            token = self._backend.id_to_token(id) or ""
            try:
                known = bytes(_BYTE_OF[char] for char in token)
            except KeyError:  # an added token is written as it is, and not in the byte alphabet
                known = token.encode()
            self._bytes[id] = known
        return known


class TextStream:
    """Joined, what `push` and `finish` return is `Tokenizer.decode` of all ids, however they are split over calls.

    A character leaves once it is whole. With stop strings, text leaves once it cannot be part of one any more, and
    `stopped` tells that one was found. Of several, the one that is complete first counts, and of those that end
    together the longest: this, unlike the leftmost beginning, needs no look at tokens that are yet to come.
    The first `min_tokens` tokens are in no stop string.

    num_tokens   ids taken in; none after the one that completed a stop string
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, skip_special_tokens: bool = True) -> None:
        self.num_tokens = 0
        self.stopped = False
        self._token_bytes = tokenizer.text_bytes if skip_special_tokens else tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._held = ""  # decoded, and may be the beginning of a stop string

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids set free."""
        if not self._stops:
            self.num_tokens += len(ids)
            return self._utf8.decode(b"".join(map(self._token_bytes, ids)))
        out = []
        for id in ids:
            if self.stopped:
                break
            self.num_tokens += 1
            piece = self._utf8.decode(self._token_bytes(id))
            out.append(piece if self.num_tokens <= self._min_tokens else self._search(piece))
        return "".join(out)

    def finish(self) -> str:
        """The text still held back, when no more ids come. A character that was never completed is U+FFFD."""
        if self.stopped:
            return ""
        rest = self._utf8.decode(b"", final=True)
        if self._stops:
            rest = self._search(rest)
        rest, self._held = rest + self._held, ""
        return rest

    def _search(self, piece: str) -> str:
        held = self._held + piece
        found = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self.stopped, self._held = True, ""
            return held[: end if self._include_stop else start]
        keep = len(held) - max(_open_tail(held, stop) for stop in self._stops)
        self._held = held[keep:]
        return held[:keep]


def _open_tail(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0


def _byte_alphabet() -> dict[str, int]:
    """Of byte-level BPE: a printable character of Latin-1 is its own byte, the other bytes are U+0100 and on."""
    printable = re.compile(r"[!-~¡-¬®-ÿ]")
    others = [byte for byte in range(256) if not printable.match(chr(byte))]
    return {chr(byte): byte for byte in range(256) if byte not in others} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()


def _sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    out = {name: generation[name] for name in SAMPLING_DEFAULTS if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        out["temperature"] = 0.0
    if generation.get("repetition_penalty", 1.0) not in (None, 1.0):
        log.warning(
            "generation_config.json asks for repetition_penalty %s, which is not applied: it is not supported yet",
            generation["repetition_penalty"],
        )
    return out


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, with names
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template


def _given(template: str) -> str:
    if "{{" in template or "{%" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--chat-template is {template!r}, which is no template and no readable file: {error}"
        ) from None


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value
