"""Keys that mean the same in every family's config.

Owns how dtypes, quantisation, counts of attention heads and experts, and lists of layer types are read.
Knows nothing of families.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from denim.spec.fields import Fields

DTYPES = ("bfloat16", "float16", "float32", "float64")

LAYER_LETTERS: dict[Any, str] = {"linear_attention": "L", "full_attention": "F"}
"""Of `layer_types`: a mixer's letter by its name."""

ANY_LAYER_LETTERS = {"linear_attention": "L", "mamba": "L", "full_attention": "F", "attention": "F"}
"""With the names from before transformers 5.24 too: both are in the wild."""


def read_dtype(fields: Fields, asked: str, default: str | None = None) -> str:
    """`asked`, or for "auto" the config's own; `default` for families whose published configs name none.

    Raises ConfigError if there is none, or one unknown.
    """
    if "dtype" in fields and "torch_dtype" in fields:
        fields.demand("torch_dtype", [fields.get("dtype")])
    key = "dtype" if "dtype" in fields else "torch_dtype"
    if key in fields:
        fields.choice(key, DTYPES)
    elif asked == "auto" and default is None:
        raise fields.error("dtype", f"{', '.join(DTYPES)}; set the key, or give the engine a dtype")
    return str(fields.get(key) or default) if asked == "auto" else asked


def read_state_dtype(asked: str) -> str:
    """float32 unless the user says otherwise: half precision loses accuracy without a sign."""
    return "float32" if asked == "auto" else asked


def refuse_quantised(fields: Fields) -> None:
    if fields.get("quantization_config") is not None:
        raise fields.error(
            "quantization_config",
            "unquantised checkpoints, which have no such key (FP8 in blocks: Qwen3.5 and Qwen3-Next)",
        )


def read_head_counts(fields: Fields) -> tuple[int, int]:
    """Query heads and key-value heads, the first a multiple of the second."""
    heads = fields.positive_int("num_attention_heads")
    kv_heads = fields.positive_int("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise fields.error("num_attention_heads", f"a multiple of num_key_value_heads ({kv_heads})")
    return heads, kv_heads


def read_head_dim(fields: Fields, heads: int) -> int:
    """`head_dim`, or else an equal share of the hidden size."""
    hidden = fields.positive_int("hidden_size")
    if "head_dim" not in fields and hidden % heads:
        raise fields.error(
            "head_dim", f"an integer, since hidden_size {hidden} is no multiple of {heads} heads"
        )
    return fields.positive_int("head_dim", default=hidden // heads)


def read_expert_counts(fields: Fields, many: str) -> tuple[int, int]:
    """Experts, under the key `many`, and how many of them a token goes through."""
    experts, top_k = fields.positive_int(many), fields.positive_int("num_experts_per_tok")
    if top_k > experts:
        raise fields.error("num_experts_per_tok", f"at most {many} ({experts})")
    return experts, top_k


def read_expert_groups(
    fields: Fields, keys: tuple[str, str, str], experts: int, default: int | None = None
) -> tuple[int, int]:
    """Groups of experts, and how many of them a token chooses from. `keys`: of these two, and of the experts
    that a token goes through, which must fit into its groups. A group counts as its two best experts."""
    count, chosen, through = keys
    groups = fields.positive_int(count, default=default)
    best = fields.positive_int(chosen, default=default)
    if experts % groups or (groups > 1 and experts // groups < 2):
        raise fields.error(count, f"equal groups, of 2 or more of the {experts} experts")
    if best > groups:
        raise fields.error(chosen, f"at most the number of groups ({groups})")
    if fields.positive_int(through) > best * (experts // groups):
        raise fields.error(through, f"at most the experts of {best} of {groups} groups")
    return groups, best


def read_layer_types(fields: Fields, key: str, letters: Mapping[Any, str], count: int) -> str:
    """One letter a layer from a list of names or numbers, of which `letters` says the letter."""
    types = fields.get(key)
    known = list(letters)
    if not isinstance(types, list) or not all(kind in known for kind in types):
        raise fields.error(key, f"a list of {', '.join(str(kind) for kind in known)}")
    if len(types) != count:
        raise fields.error(key, f"{count} entries, as num_hidden_layers says, not {len(types)}")
    return "".join(letters[kind] for kind in types)
