"""Readers of Qwen3.5 and Qwen3.5-MoE configs, text-only or inside the vision-language wrapper.

Owns what these families' keys mean and which values Denim's model code covers. Knows nothing of files.

Defaults, all of them transformers' own: full_attention_interval 4, partial_rotary_factor 0.25,
tie_word_embeddings false, no MTP layers. Vendors' own: attn_output_gate true, mamba_ssm_dtype float32.
Every other key that describes the model must be there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from denim.errors import ConfigError
from denim.spec.ffn import FFN, DenseFFN, MoEFFN
from denim.spec.fields import Fields
from denim.spec.mixers import FullAttention, GatedDeltaNet, Mixer
from denim.spec.model import Layer, ModelSpec
from denim.spec.rope import read_rope

DTYPES = ("bfloat16", "float16", "float32", "float64")
DEFAULT_INTERVAL = 4
DEFAULT_PARTIAL_ROTARY = 0.25

# transformers 5.24 renamed the values; both spellings are in the wild.
LAYER_LETTERS = {
    "linear_attention": "L",
    "mamba": "L",
    "full_attention": "F",
    "attention": "F",
}
# Vendors' key, transformers' key, and the one that tools took over from other families.
MTP_COUNT_KEYS = ("mtp_num_hidden_layers", "num_mtp_layers", "num_nextn_predict_layers")


def read_text(config: Mapping[str, Any], dtype: str, state_dtype: str) -> ModelSpec:
    """The spec of a `qwen3_5_text` or `qwen3_5_moe_text` config."""
    family = str(config["model_type"]).removesuffix("_text")
    fields = Fields(config, "config.json")
    return _read(fields, family, dtype, state_dtype)


def read_wrapper(config: Mapping[str, Any], dtype: str, state_dtype: str) -> ModelSpec:
    """The spec of the language model inside a `qwen3_5` or `qwen3_5_moe` config.

    The vision tower is not read. What stands at both levels (dtype, tie_word_embeddings) must agree.
    """
    family = str(config["model_type"])
    root = Fields(config, "config.json")
    text = root.section("text_config")
    text.choice("model_type", [f"{family}_text"], default=f"{family}_text")
    root.ignore("vision_config", "image_token_id", "video_token_id", "vision_start_token_id")
    root.ignore("vision_end_token_id", "language_model_only", "tie_word_embeddings")
    _refuse_quantised(root)
    root.finish()
    return _read(text, family, dtype, state_dtype, root)


def _read(text: Fields, family: str, dtype: str, state_dtype: str, root: Fields | None = None) -> ModelSpec:
    """`root` is the wrapper around `text`, if there is one."""
    levels = [text] if root is None else [text, root]
    _refuse_quantised(text)
    text.demand("attention_bias", [False])
    text.demand("output_gate_type", ["swish", "silu"])
    text.demand("mtp_use_dedicated_embeddings", [False])
    text.demand("use_sliding_window", [False])
    text.choice("hidden_act", ["silu"])

    head_dim = text.positive_int("head_dim")
    max_position = text.positive_int("max_position_embeddings")
    rope, rotary_dim, max_position = read_rope(text, head_dim, max_position, DEFAULT_PARTIAL_ROTARY)
    attention = _attention(text, head_dim, rotary_dim)
    mixers: dict[str, Mixer] = {"L": _linear_attention(text), "F": attention}
    ffn = _moe(text) if family == "qwen3_5_moe" else DenseFFN(text.positive_int("intermediate_size"))
    spec = ModelSpec(
        family=family,
        hidden_size=text.positive_int("hidden_size"),
        vocab_size=text.positive_int("vocab_size"),
        layers=tuple(Layer(mixers[letter], ffn) for letter in _pattern(text)),
        rope=rope,
        norm_eps=text.number("rms_norm_eps"),
        tie_embeddings=bool(_agreed(levels, ("tie_word_embeddings",), (True, False))),
        max_position=max_position,
        dtype=_dtype(levels, dtype),
        state_dtype=_state_dtype(text, state_dtype),
        mtp_layers=(Layer(attention, ffn),) * _mtp_count(text),
    )
    text.finish()
    return spec


def _attention(text: Fields, head_dim: int, rotary_dim: int) -> FullAttention:
    heads, kv_heads = _divisible(text, "num_attention_heads", "num_key_value_heads")
    gated = text.flag("attn_output_gate", default=True)
    return FullAttention(heads, kv_heads, head_dim, rotary_dim, gated=gated, qk_norm=True)


def _linear_attention(text: Fields) -> GatedDeltaNet:
    value_heads, key_heads = _divisible(text, "linear_num_value_heads", "linear_num_key_heads")
    return GatedDeltaNet(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=text.positive_int("linear_key_head_dim"),
        value_dim=text.positive_int("linear_value_head_dim"),
        conv_width=text.positive_int("linear_conv_kernel_dim"),
    )


def _divisible(text: Fields, many: str, few: str) -> tuple[int, int]:
    """Two head counts, the first a multiple of the second."""
    counts = text.positive_int(many), text.positive_int(few)
    if counts[0] % counts[1]:
        raise text.error(many, f"a multiple of {few} ({counts[1]})")
    return counts


def _moe(text: Fields) -> FFN:
    text.demand("norm_topk_prob", [True])
    text.demand("mlp_only_layers", [[]])
    text.demand("decoder_sparse_step", [1])
    text.ignore("intermediate_size")  # of dense layers, of which there are none
    experts, top_k = text.positive_int("num_experts"), text.positive_int("num_experts_per_tok")
    if top_k > experts:
        raise text.error("num_experts_per_tok", f"at most num_experts ({experts})")
    return MoEFFN(
        num_experts=experts,
        top_k=top_k,
        intermediate=text.positive_int("moe_intermediate_size"),
        shared_intermediate=text.positive_int("shared_expert_intermediate_size"),
    )


def _pattern(text: Fields) -> str:
    """One letter a layer, from layer_types, from full_attention_interval, or from both if they agree."""
    count = text.positive_int("num_hidden_layers")
    interval = text.positive_int("full_attention_interval", default=DEFAULT_INTERVAL)
    regular = "".join("L" if (i + 1) % interval else "F" for i in range(count))
    types = text.get("layer_types")
    if types is None:
        return regular
    if not isinstance(types, list) or not all(kind in list(LAYER_LETTERS) for kind in types):
        raise text.error("layer_types", f"a list of {', '.join(LAYER_LETTERS)}")
    pattern = "".join(LAYER_LETTERS[kind] for kind in types)
    if len(pattern) != count:
        raise text.error("layer_types", f"{count} entries, as num_hidden_layers says, not {len(pattern)}")
    if "full_attention_interval" in text and pattern != regular:
        raise ConfigError(
            f"{text.where}: 'layer_types' gives {pattern}, but 'full_attention_interval' = {interval} gives "
            f"{regular}; correct one of them or delete it"
        )
    return pattern


def _mtp_count(text: Fields) -> int:
    counts = {key: text.integer(key) for key in MTP_COUNT_KEYS if key in text}
    text.ignore(*MTP_COUNT_KEYS)
    if len(set(counts.values())) > 1:
        raise ConfigError(f"{text.where}: {counts} contradict each other; they count the same MTP layers")
    count = max(counts.values(), default=0)
    text.demand("mtp_layer_types", [["full_attention"] * count])
    return count


def _agreed(levels: list[Fields], keys: tuple[str, ...], supported: tuple[str | bool, ...]) -> Any:
    """The one value that `keys` have wherever they stand, None if nowhere. Contradiction is an error."""
    stated = [(level, key) for level in levels for key in keys if key in level]
    values = [level.get(key) for level, key in stated]
    for (level, key), value in zip(stated, values, strict=True):
        if not any(type(value) is type(known) and value == known for known in supported):
            raise level.error(key, ", ".join(str(known) for known in supported))
        if value != values[0]:
            where = f"{stated[0][0].where} > {stated[0][1]}"
            raise level.error(key, f"{values[0]!r}, as {where} says, or the key in one place only")
    return values[0] if values else None


def _dtype(levels: list[Fields], dtype: str) -> str:
    stated = _agreed(levels, ("dtype", "torch_dtype"), DTYPES)
    if dtype == "auto" and stated is None:
        raise levels[-1].error("dtype", f"{', '.join(DTYPES)}; set the key, or give the engine a dtype")
    return str(stated if dtype == "auto" else dtype)


def _state_dtype(text: Fields, state_dtype: str) -> str:
    """float32 unless the config or the user says otherwise: half precision loses accuracy without a sign."""
    stated = text.choice("mamba_ssm_dtype", DTYPES, default="float32")
    return stated if state_dtype == "auto" else state_dtype


def _refuse_quantised(fields: Fields) -> None:
    if fields.get("quantization_config") is not None:
        raise fields.error("quantization_config", "unquantised checkpoints, which have no such key")


READERS = {
    "qwen3_5": read_wrapper,
    "qwen3_5_moe": read_wrapper,
    "qwen3_5_text": read_text,
    "qwen3_5_moe_text": read_text,
}
