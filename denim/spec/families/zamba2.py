"""Reader of Zamba2 configs in transformers' form, and the mixer that only this family has.

Owns what this family's keys mean and which values Denim's model code covers. Knows nothing of files.

Defaults, all of them transformers' own: mamba_d_state 64, mamba_d_conv 4, mamba_expand 2, one group and one
shared block, no RoPE, no adapters of attention, adapter_rank 128, time_step_min 0.001, tied embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from denim.spec.attention import FullAttention
from denim.spec.ffn import NoFFN
from denim.spec.fields import Fields
from denim.spec.linear import Mamba2
from denim.spec.mamba2_keys import read_groups
from denim.spec.mixers import Mixer
from denim.spec.model import Layer, ModelSpec, Rope
from denim.spec.parallel import Parallel
from denim.spec.rope import read_rope
from denim.spec.standard_keys import (
    read_dtype,
    read_head_counts,
    read_layer_types,
    read_state_dtype,
    refuse_quantised,
)

KINDS = {"mamba": "L", "linear_attention": "L", "hybrid": "P"}


@dataclass(frozen=True)
class SharedAttention(Parallel):
    """A transformer block over [hidden state | embedding] whose output joins the input of a linear mixer
    (arXiv 2411.15242).

    Layers with the same number `block` share the block's weights: attention, and a gated network of
    `intermediate`. Each has adapters of its own of rank `adapter_rank`, on the network, and on q, k and v too
    with `attention_adapters`. `first`: no layer before has this block, so that its weights count here.
    """

    intermediate: int
    adapter_rank: int
    attention_adapters: bool
    block: int
    first: bool

    @property
    def query_rows(self) -> int:
        return self.attention.num_heads * self.attention.head_dim

    @property
    def kv_rows(self) -> int:
        return self.attention.num_kv_heads * self.attention.head_dim

    def projection_parameters(self, hidden: int) -> int:
        """The block's too, since every layer multiplies with them."""
        own = self._adapters(hidden) + hidden * hidden
        return self._block(hidden) + own + self.linear.projection_parameters(hidden)

    def parameters(self, hidden: int) -> int:
        block = self._block(hidden) + 3 * hidden if self.first else 0  # with two norms
        return block + self._adapters(hidden) + hidden * hidden + self.linear.parameters(hidden)

    def _block(self, hidden: int) -> int:
        attention = 2 * hidden * (self.query_rows + 2 * self.kv_rows) + self.query_rows * hidden
        return attention + 3 * hidden * self.intermediate

    def _adapters(self, hidden: int) -> int:
        widths = hidden + 2 * self.intermediate
        if self.attention_adapters:
            widths += 6 * hidden + self.query_rows + 2 * self.kv_rows
        return self.adapter_rank * widths


@dataclass(frozen=True)
class Zamba2Details:
    time_step_limit: tuple[float, float]


def read(fields: Fields, dtype: str, state_dtype: str) -> ModelSpec:
    _refuse(fields)
    # How weights begin before training, which kernels run, what derives from other keys and is read nowhere.
    fields.ignore("time_step_max", "time_step_floor", "time_step_limit", "use_mamba_kernels")
    fields.ignore("use_mem_eff_path", "chunk_size", "num_logits_to_keep", "kv_channels", "num_query_groups")

    hidden = fields.positive_int("hidden_size")
    attention, rope, max_position = _attention(fields, hidden)
    linear = _mamba2(fields, hidden)
    intermediate = fields.positive_int("intermediate_size", default=4 * hidden)
    rank = fields.positive_int("adapter_rank", default=128)
    blocks = fields.positive_int("num_mem_blocks", default=1)
    adapters = fields.flag("use_shared_attention_adapter", default=False)
    if adapters and attention.num_kv_heads != attention.num_heads:
        raise fields.error(
            "num_key_value_heads", "as many as num_attention_heads, where attention has adapters"
        )
    pattern = read_layer_types(fields, "layers_block_type", KINDS, fields.layer_count())
    fields.demand("hybrid_layer_ids", [[i for i, kind in enumerate(pattern) if kind == "P"]])
    layers = []
    for i, kind in enumerate(pattern):
        mixer: Mixer = linear
        if kind == "P":
            before = pattern[:i].count("P")
            mixer = SharedAttention(
                attention, linear, intermediate, rank, adapters, before % blocks, first=before < blocks
            )
        layers.append(Layer(mixer, NoFFN()))
    spec = ModelSpec(
        family="zamba2",
        hidden_size=hidden,
        vocab_size=fields.positive_int("vocab_size"),
        layers=tuple(layers),
        rope=rope,
        norm_eps=fields.number("rms_norm_eps", default=1e-5),
        tie_embeddings=fields.flag("tie_word_embeddings", default=True),
        max_position=max_position,
        dtype=read_dtype(fields, dtype),
        state_dtype=read_state_dtype(state_dtype),
        details=Zamba2Details((fields.number("time_step_min", default=0.001), inf)),
    )
    fields.finish()
    return spec


def _refuse(fields: Fields) -> None:
    refuse_quantised(fields)
    if "conv_dimension" in fields:
        raise fields.error(
            "conv_dimension",
            "checkpoints in transformers' form, which say mamba_d_conv; this one is of the vendor's code",
        )
    fields.demand("add_bias_linear", [False])
    fields.demand("use_conv_bias", [True])
    fields.demand("use_long_context", [False])
    fields.choice("hidden_act", ["gelu"], default="gelu")


def _attention(fields: Fields, hidden: int) -> tuple[FullAttention, Rope | None, int]:
    """The geometry over twice the hidden size, RoPE if there is one, the longest sequence."""
    heads, kv_heads = read_head_counts(fields)
    if 2 * hidden % heads:
        raise fields.error("num_attention_heads", f"a divisor of twice the hidden size ({2 * hidden})")
    head_dim = 2 * hidden // heads
    for key in ("attention_head_dim", "head_dim"):
        fields.demand(key, [head_dim])
    fields.demand("attention_hidden_size", [2 * hidden])
    max_position = fields.positive_int("max_position_embeddings")
    rope, rotary_dim = None, 0
    if fields.flag("use_mem_rope", default=False):
        rope, rotary_dim, max_position = read_rope(fields, head_dim, max_position, 1.0)
    else:
        fields.ignore("rope_theta", "rope_parameters", "rope_scaling")
    return FullAttention(heads, kv_heads, head_dim, rotary_dim), rope, max_position


def _mamba2(fields: Fields, hidden: int) -> Mamba2:
    inner = fields.positive_int("mamba_expand", default=2) * hidden
    heads = fields.positive_int("n_mamba_heads")
    if inner % heads:
        raise fields.error("n_mamba_heads", f"a divisor of the inner width ({inner})")
    fields.demand("mamba_headdim", [inner // heads])
    return Mamba2(
        num_heads=heads,
        head_dim=inner // heads,
        state_dim=fields.positive_int("mamba_d_state", default=64),
        num_groups=read_groups(fields, "mamba_ngroups", heads, 1),
        conv_width=fields.positive_int("mamba_d_conv", default=4),
    )


READERS = {"zamba2": read}
