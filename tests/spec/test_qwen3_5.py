"""Configs of Qwen3.5 in every form that is in the wild, and every way in which one can be wrong."""

from __future__ import annotations

from typing import Any

import pytest

from denim.errors import ConfigError
from denim.spec import read_spec
from denim.spec.attention import FullAttention
from denim.spec.ffn import DenseFFN, MoEFFN
from denim.spec.linear import GatedDeltaNet
from tests.spec.configs import qwen3_5_0_8b, qwen3_5_0_8b_text, qwen3_5_35b_a3b_text


def text(without: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    config = qwen3_5_0_8b_text() | changes
    return {key: value for key, value in config.items() if key not in without}


def rope(**parameters: Any) -> dict[str, Any]:
    return text(("partial_rotary_factor",), rope_parameters={"rope_theta": 1e6, **parameters})


def test_the_published_0_8b() -> None:
    spec = read_spec(qwen3_5_0_8b())
    assert spec.pattern == "LLLF" * 6
    assert spec.attention_layers == (3, 7, 11, 15, 19, 23)
    assert len(spec.linear_layers) == 18
    assert spec.layers[3].mixer == FullAttention(8, 2, 256, rotary_dim=64, gated=True, qk_norm=True)
    assert spec.layers[0].mixer == GatedDeltaNet(16, 16, 128, 128, conv_width=4)
    assert spec.layers[0].ffn == DenseFFN(3584)
    assert [layer.mixer.letter for layer in spec.mtp_layers] == ["F"]
    assert (spec.hidden_size, spec.vocab_size, spec.max_position) == (1024, 248320, 262144)
    assert (spec.dtype, spec.state_dtype, spec.tie_embeddings) == ("bfloat16", "float32", True)
    assert (spec.rope.theta, spec.rope.kind, spec.norm_eps) == (1e7, "default", 1e-6)


def test_wrapper_and_text_form_describe_the_same_model() -> None:
    assert read_spec(qwen3_5_0_8b()) == read_spec(qwen3_5_0_8b_text())


def test_moe() -> None:
    spec = read_spec(qwen3_5_35b_a3b_text())
    assert spec.family == "qwen3_5_moe"
    assert all(layer.ffn == MoEFFN(256, 8, 512, 512) for layer in spec.layers + spec.mtp_layers)
    wrapped = {"model_type": "qwen3_5_moe", "text_config": qwen3_5_35b_a3b_text()}
    assert read_spec(wrapped) == spec


# Layout of layers (LD-13)


def test_interval_and_layer_types_give_the_same_layout() -> None:
    both, interval_only = text(), text(("layer_types",))
    types_only, neither = text(("full_attention_interval",)), text(("layer_types", "full_attention_interval"))
    patterns = {read_spec(config).pattern for config in (both, interval_only, types_only, neither)}
    assert patterns == {"LLLF" * 6}


def test_interval_is_honoured() -> None:
    assert read_spec(text(("layer_types",), full_attention_interval=6)).pattern == "LLLLLF" * 4


def test_layer_types_need_no_regular_pattern() -> None:
    types = ["full_attention"] + ["mamba"] * 22 + ["attention"]
    assert read_spec(text(("full_attention_interval",), layer_types=types)).pattern == "F" + "L" * 22 + "F"


def test_contradicting_layout_names_both_keys() -> None:
    with pytest.raises(ConfigError, match=r"'layer_types' gives LLLF.*'full_attention_interval' = 3"):
        read_spec(text(full_attention_interval=3))


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (["full_attention"], "24 entries, as num_hidden_layers says, not 1"),
        (["sliding_attention"] * 24, "linear_attention, mamba, full_attention"),
        ([["full_attention"]] * 24, "linear_attention, mamba, full_attention"),
        ("LLLF", "linear_attention, mamba, full_attention"),
    ],
)
def test_unusable_layer_types(types: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"'layer_types' is .*{message}"):
        read_spec(text(layer_types=types))


# Dtypes (NP-01)


@pytest.mark.parametrize(
    ("stated", "expected"), [(None, "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")]
)
def test_state_dtype(stated: str | None, expected: str) -> None:
    assert read_spec(text(mamba_ssm_dtype=stated)).state_dtype == expected
    assert read_spec(text(mamba_ssm_dtype=stated), state_dtype="float16").state_dtype == "float16"


def test_unknown_state_dtype() -> None:
    with pytest.raises(ConfigError, match="'mamba_ssm_dtype' is 'float8'; supported: bfloat16"):
        read_spec(text(mamba_ssm_dtype="float8"))


def test_old_spelling_of_dtype_and_both_levels() -> None:
    assert read_spec(text(("dtype",), torch_dtype="float16")).dtype == "float16"
    wrapper = qwen3_5_0_8b() | {"text_config": text(("dtype",)), "dtype": "float16"}
    assert read_spec(wrapper).dtype == "float16"
    with pytest.raises(ConfigError, match="'torch_dtype' is 'float16'.*'bfloat16', as config.json > dtype"):
        read_spec(text(torch_dtype="float16"))


