"""Reader of Jamba configs.

Owns what this family's keys mean and which values Denim's model code covers. Knows nothing of files.

Defaults, all of them transformers' own: attention in one layer of 8 from the 4th on, experts in every second
from the first on, mamba_dt_rank "auto", mamba_d_state 16, mamba_d_conv 4, mamba_expand 2, rms_norm_eps 1e-6.
With one expert all layers are dense.
"""

from __future__ import annotations

from denim.spec.attention import FullAttention
from denim.spec.families.mamba import read_dt_rank
from denim.spec.ffn import FFN, DenseFFN, MoEFFN
from denim.spec.fields import Fields
from denim.spec.linear import Mamba1
from denim.spec.mixers import Mixer
from denim.spec.model import Layer, ModelSpec
from denim.spec.standard_keys import (
    read_dtype,
    read_expert_counts,
    read_head_counts,
    read_head_dim,
    read_state_dtype,
    refuse_quantised,
)


def read_jamba(fields: Fields, dtype: str, state_dtype: str) -> ModelSpec:
    refuse_quantised(fields)
    fields.choice("hidden_act", ["silu"], default="silu")
    fields.demand("mamba_inner_layernorms", [True])
    # Which kernels run, and which logits are kept while prompts are read.
    fields.ignore("use_mamba_kernels", "use_mambapy", "use_associative_scan")
    fields.ignore("num_logits_to_keep", "calc_logits_for_entire_prompt")

    hidden = fields.positive_int("hidden_size")
    count = fields.layer_count()
    heads, kv_heads = read_head_counts(fields)
    mixers: dict[bool, Mixer] = {
        True: FullAttention(heads, kv_heads, read_head_dim(fields, heads), rotary_dim=0),
        False: Mamba1(
            inner=hidden * fields.positive_int("mamba_expand", default=2),
            state_dim=fields.positive_int("mamba_d_state", default=16),
            dt_rank=read_dt_rank(fields, "mamba_dt_rank", hidden),
            conv_width=fields.positive_int("mamba_d_conv", default=4),
            conv_bias=fields.flag("mamba_conv_bias", default=True),
            proj_bias=fields.flag("mamba_proj_bias", default=False),
            inner_norms=True,
        ),
    }
    intermediate = fields.positive_int("intermediate_size")
    experts, top_k = _experts(fields)
    ffns: dict[bool, FFN] = {False: DenseFFN(intermediate)}
    ffns[True] = (
        MoEFFN(experts, top_k, intermediate, renormalise=False) if experts > 1 else DenseFFN(intermediate)
    )
    attends = _regular(fields, "attn_layer", period=8, offset=4, count=count)
    sparse = _regular(fields, "expert_layer", period=2, offset=1, count=count)
    spec = ModelSpec(
        family="jamba",
        hidden_size=hidden,
        vocab_size=fields.positive_int("vocab_size"),
        layers=tuple(Layer(mixers[a], ffns[s]) for a, s in zip(attends, sparse, strict=True)),
        rope=None,
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        max_position=fields.positive_int("max_position_embeddings"),
        dtype=read_dtype(fields, dtype),
        state_dtype=read_state_dtype(state_dtype),
    )
    fields.finish()
    return spec


def _experts(fields: Fields) -> tuple[int, int]:
    """Experts and how many of them a token goes through; with one expert the second number says nothing."""
    if fields.get("num_experts") == 1:
        fields.ignore("num_experts_per_tok")
        return 1, 1
    return read_expert_counts(fields, "num_experts")


def _regular(fields: Fields, kind: str, *, period: int, offset: int, count: int) -> list[bool]:
    """Which layers are of a kind that comes once in `<kind>_period`, first at `<kind>_offset`."""
    period = fields.positive_int(f"{kind}_period", default=period)
    offset = fields.integer(f"{kind}_offset", default=offset)
    if offset >= period:
        raise fields.error(f"{kind}_offset", f"an integer below {kind}_period ({period})")
    return [i % period == offset for i in range(count)]


READERS = {"jamba": read_jamba}
