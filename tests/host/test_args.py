# SPDX-License-Identifier: Apache-2.0
"""The command line: each flag once, clear refusals, and what the engine gets of it."""

import dataclasses
from pathlib import Path

import pytest

from qwen_spmd.serve.args import ServeArgs, option, parse


def refusal(capsys, *argv):
    with pytest.raises(SystemExit) as error:
        parse(argv)
    assert error.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1, "one sentence, on one line"
    return message


def test_nothing_is_needed():
    args = parse([])
    assert args == ServeArgs()
    assert args.model_names == ("qwen-spmd-demo",)
    assert (args.host, args.port, args.shutdown_timeout) == ("127.0.0.1", 8000, 30)


@pytest.mark.parametrize(
    "argv", [["org/name"], ["--model", "org/name"], ["--model-path=org/name"], ["org/name", "--model", "org/name"]]
)
def test_model_is_positional_or_a_flag(argv):
    assert parse(argv).model == "org/name"
    assert parse(argv).model_names == ("org/name",)


def test_values_have_the_type_of_their_field():
    argv = ["--port", "1", "--gpu-memory-utilization", "0.5", "--api-key", "a", "b", "--api-key", "c"]
    argv += [
        "--hf-overrides",
        '{"a": {"b": 1}}',
        "--compilation-cache-dir",
        "x",
        "--disable-log-requests",
        "--dtype",
        "float32",
    ]
    args = parse(argv)
    assert (args.port, args.gpu_memory_utilization, args.api_key) == (1, 0.5, ("a", "b", "c"))
    assert (args.hf_overrides, args.compilation_cache_dir) == ({"a": {"b": 1}}, Path("x"))
    assert (args.disable_log_requests, args.dtype) == (True, "float32")


def test_sglangs_names_are_aliases():
    argv = ["--context-length", "9", "--page-size", "8", "--max-running-requests", "7", "--random-seed", "6"]
    args = parse(argv)
    assert (args.max_model_len, args.block_size, args.max_num_seqs, args.seed) == (9, 8, 7, 6)


def test_the_engine_gets_what_is_set_under_its_own_names():
    assert parse([]).engine_options() == {"dtype": "auto", "state_dtype": "float32", "memory_utilization": 0.9}
    argv = ["--num-gpu-blocks-override", "5", "--max-num-queued-reqs", "4", "--port", "3"]
    assert parse(argv).engine_options().items() >= {"num_pages": 5, "max_queue": 4}.items()
    assert "port" not in parse(argv).engine_options()


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--max-modl-len", "5"], ["unknown flag --max-modl-len, did you mean --max-model-len?"]),
        (["--max_model_len=5"], ["unknown flag --max_model_len, did you mean --max-model-len?"]),
        (["--max-model", "5"], ["unknown flag --max-model"]),  # no abbreviations: they change with new flags
        (["--zzz"], ["unknown flag --zzz", "--help"]),
        (["a", "b"], ["unexpected 'b'"]),
        (["a", "--model", "b"], ["given twice", "'a'", "'b'"]),
        (["--port", "70000"], ["--port is 70000", "from 0 to 65535"]),
        (["--port", "x"], ["--port", "'x'", "int"]),
        (["--gpu-memory-utilization", "1.5"], ["--gpu-memory-utilization is 1.5", "from 0.01 to 1"]),
        (["--gpu-memory-utilization", "nan"], ["--gpu-memory-utilization is nan"]),
        (["--max-num-seqs", "0"], ["--max-num-seqs is 0", "at least 1"]),
        (["--dtype", "int4"], ["--dtype", "int4", "bfloat16"]),
        (["--hf-overrides", "{"], ["--hf-overrides", "'{' is not JSON"]),
        (["--hf-overrides", "[]"], ["--hf-overrides", "'[]' is not a JSON object"]),
        (["--ssl-keyfile", "k"], ["--ssl-certfile is missing"]),
        (["--ssl-certfile", "c"], ["--ssl-keyfile is missing"]),
        (["--api-key", ""], ["--api-key"]),
    ],
)  # fmt: skip
def test_wrong_values_are_refused(capsys, argv, parts):
    message = refusal(capsys, *argv)
    assert all(part in message for part in parts), message


def test_help_names_every_flag_and_default(capsys):
    with pytest.raises(SystemExit) as error:
        parse(["--help"])
    assert error.value.code == 0
    text = capsys.readouterr().out
    assert all(option(field.name) in text for field in dataclasses.fields(ServeArgs))
    assert "8000" in text
