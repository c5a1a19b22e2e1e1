# SPDX-License-Identifier: Apache-2.0
"""Accuracy of a model on the demo's held-out tasks: `python scripts/evaluate.py --items 50`.

Greedy decoding through the serving engine; `--option NAME=VALUE ..` sets the engine's options, to see what a format or
a layout costs.
"""

from __future__ import annotations

import argparse
import json
import time

from qwen_spmd import LLM, SamplingParams
from qwen_spmd.demo.chat import render_prompt
from qwen_spmd.demo.conversation import Conversation
from qwen_spmd.demo.evaluate import MAX_TOKENS, evaluate, graded


def value(text: str) -> object:
    """JSON where it is some, text otherwise."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a Hugging Face id; the demo that ships with the package if absent")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help=f"some of {', '.join(graded())}")
    parser.add_argument("--items", type=int, default=50, help="held-out items of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--option", nargs="*", default=[], metavar="NAME=VALUE", help="engine options")
    args = parser.parse_args()

    options = {name: value(text) for name, _, text in (option.partition("=") for option in args.option)}
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    with LLM(args.model, **options) as llm:

        def generate(conversations: list[Conversation]) -> list[str]:
            prompts = [render_prompt(c) for c in conversations]
            return [completion.text for completion in llm.generate(prompts, params, progress=True)]

        start = time.monotonic()
        accuracy = evaluate(generate, args.tasks, args.items, args.seed)
        seconds = time.monotonic() - start
    for name, share in accuracy.items():
        print(f"{name:24} {share:6.1%}")
    print(f"{'mean':24} {sum(accuracy.values()) / len(accuracy):6.1%}   {seconds:.1f} s")


if __name__ == "__main__":
    main()
