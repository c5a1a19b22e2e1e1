# SPDX-License-Identifier: Apache-2.0
"""Configs of kernels: the rule, the table over it, and what tuning forces over both; which devices have kernels."""

from types import SimpleNamespace

import pytest

from qwen_spmd.pallas import impl_for
from qwen_spmd.pallas.triton import configs, target
from qwen_spmd.pallas.triton.configs import choose

RULE = {"warps": 4, "stages": 3}


def test_the_table_goes_over_the_rule(monkeypatch):
    tables = {"op": {"kernel": {"90": {"small": {"warps": 8}}}}}
    monkeypatch.setattr(configs, "table", lambda op: tables.get(op, {}))
    with target(90):
        assert choose("op", "kernel", "small", RULE) == {"warps": 8, "stages": 3}
        assert choose("op", "kernel", "large", RULE) == RULE
        assert choose("op", "other", "small", RULE) == RULE
        assert choose("no such op", "kernel", "small", RULE) == RULE
    with target(100):
        assert choose("op", "kernel", "small", RULE) == RULE


def test_forced_configs_go_over_the_table_and_are_asked_for(monkeypatch):
    monkeypatch.setattr(configs, "table", lambda op: {"kernel": {"90": {"small": {"warps": 8}}}})
    with target(90), configs.asked() as choices:
        with configs.force("op", "kernel", {"stages": 5}):
            assert choose("op", "kernel", "small", RULE) == {"warps": 4, "stages": 5}
            assert choose("op", "other", "small", RULE) == RULE
        assert choose("op", "kernel", "small", RULE) == {"warps": 8, "stages": 3}
    assert [(kernel, config["stages"]) for _, kernel, _, config in choices] == [
        ("kernel", 5),
        ("other", 3),
        ("kernel", 3),
    ]


def test_tables_in_the_repository_are_read():
    for op in ("grouped_mlp", "paged_attention", "gated_delta"):
        for capability in configs.table(op).values():
            for classes in capability.values():
                for config in classes.values():
                    assert config and all(isinstance(v, int) for v in config.values())


def test_devices_without_kernels():
    assert impl_for(SimpleNamespace(platform="cpu")) == impl_for(SimpleNamespace(platform="tpu")) == "reference"
    for capability in ("8.0", "12.0", "gfx942"):
        with pytest.raises(ValueError, match=f"RTX has compute capability {capability}"):
            impl_for(SimpleNamespace(platform="gpu", device_kind="RTX", compute_capability=capability))
