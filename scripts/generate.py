# SPDX-License-Identifier: Apache-2.0
"""Generate text offline: python scripts/generate.py "What is 12 + 30?" [--model FOLDER_OR_ID] [--raw] ..."""

import argparse

from qwen_spmd import LLM, SamplingParams


def main() -> None:
    p = argparse.ArgumentParser(description="Generate text with a local model, without a server.")
    p.add_argument("prompts", nargs="+", help="questions, answered through the chat template")
    p.add_argument("--model", help="folder or Hugging Face id; without it, the demo model")
    p.add_argument("--raw", action="store_true", help="continue the prompts as they are, without a chat template")
    p.add_argument("--thinking", action=argparse.BooleanOptionalAction, help="enable_thinking of the chat template")
    p.add_argument("--max-tokens", type=int, default=256)
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--seed", type=int)
    p.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    args = p.parse_args()

    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed)
    # Fewer at once are fewer programs to compile.
    with LLM(args.model, dtype=args.dtype, max_num_seqs=min(16, len(args.prompts))) as llm:
        if args.raw:
            answers = llm.generate(args.prompts, params)
        else:
            options = {} if args.thinking is None else {"enable_thinking": args.thinking}
            chats = [[{"role": "user", "content": text}] for text in args.prompts]
            answers = llm.chat(chats, params, chat_template_kwargs=options)
    for prompt, answer in zip(args.prompts, answers, strict=True):
        print(f"> {prompt}\n{answer.text}\n")


if __name__ == "__main__":
    main()
