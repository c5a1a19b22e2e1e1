# SPDX-License-Identifier: Apache-2.0
"""Where a model's files are: the demo in the package, a folder, or Hugging Face. Not here: reading them."""

from __future__ import annotations

from pathlib import Path

from qwen_spmd.demo import MODEL_DIR

WEIGHTS = ("*.safetensors",)
TEXTS = ("*.json", "*.jinja")


def model_folder(
    name: str | None, *, revision: str | None = None, download_dir: str | None = None, weights: bool = True
) -> Path:
    """The folder of a model, downloaded first where `name` is a Hugging Face id. ValueError says why there is none.

    weights   False: the small files only, which is enough for a tokenizer
    """
    if name is None:
        return MODEL_DIR
    try:
        folder = Path(name).expanduser()
    except RuntimeError:
        raise ValueError(f"model is {name!r}: there is no such user") from None
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"model is {name!r}, which is a file: it must be a folder or a Hugging Face id")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ValueError(f"model is {name!r}: there is no such folder, and a Hugging Face id looks like owner/name")

    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = [*(WEIGHTS if weights else ()), *TEXTS]
        path = huggingface_hub.snapshot_download(
            name, revision=revision, cache_dir=download_dir, allow_patterns=patterns
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"model is {name!r}: no such folder, and Hugging Face does not give it: {reason}") from None
    return Path(path)
