"""Reader of LFM2-MoE configs: LFM2 with sparse experts behind the first layers.

Owns what the family's own keys mean; all others are LFM2's. The width of the dense layers is
`intermediate_size` as it stands: LFM2's rule of widths is not used here.

Defaults, all of them transformers' own: 2 dense layers, a bias of the router, weights renormalised, scale 1.
"""

from __future__ import annotations

from denim.spec.families.lfm2 import read_stack
from denim.spec.ffn import FFN, DenseFFN, MoEFFN
from denim.spec.fields import Fields
from denim.spec.model import ModelSpec
from denim.spec.standard_keys import read_expert_counts

DEFAULT_DENSE_LAYERS = 2

# What the published router adds to the sum of the chosen weights.
ROUTER_GUARD = 1e-6


def read(fields: Fields, dtype: str, state_dtype: str) -> ModelSpec:
    """The spec of an `lfm2_moe` config."""
    return read_stack(fields, dtype, state_dtype, _ffns)


def _ffns(fields: Fields, count: int) -> list[FFN]:
    """Dense in the first layers, sparse in all others."""
    experts, top_k = read_expert_counts(fields, "num_experts")
    dense = DenseFFN(fields.positive_int("intermediate_size"))
    sparse = MoEFFN(
        num_experts=experts,
        top_k=top_k,
        intermediate=fields.positive_int("moe_intermediate_size"),
        scoring="sigmoid",
        renormalise=fields.flag("norm_topk_prob", default=True),
        guard=ROUTER_GUARD,
        scale=fields.number("routed_scaling_factor", default=1.0),
        selection_bias=fields.flag("use_expert_bias", default=True),
    )
    first = fields.integer("num_dense_layers", default=DEFAULT_DENSE_LAYERS)
    return [dense if i < first else sparse for i in range(count)]


READERS = {"lfm2_moe": read}
