"""Keys that Qwen3.5 and Qwen3-Next configs have in common.

Owns how their two mixers, the pattern of layers, the experts and the count of MTP layers are read. Knows
nothing of what differs between the two.
"""

from __future__ import annotations

from denim.errors import ConfigError
from denim.spec.attention import FullAttention
from denim.spec.ffn import MoEFFN
from denim.spec.fields import Fields
from denim.spec.linear import GatedDeltaNet
from denim.spec.standard_keys import (
    ANY_LAYER_LETTERS,
    read_expert_counts,
    read_head_counts,
    read_layer_types,
)

DEFAULT_INTERVAL = 4
DEFAULT_PARTIAL_ROTARY = 0.25
# Vendors' key, transformers' key, and the one that tools took over from other families.
MTP_COUNT_KEYS = ("mtp_num_hidden_layers", "num_mtp_layers", "num_nextn_predict_layers")


def read_attention(fields: Fields, head_dim: int, rotary_dim: int) -> FullAttention:
    fields.positive_int("num_key_value_heads")  # has no default here
    heads, kv_heads = read_head_counts(fields)
    gated = fields.flag("attn_output_gate", default=True)
    return FullAttention(heads, kv_heads, head_dim, rotary_dim, gated=gated, qk_norm=True)


def read_gated_delta_net(fields: Fields) -> GatedDeltaNet:
    value_heads = fields.positive_int("linear_num_value_heads")
    key_heads = fields.positive_int("linear_num_key_heads")
    if value_heads % key_heads:
        raise fields.error("linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})")
    return GatedDeltaNet(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=fields.positive_int("linear_key_head_dim"),
        value_dim=fields.positive_int("linear_value_head_dim"),
        conv_width=fields.positive_int("linear_conv_kernel_dim"),
    )


def read_moe(fields: Fields) -> MoEFFN:
    """Softmax over all experts, and a shared expert behind a sigmoid gate."""
    experts, top_k = read_expert_counts(fields, "num_experts")
    return MoEFFN(
        num_experts=experts,
        top_k=top_k,
        intermediate=fields.positive_int("moe_intermediate_size"),
        shared_intermediate=fields.positive_int("shared_expert_intermediate_size"),
    )


def read_pattern(fields: Fields) -> str:
    """One letter a layer, from layer_types, from full_attention_interval, or from both if they agree."""
    count = fields.layer_count()
    interval = fields.positive_int("full_attention_interval", default=DEFAULT_INTERVAL)
    regular = "".join("L" if (i + 1) % interval else "F" for i in range(count))
    if "layer_types" not in fields:
        return regular
    pattern = read_layer_types(fields, "layer_types", ANY_LAYER_LETTERS, count)
    if "full_attention_interval" in fields and pattern != regular:
        raise ConfigError(
            f"{fields.where}: 'layer_types' gives {pattern}, but 'full_attention_interval' = {interval} "
            f"gives {regular}; correct one of them or delete it"
        )
    return pattern


def read_mtp_count(fields: Fields, default: int = 0) -> int:
    """Layers of the MTP head; `default` where no key counts them."""
    counts = {key: fields.integer(key) for key in MTP_COUNT_KEYS if key in fields}
    fields.ignore(*MTP_COUNT_KEYS)
    if len(set(counts.values())) > 1:
        raise ConfigError(
            f"{fields.where}: {counts} contradict each other; they count the same MTP layers: keep one"
        )
    count = max(counts.values(), default=default)
    fields.demand("mtp_layer_types", [["full_attention"] * count])
    return count
