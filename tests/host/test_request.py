# SPDX-License-Identifier: Apache-2.0
"""SamplingParams are checked when they are made."""

import pytest

from qwen_spmd.serve.request import SamplingParams


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
