# SPDX-License-Identifier: Apache-2.0
"""SamplingParams are checked when they are made; what a Request knows of its own tokens."""

import pytest

from qwen_spmd.serve.request import Request, SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "1"),
        ("temperature", None),
        ("temperature", float("nan")),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", True),
        ("min_p", 1.5),
        ("top_k", 1.5),
        ("top_k", -2),
        ("seed", "a"),
        ("seed", 2**64),
        ("max_tokens", 2.5),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("stop", [""]),
        ("stop", [1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", range(17)),
    ],
)
def test_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name} is "):
        SamplingParams(**{name: value})


def test_one_stop_string_and_lists():
    params = SamplingParams(stop="42", stop_token_ids=[5, 6])
    assert (params.stop, params.stop_token_ids) == (("42",), (5, 6))


def test_known_tokens_are_those_of_prompt_and_output():
    r = Request(id="a", prompt=[1, 2, 3], params=SamplingParams(), max_len=9, output=[4, 5])
    for start in range(6):
        for end in range(start, 6):
            assert r.known(start, end) == [1, 2, 3, 4, 5][start:end]


@pytest.mark.parametrize(
    ("ids", "kept", "reason"),
    [([7, 8], [7, 8], None), ([7, 3, 8], [7, 3], "stop"), ([3, 7, 3], [3, 7, 3], "stop"), ([7, -1], [7], "error")],
)
def test_where_new_tokens_end_it(ids, kept, reason):
    params = SamplingParams(min_tokens=2)  # one more cannot end it
    r = Request(id="a", prompt=[1], params=params, max_len=9, output=[4], stop_ids=(2, 3))
    assert r.cut(ids) == (kept, reason)
