# SPDX-License-Identifier: Apache-2.0
"""transformers as `bench.py` measures it, in an interpreter that has it and need not have jax.

Arguments: model folder, dtype, attention implementation, threads. Each line of stdin is JSON, [prompts, new tokens],
and is answered by the seconds that one generate() took.
"""

import json
import sys
import time


def main(folder: str, dtype: str, attention: str, threads: str) -> None:
    import torch  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM  # type: ignore[import-not-found]

    torch.set_num_threads(int(threads))
    kind = dtype if dtype == "auto" else getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, attn_implementation=attention).eval()
    for line in sys.stdin:
        prompts, new = json.loads(line)
        ids, start = torch.tensor(prompts), time.perf_counter()
        options = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new}
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
