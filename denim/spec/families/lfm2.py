"""Reader of LFM2 configs: gated short convolutions with grouped-query attention between them.

Owns what the family's keys mean and which values Denim's model code covers. Knows nothing of files.

Vendors write `full_attn_idxs`, `block_ff_dim` and `tie_embedding`; transformers writes `layer_types`,
`intermediate_size` and `tie_word_embeddings`. `block_ff_dim` wins over `intermediate_size`, as it does there.

Defaults, all of them transformers' own: embeddings tied, convolution of width 3 without bias, the inner
width of the feed-forward network adjusted to multiples of 256.
"""

from __future__ import annotations

from collections.abc import Callable

from denim.errors import ConfigError
from denim.spec.attention import FullAttention
from denim.spec.ffn import FFN, DenseFFN
from denim.spec.fields import Fields
from denim.spec.linear import ShortConv
from denim.spec.mixers import Mixer
from denim.spec.model import Layer, ModelSpec
from denim.spec.rope import read_rope
from denim.spec.standard_keys import (
    read_dtype,
    read_head_counts,
    read_head_dim,
    read_layer_types,
    read_state_dtype,
    refuse_quantised,
)

DEFAULT_WIDTH = 3
DEFAULT_MULTIPLE = 256
DEFAULT_MULTIPLIER = 1.0
WIDTH_KEYS = (
    "block_ff_dim",
    "intermediate_size",
    "block_auto_adjust_ff_dim",
    "block_ffn_dim_multiplier",
    "block_multiple_of",
)
LAYER_LETTERS = {"conv": "C", "full_attention": "F"}

# How the vendor's trainer began; none of it moves a trained model's output.
TRAINING_KEYS = (
    "block_mlp_init_scale",
    "block_norm_eps",
    "block_out_init_scale",
    "block_use_xavier_init",
    "conv_use_xavier_init",
)


def read(fields: Fields, dtype: str, state_dtype: str) -> ModelSpec:
    """The spec of an `lfm2` config."""
    return read_stack(fields, dtype, state_dtype, _ffns)


def read_stack(
    fields: Fields,
    dtype: str,
    state_dtype: str,
    ffns: Callable[[Fields, int], list[FFN]],
) -> ModelSpec:
    """The spec of any config of this kind; `ffns(fields, layers)` reads what follows each layer's mixer."""
    refuse_quantised(fields)
    fields.ignore(*TRAINING_KEYS)
    hidden = fields.positive_int("hidden_size")
    heads, kv_heads = read_head_counts(fields)
    for key in ("block_dim", "conv_dim", "conv_dim_out"):
        fields.demand(key, [hidden])
    fields.demand("num_heads", [heads])
    fields.demand("block_use_swiglu", [True])
    fields.demand("use_pos_enc", [True])

    head_dim = read_head_dim(fields, heads)
    rope, rotary_dim, max_position = read_rope(
        fields, head_dim, fields.positive_int("max_position_embeddings")
    )
    fields.demand("theta", [rope.theta])
    mixers: dict[str, Mixer] = {
        "F": FullAttention(heads, kv_heads, head_dim, rotary_dim, qk_norm=True),
        "C": ShortConv(
            channels=hidden,
            conv_width=fields.integer("conv_L_cache", default=DEFAULT_WIDTH, least=2),
            bias=fields.flag("conv_bias", default=False),
        ),
    }
    pattern = _pattern(fields)
    spec = ModelSpec(
        family=str(fields.get("model_type")),
        hidden_size=hidden,
        vocab_size=fields.positive_int("vocab_size"),
        layers=tuple(
            Layer(mixers[letter], ffn)
            for letter, ffn in zip(pattern, ffns(fields, len(pattern)), strict=True)
        ),
        rope=rope,
        norm_eps=fields.number("norm_eps"),
        tie_embeddings=_tied(fields),
        max_position=max_position,
        dtype=read_dtype(fields, dtype),
        state_dtype=read_state_dtype(state_dtype),
    )
    fields.finish()
    return spec


def _ffns(fields: Fields, count: int) -> list[FFN]:
    return [DenseFFN(_inner_width(fields))] * count


def _inner_width(fields: Fields) -> int:
    """Two thirds of the stated width (SwiGLU has three matrices), times a factor, rounded up to a multiple.

    A factor of null leaves out the rounding too; only `raw` tells it from a missing key.
    """
    fields.ignore(*WIDTH_KEYS)
    width = fields.positive_int("block_ff_dim" if "block_ff_dim" in fields else "intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return width
    width = int(2 * width / 3)
    if fields.raw.get("block_ffn_dim_multiplier", DEFAULT_MULTIPLIER) is None:
        return width
    width = int(fields.number("block_ffn_dim_multiplier", default=DEFAULT_MULTIPLIER) * width)
    multiple = fields.positive_int("block_multiple_of", default=DEFAULT_MULTIPLE)
    return -(-width // multiple) * multiple


def _pattern(fields: Fields) -> str:
    """One letter a layer, from layer_types, from full_attn_idxs, or from both if they agree."""
    count = fields.layer_count()
    indices = fields.get("full_attn_idxs")
    by_index = None
    if indices is not None:
        if not isinstance(indices, list) or not all(i in range(count) for i in indices):
            raise fields.error("full_attn_idxs", f"a list of layers from 0 to {count - 1}")
        by_index = "".join("F" if i in indices else "C" for i in range(count))
    if "layer_types" not in fields:
        if by_index is None:
            raise fields.error("layer_types", f"a list of {', '.join(LAYER_LETTERS)}, or full_attn_idxs")
        return by_index
    pattern = read_layer_types(fields, "layer_types", LAYER_LETTERS, count)
    if by_index not in (None, pattern):
        raise ConfigError(
            f"{fields.where}: 'layer_types' gives {pattern}, but 'full_attn_idxs' gives {by_index}; correct "
            "one of them or delete it"
        )
    return pattern


def _tied(fields: Fields) -> bool:
    """`tie_embedding` is the vendor's name and wins, as it does in transformers."""
    tied = fields.flag("tie_word_embeddings", default=True)
    return fields.flag("tie_embedding", default=tied)


READERS = {"lfm2": read}
