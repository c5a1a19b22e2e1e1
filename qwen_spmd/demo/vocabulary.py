# SPDX-License-Identifier: Apache-2.0
"""The demo's tokenizer: byte-level BPE trained on the demo's own text, in the form of Qwen3.5's.

The same normaliser, pre-tokenizer behaviour, decoder and order of added tokens; a much smaller vocabulary.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from qwen_spmd.demo.chat import render
from qwen_spmd.demo.tasks import TASKS, draw
from qwen_spmd.demo.words import words

ADDED = words(
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> "
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> "
    "<tool_response> </tool_response> <think> </think>"
)

# Parsers read these in the output, so decoding must not drop them.
KEPT = {token for token in ADDED if "fim" in token or "|" not in token or token in ("<|repo_name|>", "<|file_sep|>")}

SPLIT = "|".join(
    (
        r"(?i:'(?:s|t|re|ve|m|ll|d))",  # contractions
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",  # a word with at most one character before it
        r"\p{N}",  # digits one by one
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",  # punctuation and the line ends after it
        r"\s*[\r\n]+",  # blank lines
        r"\s+(?!\S)",  # white space at the end, or all but the last before a word
        r"\s+",
    )
)

ROWS = 64
"""Embedding rows are padded to a multiple of this, as the published vocabularies are."""


def texts(seed: int, each: int) -> Iterator[str]:
    """`each` conversations of every task, for training a tokenizer. Special tokens split the text by themselves."""
    rng = random.Random(seed)
    for task in TASKS.values():
        for _ in range(each):
            conversation = draw(task, rng, "train")
            yield from _plain(render(conversation.messages, tools=conversation.tools, prompt=False))


def _plain(text: str) -> list[str]:
    for token in ADDED:
        text = text.replace(token, "\x00")
    return [piece for piece in text.split("\x00") if piece]


def train(size: int, *, each: int = 400, seed: int = 0) -> Tokenizer:
    """A tokenizer of `size` entries, 256 bytes included, plus the added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(seed, each), trainer)
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=t not in KEPT) for t in ADDED])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json for a model of `context` tokens."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def rows(tokenizer: Tokenizer) -> int:
    """Rows of the embedding for this tokenizer."""
    return -(-tokenizer.get_vocab_size() // ROWS) * ROWS
