# SPDX-License-Identifier: Apache-2.0
"""ModelConfig: what a Hugging Face `config.json` says about the architecture, checked and frozen.

Lives here: reading the file, the layer pattern, the dimension table (letter -> size). Not here: jax, meshes,
kernels, dtypes of the day, serving limits.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Literal

FAMILIES = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
MIXERS = {"full_attention": "attention", "linear_attention": "gated_delta"}

Mixer = Literal["attention", "gated_delta"]
Ffn = Literal["mlp", "moe"]


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding: the first `dim` of a head are rotated; `yarn_*` are set when `rope_type` is "yarn"."""

    theta: float
    dim: int
    yarn_factor: float | None = None
    yarn_original_len: int = 0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    attention_factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class GatedDelta:
    """Gated DeltaNet sizes: J key heads of Y, U value heads of Z, causal convolution over W tokens."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def channels(self) -> int:
        """C, what the convolution runs over: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclasses.dataclass(frozen=True)
class Moe:
    num_experts: int
    experts_per_token: int
    width: int
    norm_topk_prob: bool
    shared_width: int | None


@dataclasses.dataclass(frozen=True)
class Run:
    """`count` equal layers in a row within the pattern; the first is layer `start` of it."""

    mixer: Mixer
    ffn: Ffn
    start: int
    count: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One of the Qwen3 and Qwen3.5 families. `pattern` repeats `num_layers / len(pattern)` times."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    pattern: tuple[tuple[Mixer, Ffn], ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    output_gate: bool
    zero_centred_norms: bool
    norm_eps: float
    rope: Rope
    mlp_width: int | None
    gated_delta: GatedDelta | None
    moe: Moe | None
    tied_embeddings: bool
    mtp: bool
    max_position_embeddings: int
    dtype: Literal["bfloat16", "float32"]

    @property
    def periods(self) -> int:
        return self.num_layers // len(self.pattern)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The pattern as runs of equal layers. Qwen3: one of 1. Qwen3.5: 3 Gated DeltaNet, then 1 attention."""
        runs: list[Run] = []
        for i, (mixer, ffn) in enumerate(self.pattern):
            if runs and (runs[-1].mixer, runs[-1].ffn) == (mixer, ffn):
                runs[-1] = dataclasses.replace(runs[-1], count=runs[-1].count + 1)
            else:
                runs.append(Run(mixer, ffn, i, 1))
        return tuple(runs)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The kinds of mixer in the pattern."""
        return tuple(dict.fromkeys(mixer for mixer, _ in self.pattern))

    def place(self, layer: int) -> tuple[int, int]:
        """(run, index in its stack) of a layer: a run's stack holds its layers of all periods, in order."""
        period, i = divmod(layer, len(self.pattern))
        r = max(r for r, run in enumerate(self.runs) if run.start <= i)
        return r, period * self.runs[r].count + i - self.runs[r].start

    def count(self, kind: Mixer | Ffn) -> int:
        """Layers of the model (MTP not counted) whose mixer or feed-forward is of this kind."""
        return self.periods * sum(kind in layer for layer in self.pattern)

    def dims(self) -> dict[str, int]:
        """The letter table: sizes of every letter that a parameter or a state array declares, except L, P, S, R."""
        sizes = {
            "V": self.vocab_size,
            "D": self.hidden_size,
            "N": self.num_heads,
            "K": self.num_kv_heads,
            "H": self.head_dim,
        }
        if self.mlp_width is not None:
            sizes["F"] = self.mlp_width
        if (gdn := self.gated_delta) is not None:
            sizes |= {"J": gdn.key_heads, "U": gdn.value_heads, "Y": gdn.key_dim, "Z": gdn.value_dim}
            sizes |= {"W": gdn.conv_width, "C": gdn.channels}
        if self.moe is not None:
            sizes |= {"E": self.moe.num_experts, "M": self.moe.width}
            if self.moe.shared_width is not None:
                sizes["F"] = self.moe.shared_width
        return sizes


