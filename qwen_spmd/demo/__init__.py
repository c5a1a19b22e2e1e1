# SPDX-License-Identifier: Apache-2.0
"""The demo model: a miniature Qwen3.5-MoE that ships with the package, and everything it was made from.

Lives here: the tasks it knows (`tasks`), their text as tokens (`chat`, `vocabulary`), training (`data`, `train`,
`export`) and the accuracy measurement for any engine (`evaluate`). Not here: the architecture, serving.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
"""A Hugging Face checkpoint folder: config, weights, tokenizer, chat template, model card."""
