# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: Hugging Face's safetensors and sharded Orbax arrays <-> Params, and from one to the other, streamed.

`load` takes either format, `identity` tells checkpoints apart. table.py has the published names, huggingface.py and
orbax.py the formats, placing.py puts leaves on a mesh, conversion.py converts and verifies, manifest.py is what a
converted folder says of itself.
"""

from qwen_spmd.checkpoint.conversion import Report, convert, verify
from qwen_spmd.checkpoint.huggingface import save
from qwen_spmd.checkpoint.placing import load
from qwen_spmd.checkpoint.source import identity

__all__ = ["Report", "convert", "identity", "load", "save", "verify"]