def test_dtype_missing_needs_the_caller() -> None:
    with pytest.raises(ConfigError, match="'dtype' is missing"):
        read_spec(text(("dtype",)))
    assert read_spec(text(("dtype",)), dtype="float32").dtype == "float32"


# Tied embeddings at either level (LD-03)


@pytest.mark.parametrize("nested", [True, False, None])
@pytest.mark.parametrize("root", [True, False, None])
def test_tied_embeddings(root: bool | None, nested: bool | None) -> None:
    config = qwen3_5_0_8b() | {"tie_word_embeddings": root, "text_config": text(tie_word_embeddings=nested)}
    stated = {root, nested} - {None}
    if len(stated) == 2:
        with pytest.raises(
            ConfigError, match=r"'tie_word_embeddings' is .*text_config > tie_word_embeddings"
        ):
            read_spec(config)
    else:
        assert read_spec(config).tie_embeddings == (stated == {True})


def test_tied_embeddings_must_be_a_flag() -> None:
    with pytest.raises(ConfigError, match="'tie_word_embeddings' is 1; supported: True, False"):
        read_spec(text(tie_word_embeddings=1))


# RoPE


def test_partial_rotary_factor_inside_beside_or_missing() -> None:
    def rotary_dim(config: dict[str, Any]) -> int:
        mixer = read_spec(config).layers[3].mixer
        assert isinstance(mixer, FullAttention)
        return mixer.rotary_dim

    assert rotary_dim(rope(partial_rotary_factor=0.5)) == 128
    assert rotary_dim(rope() | {"partial_rotary_factor": 0.125}) == 32
    assert rotary_dim(rope()) == 64
    with pytest.raises(
        ConfigError, match=r"'partial_rotary_factor' is 0\.5; supported: 0\.125, as config\.json"
    ):
        read_spec(rope(partial_rotary_factor=0.5) | {"partial_rotary_factor": 0.125})
    # transformers 5.17 saves its default beside whatever stands inside.
    assert rotary_dim(rope(partial_rotary_factor=0.5) | {"partial_rotary_factor": 0.25}) == 128
    for wrong in (1.5, 0.001, 3 / 256, "half"):
        with pytest.raises(ConfigError, match="'partial_rotary_factor' is"):
            read_spec(rope(partial_rotary_factor=wrong))


def test_old_and_new_spelling_of_yarn_agree() -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 262144}
    new = rope(rope_type="yarn", **yarn)
    old = text(("rope_parameters",), rope_theta=1e6, rope_scaling={"type": "yarn", **yarn})
    assert read_spec(new) == read_spec(old)
    spec = read_spec(new)
    assert (spec.rope.kind, spec.rope.factor, spec.rope.original_max_position) == ("yarn", 4.0, 262144)
    assert spec.max_position == 4 * 262144


def test_yarn_with_all_its_keys() -> None:
    keys = {
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.2,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    }
    config = rope(rope_type="yarn", factor=2, original_max_position_embeddings=1000, truncate=False, **keys)
    read = read_spec(config).rope
    assert {key: getattr(read, key) for key in keys} == keys
    assert not read.truncate
    assert read_spec(config).max_position == 262144


