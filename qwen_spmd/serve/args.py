# SPDX-License-Identifier: Apache-2.0
"""The command line of the server: one dataclass field declares one flag. Imports nothing that is slow to import.

vLLM's names come first, SGLang's are aliases where it has others. Not here: what the values mean to the engine, which
checks them once more against the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import sys
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn


def flag(
    default: Any,
    help: str,
    *aliases: str,
    engine: str | None = None,
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """A field of ServeArgs. `engine`: its name in EngineConfig, if it goes there. `low` to `high` is allowed."""
    metadata = {"help": help, "aliases": aliases, "engine": engine, "low": low, "high": high}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeArgs:
    """None means: the model or the engine decides."""

    model: str | None = flag(
        None, "folder or Hugging Face id; without it, the small model that ships with the package", "--model-path"
    )
    served_model_name: tuple[str, ...] = flag((), "names that requests may use for the model (default: --model)")
    tokenizer: str | None = flag(None, "folder or Hugging Face id, if not the model's", "--tokenizer-path")
    revision: str | None = flag(None, "branch, tag or commit of a Hugging Face id")
    download_dir: str | None = flag(None, "where files from Hugging Face are kept (default: its own cache)")
    generation_config: str = flag(
        "auto", "sampling defaults: auto (the model's generation_config.json), vllm (neutral ones) or a folder"
    )
    chat_template: str | None = flag(None, "a file with a Jinja template, or the template, if not the model's")
    default_chat_template_kwargs: dict[str, Any] | None = flag(  # noqa: RUF009 - it is a dataclasses.field
        None, """JSON with variables for every chat template, as '{"enable_thinking": false}'"""
    )

    dtype: Literal["auto", "bfloat16", "float32"] = flag("auto", "of weights and activations", engine="dtype")
    state_dtype: Literal["float32", "bfloat16"] = flag(
        "float32", "of the recurrent states, as they are stored between steps", engine="state_dtype"
    )
    max_model_len: int | None = flag(None, "longest prompt + output", "--context-length", engine="max_model_len", low=2)
    block_size: int | None = flag(None, "tokens of a KV page", "--page-size", engine="block_size", low=1)
    num_gpu_blocks_override: int | None = flag(
        None, "KV pages, if not as many as the memory has room for", engine="num_pages", low=1
    )
    gpu_memory_utilization: float = flag(
        0.9,
        "share of the device's memory to use",
        "--mem-fraction-static",
        engine="memory_utilization",
        low=0.01,
        high=1,
    )
    max_num_seqs: int | None = flag(
        None, "requests that run at once", "--max-running-requests", engine="max_num_seqs", low=1
    )
    max_num_batched_tokens: int | None = flag(
        None, "tokens of one step", "--chunked-prefill-size", engine="max_num_batched_tokens", low=1
    )
    max_num_queued_reqs: int | None = flag(
        None, "requests that may wait; one more gets 429", "--max-queued-requests", engine="max_queue", low=1
    )
    decode_window: int | None = flag(
        None, "most tokens that a request decodes between two visits of the host", engine="decode_window", low=1
    )
    hf_overrides: dict[str, Any] | None = flag(  # noqa: RUF009
        None, "JSON merged into the model's config.json", "--json-model-override-args", engine="hf_overrides"
    )
    compilation_cache_dir: Path | None = flag(  # noqa: RUF009
        None, "where compiled programs are kept between starts", engine="compilation_cache"
    )
    tensor_parallel_size: int | None = flag(
        None, "devices that share each rank's heads, widths and experts", "-tp", "--tp-size", "--tp", engine="tp", low=1
    )
    data_parallel_size: int | None = flag(
        None, "ranks with requests and all experts of their own", "-dp", "--dp-size", engine="dp", low=1
    )
    expert_parallel_size: int | None = flag(
        None, "ranks with requests of their own that share the experts", "--ep-size", "--ep", engine="ep", low=1
    )
    enable_expert_parallel: bool = flag(False, "the ranks of --data-parallel-size share the experts", "--enable-ep-moe")
    layout: Literal["single", "dp_ep", "tp_ep"] | None = flag(
        None,
        "one device, or all of them: as ranks that share the experts, each --tensor-parallel-size wide (dp_ep), or as "
        "one rank (tp_ep)",
    )
    moe_route: Literal["auto", "gather_scatter", "all_to_all"] = flag(
        "auto", "how rows reach their experts", engine="moe_route"
    )
    moe_wire_dtype: Literal["auto", "fp8"] = flag("auto", "of the rows on that way", engine="moe_wire")
    moe_reduce: Literal["xla", "hierarchical"] = flag(
        "xla", "how their sums come back: the compiler's way, or one link after the other", engine="moe_reduce"
    )
    moe_chunks: int = flag(
        1, "parts of the sums, each computed while the one before travels", engine="moe_chunks", low=1
    )

    nnodes: int = flag(1, "processes that serve together, each started with the same flags", low=1, high=4096)
    node_rank: int = flag(0, "which of them this is; 0 listens for requests", low=0)
    master_addr: str | None = flag(
        None, "HOST or HOST:PORT of node 0, where it waits for the others; a trusted network", "--dist-init-addr"
    )
    master_port: int | None = flag(None, "its port (default: 29501)", low=1, high=65535)
    dist_timeout: float = flag(300.0, "seconds that all nodes have to come", low=1, high=86400)
    node_timeout: float = flag(5.0, "seconds without a sign of a node after which all end", low=1, high=3600)

    seed: int | None = flag(
        None, "makes requests that bring no seed repeatable", "--random-seed", low=0, high=2**32 - 1
    )

    host: str = flag("127.0.0.1", "address to listen on; 0.0.0.0 is all of them")
    port: int = flag(8000, "0 takes a free one", low=0, high=65535)
    uds: str | None = flag(None, "listen on this Unix domain socket instead of --host and --port")
    ssl_keyfile: str | None = flag(None, "the TLS key, with --ssl-certfile")
    ssl_certfile: str | None = flag(None, "the TLS certificate, with --ssl-keyfile")
    root_path: str = flag("", "path under which a proxy shows the server", "--fastapi-root-path")
    api_key: tuple[str, ...] = flag(
        (), "keys, one of which each request must carry (/health, /ready and /metrics need none)"
    )
    allowed_origins: tuple[str, ...] = flag((), "web origins whose pages may call the server; * is all (default: none)")
    allowed_methods: tuple[str, ...] = flag(("*",), "methods that those pages may use")
    allowed_headers: tuple[str, ...] = flag(("*",), "headers that those pages may send")
    shutdown_timeout: float = flag(30.0, "seconds that running requests get to finish after SIGTERM", low=0, high=86400)
    watchdog_timeout: float = flag(300.0, "seconds without progress after which /health answers 503", low=1, high=86400)
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "least severe message that is printed")
    disable_log_requests: bool = flag(False, "no line per finished request")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, low, high = getattr(self, field.name), field.metadata["low"], field.metadata["high"]
            if value is None or (low is None and high is None):
                continue
            least, most = -math.inf if low is None else low, math.inf if high is None else high
            if not least <= value <= most:
                allowed = f"at least {low}" if high is None else f"from {low} to {high}"
                raise ValueError(f"{option(field.name)} is {value}, it must be {allowed}")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            given, missing = ("key", "cert") if self.ssl_certfile is None else ("cert", "key")
            raise ValueError(f"--ssl-{given}file is given, --ssl-{missing}file is missing: TLS needs both")
        if not all(self.api_key):
            raise ValueError("--api-key has an empty key, it must be non-empty strings")
        self._check_sizes()
        if self.node_rank >= self.nnodes:
            raise ValueError(f"--node-rank is {self.node_rank}, it must be below --nnodes, which is {self.nnodes}")
        if self.master_addr is not None:
            self._check_master(self.master_addr)
        elif self.nnodes > 1:
            raise ValueError(f"--nnodes is {self.nnodes}, --master-addr is missing: where node 0 waits for the others")

    def _check_sizes(self) -> None:
        """The layout is said in one way only."""
        given = [
            option(name)
            for name in ("enable_expert_parallel", "data_parallel_size", "expert_parallel_size", "tensor_parallel_size")
            if getattr(self, name)
        ]
        if self.enable_expert_parallel and self.expert_parallel_size is not None:
            raise ValueError(f"{given[0]} and --expert-parallel-size are given: either one says who shares the experts")
        if self.layout is not None:
            if self.layout == "single" and self.nnodes > 1:
                raise ValueError(
                    f"--layout single is one device, --nnodes is {self.nnodes}: each node must have a part"
                )
            wrong = [name for name in given if self.layout != "dp_ep" or name != "--tensor-parallel-size"]
            if wrong:
                raise ValueError(f"--layout {self.layout} and {wrong[0]} are given: the layout says the sizes")

    def _check_master(self, address: str) -> None:
        host, port = _split(address)
        if not host or not (port is None or (port.isdecimal() and 0 < int(port) <= 65535)):
            raise ValueError(f"--master-addr is {address!r}, it must be HOST or HOST:PORT, as 10.0.0.1:29501")
        if port is not None and self.master_port not in (None, int(port)):
            raise ValueError(f"the port of node 0 is given twice, in --master-addr {address} and as {self.master_port}")

    @property
    def model_names(self) -> tuple[str, ...]:
        """What a request's `model` may be; answers carry the first."""
        return self.served_model_name or (self.model or "qwen-spmd-demo",)

    @property
    def master(self) -> tuple[str, int]:
        """Host and port of node 0."""
        host, port = _split(self.master_addr or "127.0.0.1")
        return host, int(port or self.master_port or 29501)

    def engine_options(self) -> dict[str, Any]:
        """Arguments of EngineConfig: what is set. The rest it decides itself, and `layout` gives the mesh's sizes."""
        values = {f.metadata["engine"]: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.enable_expert_parallel:  # experts are spread over ep and tp, so this is all it takes
            values |= {"ep": self.data_parallel_size, "dp": None}
        return {name: value for name, value in values.items() if name is not None and value is not None}


def _split(address: str) -> tuple[str, str | None]:
    """HOST, HOST:PORT or [HOST]:PORT -> host and port."""
    if address.startswith("["):
        host, bracket, rest = address[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError(f"--master-addr is {address!r}, it must be HOST or HOST:PORT, as [fd00::1]:29501")
        return host, rest[1:] if rest else None
    host, colon, port = address.partition(":")
    return (address, None) if ":" in port else (host, port if colon else None)


def option(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse(argv: Sequence[str] | None = None) -> ServeArgs:
    """The command line, or exit code 2 and one sentence that names the flag, the value and what is allowed."""
    parser = _Parser(
        prog="python -m qwen_spmd.serve",
        usage="%(prog)s [MODEL] [flags]",
        description="An OpenAI-compatible server for Qwen3 and Qwen3.5.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("positional", nargs="?", metavar="MODEL", help="the same as --model")
    hints = typing.get_type_hints(ServeArgs)
    for field in dataclasses.fields(ServeArgs):
        parser.add_argument(option(field.name), *field.metadata["aliases"], **_argument(field, hints[field.name]))

    known, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.refuse(unknown[0])
    values = vars(known)
    positional = values.pop("positional", None)
    if positional is not None:
        if values.get("model", positional) != positional:
            parser.error(f"the model is given twice, as {positional!r} and as --model {values['model']!r}")
        values["model"] = positional
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
    try:
        return ServeArgs(**values)
    except ValueError as error:
        parser.error(str(error))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """As argparse's, without the usage: it is longer than a screen and hides the message."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)

    def refuse(self, word: str) -> NoReturn:
        if not word.startswith("-"):
            self.error(f"unexpected {word!r}: there is one model, and every other value follows a flag")
        name = word.split("=")[0]
        near = difflib.get_close_matches(name.replace("_", "-"), self._option_string_actions, n=1, cutoff=0.7)
        self.error(f"unknown flag {name}" + (f", did you mean {near[0]}?" if near else "; --help lists them all"))


def _argument(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """The rest of the arguments of `add_argument` for a field."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    kinds = typing.get_args(hint) if union else (hint,)
    kind = next(kind for kind in kinds if kind is not types.NoneType)
    origin = typing.get_origin(kind)
    default = " ".join(field.default) if isinstance(field.default, tuple) else field.default
    shown = f" (default: {default})" if default not in (None, "", False) else ""
    out: dict[str, Any] = {"dest": field.name, "help": (field.metadata["help"] + shown).replace("%", "%%")}
    if kind is bool:
        return out | {"action": "store_true"}
    if origin is Literal:
        return out | {"choices": typing.get_args(kind)}
    if origin is tuple:
        return out | {"nargs": "+", "action": "extend", "metavar": "NAME"}
    if origin is dict:
        return out | {"type": _json_object, "metavar": "JSON"}
    return out | {"type": kind, "metavar": {int: "N", float: "X", str: "TEXT", Path: "PATH"}[kind]}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