def load_config(folder: Path, overrides: dict[str, Any] | None = None) -> ModelConfig:
    """The ModelConfig of a checkpoint folder. `overrides` are merged into config.json first (`--hf-overrides`)."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"model: {folder} holds no config.json")
    try:
        hf = json.loads(path.read_text())
    except json.JSONDecodeError as e:
        raise ValueError(f"{path}: not JSON ({e})") from e
    if not isinstance(hf, dict):
        raise ValueError(f"{path}: holds a {type(hf).__name__}, expected an object")
    # Nothing would read them there: a YaRN setting would be accepted and ignored.
    if "text_config" in hf and (lost := sorted((overrides or {}).keys() - hf.keys())):
        raise ValueError(f"overrides: {path} has no {', '.join(lost)}; fields of the text model go in 'text_config'")
    return from_hf(_merge(hf, overrides or {}))


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        out[key] = _merge(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def from_hf(hf: dict[str, Any]) -> ModelConfig:
    """Parse the content of a config.json (whole, or a text-only re-export).

    Raises ValueError that names the field for anything missing, of another family, or that this model does not compute.
    """
    text = hf.get("text_config", hf)
    if not isinstance(text, dict):
        raise ValueError(f"config.json: text_config is {text!r}, expected an object")
    kind = text.get("model_type", hf.get("model_type"))
    if kind not in FAMILIES:
        raise ValueError(f"config.json: model_type is {kind!r}; supported are {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[kind]
    hybrid = family.startswith("qwen3_5")
    moe = family.endswith("_moe")

    def get(name: str, kinds: type | tuple[type, ...] = int) -> Any:
        if name not in text:
            raise ValueError(f"config.json: {name} is missing, a {family} model needs it")
        value = text[name]
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise ValueError(f"config.json: {name} is {value!r}, expected {_type_names(kinds)}")
        if kinds is int and value <= 0:
            raise ValueError(f"config.json: {name} is {value}, it must be positive")
        return value

    def refuse(name: str, *allowed: Any) -> None:
        if text.get(name, allowed[0]) not in allowed:
            raise ValueError(f"config.json: {name} is {text[name]!r}; supported: {', '.join(repr(a) for a in allowed)}")

    refuse("hidden_act", "silu")
    refuse("attention_bias", False)
    refuse("use_sliding_window", False, None)
    refuse("sliding_window", None)
    refuse("mtp_use_dedicated_embeddings", False)
    refuse("mtp_num_hidden_layers", 0, 1, None)
    if hybrid:
        refuse("mlp_only_layers", [], None)
        refuse("attn_output_gate", True)
        refuse("output_gate_type", "swish")

    layers = get("num_hidden_layers")
    kinds = tuple(zip(_mixers(text, layers, hybrid), _ffns(text, layers, hybrid, moe), strict=True))
    heads, kv_heads, head_dim = get("num_attention_heads"), get("num_key_value_heads"), get("head_dim")
    if heads % kv_heads:
        raise ValueError(f"config.json: num_attention_heads is {heads}, no multiple of num_key_value_heads {kv_heads}")
    dtype = text.get("dtype", text.get("torch_dtype", hf.get("dtype", hf.get("torch_dtype", "bfloat16"))))
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"config.json: dtype is {dtype!r}; supported: bfloat16, float32")
    return ModelConfig(
        family=family,
        vocab_size=get("vocab_size"),
        hidden_size=get("hidden_size"),
        num_layers=layers,
        pattern=kinds[: _period(kinds)],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        output_gate=hybrid,
        zero_centred_norms=hybrid,
        norm_eps=get("rms_norm_eps", (int, float)),
        rope=_rope(text, head_dim, hybrid),
        mlp_width=get("intermediate_size") if any(f == "mlp" for _, f in kinds) else None,
        gated_delta=_gated_delta(get) if any(m == "gated_delta" for m, _ in kinds) else None,
        moe=_moe(text, get, hybrid) if any(f == "moe" for _, f in kinds) else None,
        tied_embeddings=bool(hf.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        mtp=bool(text.get("mtp_num_hidden_layers", 0)),
        max_position_embeddings=get("max_position_embeddings"),
        dtype=dtype,
    )


def _type_names(kinds: type | tuple[type, ...]) -> str:
    return " or ".join(k.__name__ for k in (kinds if isinstance(kinds, tuple) else (kinds,)))


def _mixers(text: dict[str, Any], layers: int, hybrid: bool) -> list[Mixer]:
    if not hybrid:
        names = text.get("layer_types") or ["full_attention"] * layers
        if set(names) != {"full_attention"}:
            raise ValueError(f"config.json: layer_types is {sorted(set(names))}; Qwen3 has only 'full_attention'")
    elif (names := text.get("layer_types")) is None:
        interval = text.get("full_attention_interval")
        if not isinstance(interval, int) or interval < 1:
            raise ValueError(f"config.json: full_attention_interval is {interval!r}, expected a positive integer")
        names = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)]
    if len(names) != layers:
        raise ValueError(f"config.json: layer_types has {len(names)} entries, num_hidden_layers is {layers}")
    unknown = sorted(set(names) - set(MIXERS))
    if unknown:
        raise ValueError(f"config.json: layer_types holds {unknown}; supported: {sorted(MIXERS)}")
    return [MIXERS[n] for n in names]  # type: ignore[misc]


def _ffns(text: dict[str, Any], layers: int, hybrid: bool, moe: bool) -> list[Ffn]:
    if not moe:
        return ["mlp"] * layers
    dense = text.get("mlp_only_layers") or []
    step = 1 if hybrid else text.get("decoder_sparse_step", 1)
    if not isinstance(dense, list):
        raise ValueError(f"config.json: mlp_only_layers is {dense!r}, expected a list of layers")
    if not isinstance(step, int) or step < 1:
        raise ValueError(f"config.json: decoder_sparse_step is {step!r}, expected a positive integer")
    return ["mlp" if i in dense or (i + 1) % step else "moe" for i in range(layers)]


def _period(kinds: tuple[tuple[Mixer, Ffn], ...]) -> int:
    n = len(kinds)
    return next(p for p in range(1, n + 1) if n % p == 0 and kinds == kinds[:p] * (n // p))


def _gated_delta(get: Any) -> GatedDelta:
    gdn = GatedDelta(
        key_heads=get("linear_num_key_heads"),
        value_heads=get("linear_num_value_heads"),
        key_dim=get("linear_key_head_dim"),
        value_dim=get("linear_value_head_dim"),
        conv_width=get("linear_conv_kernel_dim"),
    )
    if gdn.value_heads % gdn.key_heads:
        raise ValueError(
            f"config.json: linear_num_value_heads is {gdn.value_heads}, "
            f"no multiple of linear_num_key_heads {gdn.key_heads}"
        )
    if gdn.conv_width < 2:
        raise ValueError(f"config.json: linear_conv_kernel_dim is {gdn.conv_width}, it must be at least 2")
    return gdn


def _moe(text: dict[str, Any], get: Any, hybrid: bool) -> Moe:
    moe = Moe(
        num_experts=get("num_experts"),
        experts_per_token=get("num_experts_per_tok"),
        width=get("moe_intermediate_size"),
        # Qwen3.5 always renormalises and its files lack the field; for Qwen3 the file must say.
        norm_topk_prob=True if hybrid else get("norm_topk_prob", bool),
        shared_width=get("shared_expert_intermediate_size") if hybrid else None,
    )
    if moe.experts_per_token > moe.num_experts:
        raise ValueError(
            f"config.json: num_experts_per_tok is {moe.experts_per_token}, more than num_experts {moe.num_experts}"
        )
    return moe


def _rope(text: dict[str, Any], head_dim: int, hybrid: bool) -> Rope:
    rope, old = (text.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    if rope and old and rope != old:
        raise ValueError("config.json: rope_parameters and rope_scaling are both there and differ, keep one")
    rope = rope or old
    theta = rope.get("rope_theta", text.get("rope_theta"))
    if not isinstance(theta, int | float):
        raise ValueError(f"config.json: rope_theta is {theta!r}, expected a number")
    fraction = rope.get("partial_rotary_factor", text.get("partial_rotary_factor"))
    if fraction is None:
        if hybrid:
            raise ValueError("config.json: rope_parameters.partial_rotary_factor is missing")
        fraction = 1.0
    dim = int(head_dim * fraction)
    if not 0 < dim <= head_dim or dim % 2:
        raise ValueError(
            f"config.json: partial_rotary_factor {fraction} of head_dim {head_dim} is {dim} dims, it must be even"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return Rope(theta=float(theta), dim=dim)
    if kind != "yarn":
        raise ValueError(f"config.json: rope_type is {kind!r}; supported: default, yarn")
    factor = rope.get("factor")
    if not isinstance(factor, int | float) or factor < 1:
        raise ValueError(f"config.json: rope factor is {factor!r}, expected a number of at least 1")
    original = rope.get("original_max_position_embeddings", text.get("max_position_embeddings"))
    if not isinstance(original, int) or original < 1:
        raise ValueError(f"config.json: original_max_position_embeddings is {original!r}, expected a positive integer")
    attention_factor = rope.get("attention_factor") or 0.1 * math.log(factor) + 1.0
    return Rope(
        theta=float(theta),
        dim=dim,
        yarn_factor=float(factor),
        yarn_original_len=original,
        yarn_beta_fast=float(rope.get("beta_fast") or 32),
        yarn_beta_slow=float(rope.get("beta_slow") or 1),
        attention_factor=float(attention_factor),
    )