def test_yarn_takes_the_models_length_as_original() -> None:
    spec = read_spec(rope(rope_type="yarn", factor=2.0))
    assert (spec.rope.original_max_position, spec.max_position) == (262144, 2 * 262144)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "llama3"}, "'rope_type' is 'llama3'; supported: default, yarn"),
        ({"type": "mrope"}, "'type' is 'mrope'; supported: default, yarn"),
        ({"rope_type": "yarn", "type": "default"}, "'type' is 'default'; supported: 'yarn'"),
        ({"rope_type": "yarn"}, "'factor' is missing"),
        ({"rope_type": "yarn", "factor": 0.5}, "'factor' is 0.5; supported: a number of at least 1"),
        ({"rope_type": "yarn", "factor": 2, "short_factor": [1]}, "unknown key 'short_factor'"),
        ({"factor": 2.0}, "unknown key 'factor' with value 2.0"),
        ({"rope_theta": None}, "'rope_theta' is missing"),
        ({"rope_theta": 0}, "'rope_theta' is 0; supported: a positive number"),
    ],
)
def test_unusable_rope(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_spec(rope(**parameters))


def test_rope_values_given_twice_must_agree() -> None:
    assert read_spec(rope() | {"rope_theta": 1e6}) == read_spec(rope())
    with pytest.raises(
        ConfigError, match=r"'rope_theta' is 1000000\.0; supported: 10000\.0, as config\.json"
    ):
        read_spec(rope() | {"rope_theta": 1e4})
    with pytest.raises(ConfigError, match="'rope_scaling' is .*one of rope_parameters and rope_scaling"):
        read_spec(rope() | {"rope_scaling": {"type": "yarn", "factor": 2.0}})


# MTP


@pytest.mark.parametrize("key", ["mtp_num_hidden_layers", "num_mtp_layers", "num_nextn_predict_layers"])
def test_mtp_layers(key: str) -> None:
    config = text(("mtp_num_hidden_layers",))
    assert read_spec(config).mtp_layers == ()
    assert len(read_spec(config | {key: 1, "mtp_layer_types": ["full_attention"]}).mtp_layers) == 1


def test_mtp_contradictions() -> None:
    with pytest.raises(ConfigError, match=r"'mtp_num_hidden_layers': 1, 'num_mtp_layers': 2} contradict"):
        read_spec(text(num_mtp_layers=2))
    with pytest.raises(ConfigError, match="'mtp_layer_types' is"):
        read_spec(text(mtp_layer_types=["linear_attention"]))


# Keys that are missing, unknown or beyond what the model code covers


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    ],
)
def test_missing_key_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key!r} is missing; supported: "):
        read_spec(text((key,)))
    with pytest.raises(ConfigError, match=f"text_config: {key!r} is missing; supported: "):
        read_spec({"model_type": "qwen3_5", "text_config": text((key,))})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "'hidden_size' is 0; supported: an integer of at least 1"),
        ({"hidden_size": True}, "'hidden_size' is True"),
        ({"num_hidden_layers": "24"}, "'num_hidden_layers' is '24'"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000; supported: at most 10,000"),
        ({"head_dim": 25.6}, r"'head_dim' is 25\.6"),
        ({"rms_norm_eps": -1}, "'rms_norm_eps' is -1"),
        (
            {"num_key_value_heads": 3},
            r"'num_attention_heads' is 8; supported: a multiple of num_key_value_heads",
        ),
        ({"linear_num_key_heads": 5}, r"'linear_num_value_heads' is 16; .*linear_num_key_heads \(5\)"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'; supported: silu"),
        ({"attention_bias": True}, "'attention_bias' is True; supported: False"),
        ({"attn_output_gate": "yes"}, "'attn_output_gate' is 'yes'; supported: true or false"),
        ({"output_gate_type": "sigmoid"}, "'output_gate_type' is 'sigmoid'; supported: 'swish' or 'silu'"),
        ({"mtp_use_dedicated_embeddings": True}, "'mtp_use_dedicated_embeddings' is True"),
        ({"quantization_config": {"quant_method": "awq"}}, "'quantization_config' is .*supported: FP8"),
        ({"sliding_window_size": 128}, "unknown key 'sliding_window_size' with value 128"),
        ({"num_experts": 8}, "unknown key 'num_experts' with value 8"),
    ],
)
def test_unusable_value_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_spec(text(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_experts_per_tok": 257},
            r"'num_experts_per_tok' is 257; supported: at most num_experts \(256\)",
        ),
        ({"norm_topk_prob": False}, "'norm_topk_prob' is False; supported: True"),
        ({"mlp_only_layers": [0]}, r"'mlp_only_layers' is \[0\]"),
        ({"moe_intermediate_size": None}, "'moe_intermediate_size' is missing"),
        ({"shared_expert_intermediate_size": None}, "'shared_expert_intermediate_size' is missing"),
    ],
)
def test_unusable_moe_value_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_spec(qwen3_5_35b_a3b_text() | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "'text_config' is missing; supported: an object"),
        (
            {"text_config": text(model_type="qwen3_5_moe_text")},
            "'model_type' is 'qwen3_5_moe_text'; supported",
        ),
        ({"quantization_config": {"bits": 4}}, "config.json: 'quantization_config' is"),
        ({"audio_config": {}}, "config.json: unknown key 'audio_config'"),
    ],
)
def test_unusable_wrapper(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_spec(qwen3_5_0_8b() | changes)


def test_ungated_attention_is_described_as_such() -> None:
    mixer = read_spec(text(attn_output_gate=False)).layers[3].mixer
    assert isinstance(mixer, FullAttention)
    assert not mixer.gated


def test_private_and_tool_keys_are_let_through() -> None:
    assert read_spec(text(_name_or_path="x", unsloth_fixed=True)) == read_spec(text())


def test_what_transformers_saves_can_be_read(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3_5TextConfig(num_hidden_layers=4, tie_word_embeddings=True)
    config.save_pretrained(tmp_path)
    spec = read_spec(tmp_path, dtype="float32")
    assert (spec.pattern, spec.hidden_size, spec.tie_embeddings) == ("LLLF", 4096, True)
    moe = transformers.Qwen3_5MoeConfig(text_config={"num_hidden_layers": 8})
    moe.save_pretrained(tmp_path)
    assert read_spec(tmp_path, dtype="float32").pattern == "LLLFLLLF"
