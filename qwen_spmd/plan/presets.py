# SPDX-License-Identifier: Apache-2.0
"""Published sizes: one small `config.json` for each model of both families, in models/, so that none is downloaded.

They hold what the text model computes, in Hugging Face's names. A folder or a hub id gives the same from the
checkpoint's own file.
"""

from __future__ import annotations

import json
from pathlib import Path

from qwen_spmd.config import ModelConfig, from_hf, load_config

MODELS_DIR = Path(__file__).parent / "models"


def names() -> list[str]:
    return sorted(path.stem for path in MODELS_DIR.glob("*.json"))


def model_config(model: str) -> ModelConfig:
    """The config of a preset's name, a folder, or a Hugging Face id (config.json only). ValueError if there is none."""
    if model.lower() in names():
        return from_hf(json.loads((MODELS_DIR / f"{model.lower()}.json").read_text()))
    try:
        folder = Path(model).expanduser()
    except RuntimeError:  # nobody has that home
        folder = Path(model)
    if folder.is_dir():
        return load_config(folder)
    if folder.exists() or model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ValueError(f"model is {model!r}, it must be a folder, a Hugging Face id or one of {', '.join(names())}")
    return load_config(_download(model))


def _download(model: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.hf_hub_download(model, "config.json")).parent
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"model is {model!r}: Hugging Face does not give its config.json: {reason}") from None
