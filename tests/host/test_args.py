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
    auto = dict.fromkeys(("dtype", "moe_route", "moe_wire"), "auto")
    fixed = {"state_dtype": "float32", "memory_utilization": 0.9, "moe_reduce": "xla", "moe_chunks": 1}
    assert parse([]).engine_options() == auto | fixed
    argv = ["--num-gpu-blocks-override", "5", "--max-num-queued-reqs", "4", "--port", "3"]
    assert parse(argv).engine_options().items() >= {"num_pages": 5, "max_queue": 4}.items()
    assert "port" not in parse(argv).engine_options()


@pytest.mark.parametrize(
    ("argv", "sizes"),
    [
        ([], {}),
        (["-tp", "4"], {"tp": 4}),
        (["--tp-size", "4", "-dp", "2"], {"tp": 4, "dp": 2}),
        (["--data-parallel-size", "2", "--ep-size", "8"], {"dp": 2, "ep": 8}),
        (["--ep", "8"], {"ep": 8}),
        (["-dp", "8", "--enable-expert-parallel"], {"ep": 8}),
        (["-dp=4", "-tp=2", "--enable-expert-parallel"], {"ep": 4, "tp": 2}),
        (["-tp", "8", "--enable-expert-parallel"], {"tp": 8}),
        (["--layout", "dp_ep", "-tp", "2"], {"tp": 2}),
    ],
)
def test_sizes_of_the_mesh(argv, sizes):
    args = parse(argv)
    names = ("dp", "ep", "tp")
    assert {name: n for name, n in args.engine_options().items() if name in names} == sizes


@pytest.mark.parametrize(
    ("argv", "master"),
    [
        (["--nnodes", "2", "--master-addr", "a.b", "--node-rank", "1"], ("a.b", 29501)),
        (["--nnodes=2", "--master-addr=10.0.0.1", "--master-port=5"], ("10.0.0.1", 5)),
        (["--nnodes=2", "--dist-init-addr=10.0.0.1:5"], ("10.0.0.1", 5)),
        (["--nnodes=2", "--master-addr=10.0.0.1:5", "--master-port=5"], ("10.0.0.1", 5)),
        (["--nnodes=2", "--master-addr=fd00::1"], ("fd00::1", 29501)),
        (["--nnodes=2", "--master-addr=[fd00::1]:7"], ("fd00::1", 7)),
        (["--nnodes=2", "--master-addr=[fd00::1]", "--master-port=8"], ("fd00::1", 8)),
    ],
)
def test_where_node_0_is(argv, master):
    assert parse(argv).master == master


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
        (["-tp", "0"], ["--tensor-parallel-size is 0", "at least 1"]),
        (["--layout", "ep"], ["--layout", "'ep'", "dp_ep"]),
        (["--layout", "single", "-tp", "2"], ["--layout single and --tensor-parallel-size"]),
        (["--layout", "tp_ep", "-tp", "2"], ["--layout tp_ep and --tensor-parallel-size"]),
        (["--layout", "dp_ep", "-dp", "2"], ["--layout dp_ep and --data-parallel-size"]),
        (["--layout", "dp_ep", "--ep", "2"], ["--layout dp_ep and --expert-parallel-size"]),
        (["--layout", "dp_ep", "--enable-expert-parallel"], ["--layout dp_ep and --enable-expert-parallel"]),
        (["--ep", "2", "--enable-expert-parallel"], ["--enable-expert-parallel and --expert-parallel-size"]),
        (["--moe-route", "ring"], ["--moe-route", "'ring'", "all_to_all"]),
        (["--nnodes", "2"], ["--nnodes is 2, --master-addr is missing"]),
        (["--node-rank", "1"], ["--node-rank is 1, it must be below --nnodes, which is 1"]),
        (["--nnodes=2", "--master-addr=h", "--layout=single"], ["--layout single is one device, --nnodes is 2"]),
        (["--master-addr", "h:x"], ["--master-addr is 'h:x', it must be HOST or HOST:PORT"]),
        (["--master-addr", "[::1]29501"], ["--master-addr is '[::1]29501', it must be HOST or HOST:PORT"]),
        (["--master-addr", "[::1"], ["--master-addr is '[::1', it must be HOST or HOST:PORT"]),
        (["--master-addr", "h:70000"], ["--master-addr is 'h:70000'"]),
        (["--master-addr", ":5"], ["--master-addr is ':5'"]),
        (["--master-addr", "h:5", "--master-port", "6"], ["given twice", "h:5", "6"]),
        (["--enable-prefix-caching"], ["unknown flag --enable-prefix-caching; --help"]),  # nothing is near enough
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
