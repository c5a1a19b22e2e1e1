# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of the server is plain Python: it loads without jax, so policy is tested in microseconds."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["request", "blocks", "scheduler", "channel", "replica"])
def test_loads_no_jax(module):
    code = f"import sys, qwen_spmd.serve.{module}; print(*sorted({{'jax', 'jaxlib', 'flax'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
