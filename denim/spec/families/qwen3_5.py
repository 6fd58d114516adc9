"""Readers of Qwen3.5 and Qwen3.5-MoE configs, text-only or inside the vision-language wrapper.

Owns what these families' keys mean and which values Denim's model code covers. Knows nothing of files.

Defaults, all of them transformers' own: full_attention_interval 4, partial_rotary_factor 0.25,
tie_word_embeddings false, no MTP layers. Vendors' own: attn_output_gate true, mamba_ssm_dtype float32.
Every other key that describes the model must be there.
"""

from __future__ import annotations

from typing import Any

from denim.spec.ffn import FFN, DenseFFN
from denim.spec.fields import Fields
from denim.spec.mixers import Mixer
from denim.spec.model import Layer, ModelSpec
from denim.spec.quantisation import read_weight_blocks
from denim.spec.qwen_keys import (
    DEFAULT_PARTIAL_ROTARY,
    read_attention,
    read_gated_delta_net,
    read_moe,
    read_mtp_count,
    read_pattern,
)
from denim.spec.rope import read_rope
from denim.spec.standard_keys import DTYPES


def read_text(fields: Fields, dtype: str, state_dtype: str) -> ModelSpec:
    """The spec of a `qwen3_5_text` or `qwen3_5_moe_text` config."""
    family = str(fields.get("model_type")).removesuffix("_text")
    return _read(fields, family, dtype, state_dtype)


def read_wrapper(root: Fields, dtype: str, state_dtype: str) -> ModelSpec:
    """The spec of the language model inside a `qwen3_5` or `qwen3_5_moe` config.

    The vision tower is not read. What stands at both levels (dtype, tie_word_embeddings) must agree.
    """
    family = str(root.get("model_type"))
    text = root.section("text_config")
    text.choice("model_type", [f"{family}_text"], default=f"{family}_text")
    root.ignore("vision_config", "image_token_id", "video_token_id", "vision_start_token_id")
    root.ignore("vision_end_token_id", "language_model_only", "tie_word_embeddings")
    blocks = read_weight_blocks(root)
    root.finish()
    return _read(text, family, dtype, state_dtype, root, blocks)


def _read(
    text: Fields,
    family: str,
    dtype: str,
    state_dtype: str,
    root: Fields | None = None,
    blocks: tuple[int, int] | None = None,
) -> ModelSpec:
    """`root` is the wrapper around `text`, if there is one, and `blocks` what it says of FP8 weights."""
    levels = [text] if root is None else [text, root]
    text.demand("attention_bias", [False])
    text.demand("output_gate_type", ["swish", "silu"])
    text.demand("mtp_use_dedicated_embeddings", [False])
    text.demand("use_sliding_window", [False])
    text.choice("hidden_act", ["silu"])

    head_dim = text.positive_int("head_dim")
    max_position = text.positive_int("max_position_embeddings")
    rope, rotary_dim, max_position = read_rope(text, head_dim, max_position, DEFAULT_PARTIAL_ROTARY)
    attention = read_attention(text, head_dim, rotary_dim)
    mixers: dict[str, Mixer] = {"L": read_gated_delta_net(text), "F": attention}
    ffn = _moe(text) if family == "qwen3_5_moe" else DenseFFN(text.positive_int("intermediate_size"))
    spec = ModelSpec(
        family=family,
        hidden_size=text.positive_int("hidden_size"),
        vocab_size=text.positive_int("vocab_size"),
        layers=tuple(Layer(mixers[letter], ffn) for letter in read_pattern(text)),
        rope=rope,
        norm_eps=text.number("rms_norm_eps"),
        tie_embeddings=bool(_agreed(levels, ("tie_word_embeddings",), (True, False))),
        max_position=max_position,
        dtype=_dtype(levels, dtype),
        state_dtype=_state_dtype(text, state_dtype),
        mtp_layers=(Layer(attention, ffn),) * read_mtp_count(text),
        weight_blocks=read_weight_blocks(text) or blocks,
    )
    text.finish()
    return spec


def _moe(text: Fields) -> FFN:
    text.demand("norm_topk_prob", [True])
    text.demand("mlp_only_layers", [[]])
    text.demand("decoder_sparse_step", [1])
    text.ignore("intermediate_size")  # of dense layers, of which there are none
    return read_moe(text)


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


READERS = {
    "qwen3_5": read_wrapper,
    "qwen3_5_moe": read_wrapper,
    "qwen3_5_text": read_text,
    "qwen3_5_moe_text": read_text,
}
