"""Keys that the configs of Kimi Linear and Ling-3.0 have in common.

Owns the reading of latent attention, of sigmoid-routed experts and of the layers that have them, each key
under the name of the published configs or under that which transformers saves. Knows nothing of what else
the families consist of.
"""

from __future__ import annotations

from denim.spec.attention import LatentAttention
from denim.spec.ffn import FFN, DenseFFN, MoEFFN
from denim.spec.fields import Fields
from denim.spec.standard_keys import read_expert_groups, read_layer_types

# Names of one value: Kimi Linear's (and transformers'), and Ling's.
MAX_POSITION = ("model_max_length", "max_position_embeddings")
TOP_K = ("num_experts_per_token", "num_experts_per_tok")
GROUPS = ("num_expert_group", "n_group")
RENORMALISE = ("moe_renormalize", "norm_topk_prob")
SHARED = ("num_shared_experts", "n_shared_experts")

FFN_LETTERS = {"dense": "D", "sparse": "S"}


def one_of(fields: Fields, names: tuple[str, ...]) -> str:
    """The name that the config uses, the first if it uses none. Two that disagree are an error."""
    used = [name for name in names if name in fields]
    for other in used[1:]:
        if fields.get(other) != fields.get(used[0]):
            raise fields.error(other, f"{fields.get(used[0])!r}, as {used[0]!r} says, or only one of the two")
    return used[0] if used else names[0]


def read_latent_attention(fields: Fields, *, gated: bool) -> LatentAttention:
    """All heads have keys of their own (made from the latent), so num_key_value_heads is no smaller."""
    heads = fields.positive_int("num_attention_heads")
    fields.demand("num_key_value_heads", [heads])
    fields.demand("attention_bias", [False])
    nope, rope = fields.positive_int("qk_nope_head_dim"), fields.positive_int("qk_rope_head_dim")
    fields.demand("qk_head_dim", [nope + rope])
    return LatentAttention(
        num_heads=heads,
        latent_dim=fields.positive_int("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=fields.positive_int("v_head_dim"),
        query_rank=fields.positive_int("q_lora_rank") if "q_lora_rank" in fields else 0,
        gated=gated,
    )


def read_ffns(fields: Fields, layers: int) -> list[FFN]:
    """Dense layers first, then sparse ones, from first_k_dense_replace, mlp_layer_types, or both alike."""
    fields.choice("hidden_act", ["silu"])
    dense = DenseFFN(fields.positive_int("intermediate_size"))
    sparse = _read_experts(fields)
    first = fields.integer("first_k_dense_replace") if "first_k_dense_replace" in fields else None
    if "mlp_layer_types" in fields:
        kinds = read_layer_types(fields, "mlp_layer_types", FFN_LETTERS, layers)
        if first is not None and kinds != ("D" * first + "S" * layers)[:layers]:
            raise fields.error("first_k_dense_replace", "what mlp_layer_types says, or one of the two keys")
    elif first is None:
        raise fields.error("first_k_dense_replace", "an integer of at least 0, or mlp_layer_types")
    else:
        kinds = ("D" * first + "S" * layers)[:layers]
    return [dense if kind == "D" else sparse for kind in kinds]


def _read_experts(fields: Fields) -> MoEFFN:
    """Routed by sigmoids with a correction bias, which chooses and does not weigh; a shared expert."""
    fields.demand("topk_method", ["noaux_tc"])
    experts = fields.positive_int("num_experts")
    through = one_of(fields, TOP_K)
    groups, best = read_expert_groups(fields, (one_of(fields, GROUPS), "topk_group", through), experts)
    intermediate = fields.positive_int("moe_intermediate_size")
    shared = fields.positive_int("moe_shared_expert_intermediate_size", default=intermediate)
    return MoEFFN(
        num_experts=experts,
        top_k=fields.positive_int(through),
        intermediate=intermediate,
        shared_intermediate=shared * fields.positive_int(one_of(fields, SHARED)),
        scoring="sigmoid",
        renormalise=fields.flag(one_of(fields, RENORMALISE), default=True),
        scale=fields.number("routed_scaling_factor"),
        selection_bias=True,
        groups=groups,
        top_groups=best,
        exact_router=True,
        shared_gate=False,
    )
