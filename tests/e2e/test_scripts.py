# SPDX-License-Identifier: Apache-2.0
"""The scripts as commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(name, *args, home=None):
    """What it prints. With `home`, compiled programs are kept there and not with the user's."""
    env = os.environ | ({"HOME": str(home)} if home else {})
    done = subprocess.run([sys.executable, SCRIPTS / name, *args], env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


PARTS = ("bench_engine.py", "gpu_peers.py", "transformers_peer.py")  # of others
COMMANDS = sorted(path.name for path in SCRIPTS.glob("*.py") if path.name not in PARTS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name):
    assert f"usage: {name}" in run(name, "--help")


def test_generate(tmp_path):
    question = "What is 12 + 30?"
    first, second, end = run("generate.py", question, "Hello", "--max-tokens", "4", home=tmp_path).split("\n\n")
    assert first.startswith(f"> {question}\n")
    assert second.startswith("> Hello\n")
    assert end == ""
