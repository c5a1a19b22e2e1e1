# SPDX-License-Identifier: Apache-2.0
"""ModelConfig from config.json: the families, what is refused, and the sizes of the published models."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import pytest

from qwen_spmd.config import Rope, from_hf, load_config
from qwen_spmd.params import abstract, num_params

# Qwen3.5: name, D, layers, N, K, U, experts, experts per token, expert width, shared width, dense width, tied,
# parameters in billions of the text model without MTP.
QWEN3_5 = [
    ("397B-A17B", 4096, 60, 32, 2, 64, 512, 10, 1024, 1024, None, False, 396.3),
    ("122B-A10B", 3072, 48, 32, 2, 64, 256, 8, 1024, 1024, None, False, 122),
    ("35B-A3B", 2048, 40, 16, 2, 32, 256, 8, 512, 512, None, False, 34.7),
    ("27B", 5120, 64, 24, 4, 48, None, None, None, None, 17408, False, 26.9),
    ("9B", 4096, 32, 16, 4, 32, None, None, None, None, 12288, False, 8.95),
    ("4B", 2560, 32, 16, 4, 32, None, None, None, None, 9216, True, 4.2),
    ("2B", 2048, 24, 8, 2, 16, None, None, None, None, 6144, True, 1.88),
    ("0.8B", 1024, 24, 8, 2, 16, None, None, None, None, 3584, True, 0.75),
]
# Qwen3: name, D, layers, N, K, experts, experts per token, expert width, dense width, tied, billions of parameters.
QWEN3 = [
    ("235B-A22B", 4096, 94, 64, 4, 128, 8, 1536, 12288, False, 235.1),
    ("30B-A3B", 2048, 48, 32, 4, 128, 8, 768, 6144, False, 30.5),
    ("Coder-480B-A35B", 6144, 62, 96, 8, 160, 8, 2560, 8192, False, 480.2),
    ("0.6B", 1024, 28, 16, 8, None, None, None, 3072, True, 0.6),
    ("1.7B", 2048, 28, 16, 8, None, None, None, 6144, True, 1.72),
    ("4B", 2560, 36, 32, 8, None, None, None, 9728, True, 4.0),
    ("8B", 4096, 36, 32, 8, None, None, None, 12288, False, 8.2),
    ("14B", 5120, 40, 40, 8, None, None, None, 17408, False, 14.8),
    ("32B", 5120, 64, 64, 8, None, None, None, 25600, False, 32.8),
]


def qwen3_5(name="35B-A3B") -> dict:
    """config.json of a published Qwen3.5 model, with the fields that its file has."""
    _, d, layers, n, k, u, e, x, width, shared, dense, tied, _ = next(m for m in QWEN3_5 if m[0] == name)
    kind = "qwen3_5_moe" if e else "qwen3_5"
    text = {
        "model_type": f"{kind}_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": d,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": u,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": n,
        "num_hidden_layers": layers,
        "num_key_value_heads": k,
        "rms_norm_eps": 1e-6,
        "vocab_size": 248320,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    }
    if e:
        text |= {
            "mlp_only_layers": [],
            "moe_intermediate_size": width,
            "num_experts": e,
            "num_experts_per_tok": x,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": shared,
        }
    else:
        text |= {"intermediate_size": dense}
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration" if e else "Qwen3_5ForConditionalGeneration"],
        "model_type": kind,
        "image_token_id": 248056,
        "text_config": text,
        "tie_word_embeddings": tied,
        "transformers_version": "4.57.0.dev0",
        "vision_config": {"model_type": kind, "hidden_size": 1152, "head_dim": 72},
    }


def qwen3(name="30B-A3B") -> dict:
    """config.json of a published Qwen3 model, with the fields that its file has."""
    _, d, layers, n, k, e, x, width, dense, tied, _ = next(m for m in QWEN3 if m[0] == name)
    hf = {
        "architectures": ["Qwen3MoeForCausalLM" if e else "Qwen3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": d,
        "intermediate_size": dense,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "model_type": "qwen3_moe" if e else "qwen3",
        "num_attention_heads": n,
        "num_hidden_layers": layers,
        "num_key_value_heads": k,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    if e:
        hf |= {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": width,
            "norm_topk_prob": True,
            "num_experts": e,
            "num_experts_per_tok": x,
        }
    return hf


PUBLISHED = [
    *(pytest.param(qwen3_5(m[0]), m[-1], id=f"Qwen3.5-{m[0]}") for m in QWEN3_5),
    *(pytest.param(qwen3(m[0]), m[-1], id=f"Qwen3-{m[0]}") for m in QWEN3),
]


@pytest.mark.parametrize(("hf", "billions"), PUBLISHED)
def test_published_sizes(hf, billions):
    cfg = dataclasses.replace(from_hf(hf), mtp=False)
    assert num_params(abstract(cfg, "bfloat16")) == pytest.approx(billions * 1e9, rel=0.01)


def test_qwen3_5_moe():
    cfg = from_hf(qwen3_5("397B-A17B"))
    gdn, attention = ("gated_delta", "moe"), ("attention", "moe")
    assert cfg.family == "qwen3_5_moe"
    assert cfg.pattern == (gdn, gdn, gdn, attention)
    assert (cfg.periods, cfg.count("gated_delta"), cfg.count("attention")) == (15, 45, 15)
    assert cfg.output_gate and cfg.zero_centred_norms and cfg.mtp and not cfg.tied_embeddings
    assert cfg.rope == Rope(theta=1e7, dim=64)
    assert cfg.gated_delta is not None and cfg.gated_delta.channels == 12288
    assert cfg.moe is not None and cfg.moe.norm_topk_prob and cfg.moe.shared_width == 1024
    assert cfg.mlp_width is None
    assert (cfg.dtype, cfg.norm_eps, cfg.max_position_embeddings) == ("bfloat16", 1e-6, 262144)
    assert cfg.dims() == {
        "V": 248320, "D": 4096, "N": 32, "K": 2, "H": 256, "J": 16, "U": 64, "Y": 128, "Z": 128, "W": 4, "C": 12288,
        "E": 512, "M": 1024, "F": 1024,
    }  # fmt: skip


def test_qwen3_5_dense():
    cfg = from_hf(qwen3_5("4B"))
    assert cfg.family == "qwen3_5"
    assert cfg.pattern == (("gated_delta", "mlp"),) * 3 + (("attention", "mlp"),)
    assert cfg.moe is None and cfg.tied_embeddings and cfg.dims()["F"] == cfg.mlp_width == 9216


def test_qwen3_moe():
    cfg = from_hf(qwen3("235B-A22B"))
    assert cfg.family == "qwen3_moe"
    assert cfg.pattern == (("attention", "moe"),) and cfg.periods == 94
    assert not (cfg.output_gate or cfg.zero_centred_norms or cfg.mtp or cfg.tied_embeddings)
    assert cfg.rope == Rope(theta=1e6, dim=128)
    assert cfg.moe is not None and cfg.moe.shared_width is None and "F" not in cfg.dims()
    assert cfg.dtype == "bfloat16"


def test_qwen3_dense():
    cfg = from_hf(qwen3("0.6B"))
    assert cfg.family == "qwen3" and cfg.pattern == (("attention", "mlp"),)
    assert cfg.tied_embeddings and cfg.gated_delta is None and cfg.moe is None


@pytest.mark.parametrize("name", ["35B-A3B", "4B"])
def test_text_only_export(name):
    """The text config alone, with the flags that re-saved files carry, means the same model."""
    hf = qwen3_5(name)
    alone = hf["text_config"] | {"tie_word_embeddings": hf["tie_word_embeddings"]}
    assert from_hf(alone) == from_hf(hf)
    parent = alone | {"model_type": hf["model_type"]}
    assert from_hf(parent) == from_hf(hf)


def test_tied_flag_in_the_text_config():
    hf = qwen3_5("9B")
    del hf["tie_word_embeddings"]
    assert not from_hf(hf).tied_embeddings
    hf["text_config"]["tie_word_embeddings"] = True
    assert from_hf(hf).tied_embeddings


def test_interval_stands_in_for_layer_types():
    hf = qwen3_5()
    want = from_hf(hf)
    del hf["text_config"]["layer_types"]
    assert from_hf(hf) == want
    hf["text_config"]["layer_types"] = ["full_attention"] * 40  # explicit types win over the interval
    assert from_hf(hf).pattern == (("attention", "moe"),)


def test_rope_old_and_new_place():
    old, new = qwen3(), qwen3()
    del new["rope_theta"], new["rope_scaling"]
    new["rope_parameters"] = {"rope_theta": 1000000, "rope_type": "default"}
    assert from_hf(old) == from_hf(new)
    new["rope_parameters"]["rope_theta"] = 5000000
    assert from_hf(new).rope.theta == 5e6
    both = qwen3() | {
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    }
    with pytest.raises(ValueError, match="rope_parameters and rope_scaling"):
        from_hf(both)


def write(folder, hf):
    (folder / "config.json").write_text(json.dumps(hf))
    return folder


def test_yarn_by_overrides(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}
    rope = load_config(write(tmp_path, qwen3_5()), {"text_config": {"rope_parameters": yarn}}).rope
    assert rope == Rope(
        theta=1e7, dim=64, yarn_factor=4.0, yarn_original_len=262144, attention_factor=pytest.approx(1.1386294)
    )
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = load_config(write(tmp_path, qwen3()), {"rope_scaling": yarn}).rope
    assert rope == Rope(
        theta=1e6, dim=128, yarn_factor=4.0, yarn_original_len=32768, attention_factor=pytest.approx(1.1386294)
    )


def test_yarn_details():
    yarn = {"type": "yarn", "factor": 2, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5}
    rope = from_hf(qwen3() | {"rope_scaling": yarn}).rope
    assert (rope.yarn_factor, rope.yarn_beta_fast, rope.yarn_beta_slow) == (2.0, 16.0, 2.0)
    assert (rope.attention_factor, rope.yarn_original_len) == (1.5, 40960)
    del yarn["attention_factor"]
    assert from_hf(qwen3() | {"rope_scaling": yarn}).rope.attention_factor == pytest.approx(0.1 * math.log(2) + 1)


def test_overrides_that_nothing_would_read(tmp_path):
    """At the top level of a file that keeps its text model nested, they would be accepted and ignored."""
    yarn = {"rope_type": "yarn", "factor": 4.0}
    with pytest.raises(ValueError, match=r"rope_parameters.*'text_config'"):
        load_config(write(tmp_path, qwen3_5()), {"rope_parameters": yarn})
    assert load_config(write(tmp_path, qwen3_5()), {"tie_word_embeddings": True}).tied_embeddings
    assert load_config(write(tmp_path, qwen3()), {"rope_theta": 5e6, "new": 1}).rope.theta == 5e6


@pytest.mark.parametrize(
    ("content", "match"), [(None, "no config.json"), ("{", "not JSON"), ("[]", "list"), ("{}", "model_type is None")]
)
def test_not_a_config(tmp_path, content, match):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=match) as e:
        load_config(tmp_path)
    assert content == "{}" or str(tmp_path) in str(e.value)


@pytest.mark.parametrize("kind", ["qwen4_exp", "qwen3_next", "llama", None])
def test_other_model_types(kind):
    with pytest.raises(ValueError, match=f"model_type is {kind!r}.*qwen3_5_moe"):
        from_hf(qwen3() | {"model_type": kind})


COMMON = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"]
COMMON += ["rms_norm_eps", "max_position_embeddings"]
GDN = ["linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"]
GDN += ["linear_conv_kernel_dim"]
MOE = ["num_experts", "num_experts_per_tok", "moe_intermediate_size"]
NEEDED = [
    *((qwen3("0.6B"), f) for f in [*COMMON, "intermediate_size"]),
    *((qwen3(), f) for f in [*COMMON, *MOE, "norm_topk_prob"]),
    *((qwen3_5("4B"), f) for f in [*COMMON, *GDN, "intermediate_size"]),
    *((qwen3_5(), f) for f in [*COMMON, *GDN, *MOE, "shared_expert_intermediate_size"]),
]
IDS = [f"{hf['model_type']}-{field}" for hf, field in NEEDED]


def without(hf, field):
    hf = copy.deepcopy(hf)
    del hf.get("text_config", hf)[field]
    return hf


def changed(hf, field, value):
    hf = copy.deepcopy(hf)
    hf.get("text_config", hf)[field] = value
    return hf


@pytest.mark.parametrize(("hf", "field"), NEEDED, ids=IDS)
def test_missing_field(hf, field):
    """Nothing has a default, and head_dim is never derived from the hidden size."""
    with pytest.raises(ValueError, match=f"{field} is missing, a {hf['model_type']} model needs it"):
        from_hf(without(hf, field))


@pytest.mark.parametrize(("hf", "field"), NEEDED, ids=IDS)
def test_wrong_type(hf, field):
    for value in ("8", None, [8]):
        with pytest.raises(ValueError, match=f"{field} is .*expected"):
            from_hf(changed(hf, field, value))
    if field not in ("rms_norm_eps", "norm_topk_prob"):
        for value in (0, -1, 8.0, True):
            with pytest.raises(ValueError, match=f"{field} is {value}"):
                from_hf(changed(hf, field, value))


@pytest.mark.parametrize(
    ("hf", "field"),
    [(qwen3(), "rope_theta"), (qwen3_5(), "full_attention_interval"), (qwen3_5(), "rope_parameters")],
)
def test_missing_elsewhere(hf, field):
    hf = copy.deepcopy(hf)
    hf.get("text_config", hf).pop("layer_types", None)
    with pytest.raises(ValueError, match="rope_theta" if "rope" in field else field):
        from_hf(without(hf, field))


def test_missing_partial_rotary_factor():
    hf = qwen3_5()
    del hf["text_config"]["rope_parameters"]["partial_rotary_factor"]
    with pytest.raises(ValueError, match="partial_rotary_factor"):
        from_hf(hf)


@pytest.mark.parametrize(
    ("hf", "field", "value", "match"),
    [
        (qwen3(), "hidden_act", "gelu", "'silu'"),
        (qwen3(), "attention_bias", True, "False"),
        (qwen3(), "use_sliding_window", True, "False"),
        (qwen3(), "sliding_window", 4096, "None"),
        (qwen3(), "num_key_value_heads", 3, "num_attention_heads is 32, no multiple"),
        (qwen3(), "torch_dtype", "float16", "dtype is 'float16'"),
        (qwen3(), "num_experts_per_tok", 129, "more than num_experts 128"),
        (qwen3(), "norm_topk_prob", 1, "expected bool"),
        (qwen3(), "layer_types", ["sliding_attention"] * 48, "sliding_attention"),
        (qwen3(), "decoder_sparse_step", 0, "decoder_sparse_step is 0"),
        (qwen3(), "mlp_only_layers", 3, "mlp_only_layers is 3"),
        (qwen3(), "rope_scaling", {"rope_type": "linear", "factor": 2.0}, "rope_type is 'linear'.*yarn"),
        (qwen3(), "rope_scaling", {"rope_type": "yarn"}, "rope factor is None"),
        (qwen3(), "rope_scaling", {"rope_type": "yarn", "factor": 0.5}, "rope factor is 0.5"),
        (
            qwen3(),
            "rope_scaling",
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768.5},
            "original_max_position_embeddings is 32768.5",
        ),
        (qwen3(), "rope_theta", "1e6", "rope_theta is '1e6'"),
        (qwen3_5(), "attn_output_gate", False, "True"),
        (qwen3_5(), "output_gate_type", "sigmoid", "'swish'"),
        (qwen3_5(), "mtp_use_dedicated_embeddings", True, "False"),
        (qwen3_5(), "mtp_num_hidden_layers", 2, "mtp_num_hidden_layers is 2"),
        (qwen3_5(), "mlp_only_layers", [0], "mlp_only_layers"),
        (qwen3_5(), "layer_types", ["linear_attention"] * 39, "39 entries, num_hidden_layers is 40"),
        (qwen3_5(), "layer_types", ["mamba"] * 40, r"\['mamba'\]; supported: \['full_attention'"),
        (qwen3_5(), "linear_num_value_heads", 24, "no multiple of linear_num_key_heads 16"),
        (qwen3_5(), "linear_conv_kernel_dim", 1, "at least 2"),
        (qwen3_5(), "head_dim", 252, "252 is 63 dims"),
        (qwen3_5(), "dtype", "float8_e4m3fn", "float8_e4m3fn"),
    ],
)
def test_refused(hf, field, value, match):
    with pytest.raises(ValueError, match=match) as e:
        from_hf(changed(hf, field, value))
    assert "config.json" in str(e.value)


def test_text_config_of_another_type():
    with pytest.raises(ValueError, match="text_config is None"):
        from_hf(qwen3_5() | {"text_config": None})


@pytest.mark.parametrize(
    ("dense", "step", "pattern"),
    [
        ([], 1, ["moe"]),
        (None, 1, ["moe"]),
        ([], 2, ["mlp", "moe"]),
        ([], 3, ["mlp", "mlp", "moe"] * 2),
        ([0, 4], 1, ["mlp", "moe", "moe", "moe"]),
        ([0], 1, ["mlp"] + ["moe"] * 7),
        ([1], 2, ["mlp"] * 3 + ["moe", "mlp", "moe", "mlp", "moe"]),
        ([0, 1, 2, 3, 4, 5, 6, 7], 1, ["mlp"]),
    ],
)
def test_dense_layers_among_sparse(dense, step, pattern):
    hf = qwen3() | {"num_hidden_layers": 6 if step == 3 else 8, "mlp_only_layers": dense, "decoder_sparse_step": step}
    cfg = from_hf(hf)
    kinds = [ffn for _, ffn in cfg.pattern] * cfg.periods
    assert kinds == (pattern * 8)[: cfg.num_layers]
    assert len(cfg.pattern) == (3 if step == 3 else len(pattern))
    assert ("F" in cfg.dims()) == ("mlp" in kinds) and ("E" in cfg.dims()) == ("moe" in kinds)


@pytest.mark.parametrize(
    ("hf", "runs"),
    [
        (qwen3(), [("attention", "moe", 0, 1)]),
        (qwen3_5(), [("gated_delta", "moe", 0, 3), ("attention", "moe", 3, 1)]),
        (qwen3() | {"decoder_sparse_step": 3}, [("attention", "mlp", 0, 2), ("attention", "moe", 2, 1)]),
        (
            qwen3() | {"mlp_only_layers": [47], "num_hidden_layers": 48},
            [("attention", "moe", 0, 47), ("attention", "mlp", 47, 1)],
        ),
    ],
)
def test_runs_and_places(hf, runs):
    """Each layer has one place: the run of its kind, and behind the layers of that run before it."""
    cfg = from_hf(hf)
    assert [dataclasses.astuple(run) for run in cfg.runs] == runs
    stacks = [[] for _ in runs]
    for layer in range(cfg.num_layers):
        run, i = cfg.place(layer)
        assert i == len(stacks[run])
        assert cfg.pattern[layer % len(cfg.pattern)] == (cfg.runs[run].mixer, cfg.runs[run].ffn)
        stacks[run].append(layer)
    assert [len(stack) for stack in stacks] == [cfg.periods * run.count for run in cfg.runs]
    assert cfg.count("attention") + cfg.count("gated_delta") == cfg.num_layers


def test_unknown_fields_are_ignored():
    hf = qwen3_5()
    want = from_hf(hf)
    hf["text_config"] |= {"bos_token_id": 248044, "output_gate_type": "swish", "partial_rotary_factor": 0.25}
    assert from_hf(hf | {"language_model_only": False}) == want
