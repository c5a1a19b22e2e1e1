# SPDX-License-Identifier: Apache-2.0
"""A step's inputs as one int32 array: one transfer to the devices instead of one for each field, and one frame to the
other processes.

Row r holds the fields of rank r one after the other, floats and unsigned integers bit for bit. Not here: what the
fields mean (`state.Batch`), where they come from (`scheduler`).
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from qwen_spmd.serve.scheduler import StepPlan
from qwen_spmd.state import MAX_STOP_IDS, Batch, Sampling

Key = tuple[int, int] | int
"""Which program: (T, B), the padded tokens and sequences of a rank in a ragged step; B, those of a decode window."""


@dataclasses.dataclass(frozen=True)
class Packed:
    """What a step needs, wherever it was planned: `words` int32 [ranks, n]; `iterations` as in StepPlan."""

    key: Key
    iterations: int
    words: np.ndarray


def fields(key: Key, pages_per_seq: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """Shape and dtype of each field of a rank's Batch and its Sampling, in the order in which they are packed."""
    T, B = key if isinstance(key, tuple) else (key, key)
    shapes: dict[str, tuple[int, ...]] = {
        "tokens_T": (T,),
        "q_start_B": (B + 1,),
        "pages_BP": (B, pages_per_seq),
        "stop_ids_B": (B, MAX_STOP_IDS),
    }
    dtypes = {"fresh_B": np.bool_, "emit_B": np.bool_, "seed_B": np.uint32}
    dtypes |= dict.fromkeys(("temperature_B", "top_p_B", "min_p_B"), np.float32)
    names = [f.name for cls in (Batch, Sampling) for f in dataclasses.fields(cls) if f.name != "sampling"]  # type: ignore[arg-type]
    return {name: (shapes.get(name, (B,)), dtypes.get(name, np.int32)) for name in names}


def num_words(key: Key, pages_per_seq: int) -> int:
    return sum(math.prod(shape) for shape, _ in fields(key, pages_per_seq).values())


def pack(plan: StepPlan) -> Packed:
    ranks, B = plan.kv_len_B.shape
    T, P = plan.tokens_T.shape[1], plan.pages_BP.shape[2]
    key = B if plan.iterations else (T, B)
    words = [_words(getattr(plan, name)).reshape(ranks, -1) for name in fields(key, P)]
    return Packed(key, plan.iterations, np.concatenate(words, axis=1))


def _words(x: np.ndarray) -> np.ndarray:
    return x.astype(np.int32) if x.dtype == np.bool_ else x.view(np.int32)


def unpack(words: jax.Array, key: Key, pages_per_seq: int) -> Batch:
    """One rank's Batch out of its row [n], on the device."""
    out, start = {}, 0
    for name, (shape, dtype) in fields(key, pages_per_seq).items():
        x = words[start : start + math.prod(shape)].reshape(shape)
        start += x.size
        out[name] = x != 0 if dtype is np.bool_ else jax.lax.bitcast_convert_type(x, jnp.dtype(dtype))
    sampling = Sampling(**{f.name: out.pop(f.name) for f in dataclasses.fields(Sampling)})  # type: ignore[arg-type]
    return Batch(**out, sampling=sampling)
