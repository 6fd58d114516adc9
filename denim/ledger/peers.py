"""What other engines' published layout rules give on the same memory.

Owns the rules of vLLM and SGLang, as read in the releases named, and nothing else of those engines. Sizes are
what their allocators hand out; their weights and working memory are taken to be Denim's.
"""

from __future__ import annotations

from dataclasses import dataclass

from denim.ledger.cost import ledger_of
from denim.ledger.lengths import Lengths
from denim.spec.linear import KimiDelta, Mamba2
from denim.spec.mixers import DTYPE_BYTES
from denim.spec.model import Layer, ModelSpec
from denim.spec.parallel import Parallel

VLLM, SGLANG = "vLLM 0.33.0", "SGLang 0.5.23"

VLLM_ALIGNMENT = 64
"""Tokens that an attention block is a multiple of: what the largest of the usual kernels asks for; others
ask for 16 or 32."""
VLLM_PLAIN_BLOCK = 16  # tokens, of a model without states
VLLM_PAD_UNDER = 1.5
"""A group has as many layers as the larger kind while that is under so many times the smaller."""
VLLM_REPLAYS = (Mamba2, KimiDelta)
"""Rules whose drafts it replays from one state; others keep a state for each."""
SGLANG_RATIO = 0.9  # states : KV, mamba_full_memory_ratio
SGLANG_RESERVED = (4, 5)  # slots a running request: 3, and 1 or 2 by how steps overlap

NOT_SERVED = {VLLM: ("bamba", "minimax"), SGLANG: ("jamba", "minimax")}
"""Families that the release cannot run; the numbers say what its rule would give."""


@dataclass(frozen=True)
class VllmLayout:
    """One pool of equal blocks. A request holds `kv_groups` blocks per `block_tokens` tokens begun, and
    `state_blocks` for its states, `state_sets` of them for each group of linear layers. One
    block of the pool is never handed out. What replaying drafts needs beside the window is not counted."""

    block_tokens: int
    block_bytes: int
    kv_groups: int
    state_blocks: int
    state_sets: int

    @classmethod
    def of(
        cls, spec: ModelSpec, kv_dtype: str = "auto", drafts: int = 0, alignment: int = VLLM_ALIGNMENT
    ) -> VllmLayout:
        """The rule: an attention layer's block is the smallest multiple of `alignment` tokens that is at
        least a linear layer's state; the state is padded to it. Layers are put into groups of one kind and
        equal number, the smaller kind's; every group has the same block, so that a block costs the number of
        layers of a group. With drafts a group of linear layers has a state for each and one more (one in all
        for `VLLM_REPLAYS`), the convolution's window is longer by one column a draft, and the MTP head's
        attention counts."""
        per_element = DTYPE_BYTES[spec.dtype if kv_dtype == "auto" else kv_dtype]
        layers = spec.layers + (spec.mtp_layers if drafts else ())
        kv = [n for layer in layers if (n := layer.mixer.kv_elements() * per_element)]
        states = [n for layer in layers if (n := _state_bytes(layer, spec, drafts))]
        if not states:
            return cls(VLLM_PLAIN_BLOCK, VLLM_PLAIN_BLOCK * sum(kv), 1, 0, 0)
        sets = 1 if all(_replayed(layer) for layer in layers) else 1 + drafts
        if not kv:
            return cls(1, len(states) * max(states), 0, sets, sets)
        tokens = alignment * -(-max(states) // (alignment * max(kv)))
        smaller, larger = sorted((len(kv), len(states)))
        group = larger if larger < VLLM_PAD_UNDER * smaller else smaller
        kv_groups, state_groups = -(-len(kv) // group), -(-len(states) // group)
        return cls(tokens, group * tokens * max(kv), kv_groups, state_groups * sets, sets)

    def request_bytes(self, tokens: int) -> int:
        """What a request of `tokens` tokens holds."""
        return self.block_bytes * (self.kv_groups * -(-tokens // self.block_tokens) + self.state_blocks)

    def requests(self, memory_bytes: int, lengths: Lengths) -> int:
        """How many requests of these lengths are in memory at once."""
        blocks = max(0, memory_bytes // self.block_bytes - 1)
        return int(blocks / (self.kv_groups * lengths.mean_blocks(self.block_tokens) + self.state_blocks))


@dataclass(frozen=True)
class SglangLayout:
    """Two pools, divided once: states to KV as `SGLANG_RATIO` to 1. The state pool serves as many requests as
    it has slots for at `reserved` slots each, and one state more for every draft."""

    state_bytes: int
    kv_bytes_per_token: int
    reserved: int
    drafts: int

    @classmethod
    def of(cls, spec: ModelSpec, kv_dtype: str, drafts: int, reserved: int) -> SglangLayout:
        ledger = ledger_of(spec, kv_dtype)
        mtp = ledger.mtp_kv_bytes_per_token if drafts else 0
        return cls(ledger.bytes_per_request, ledger.kv_bytes_per_token + mtp, reserved, drafts)

    def request_bytes(self, tokens: int) -> int:
        """What is set aside for a request of `tokens` tokens: its reserved slots and its KV."""
        return (self.reserved + self.drafts) * self.state_bytes + tokens * self.kv_bytes_per_token

    def pools(self, memory_bytes: int) -> tuple[float, float]:
        """Bytes of the pool of states and of that of KV. A model that has only one of them has one pool."""
        if not (self.state_bytes and self.kv_bytes_per_token):
            return (memory_bytes, 0) if self.state_bytes else (0, memory_bytes)
        states = memory_bytes * SGLANG_RATIO / (1 + SGLANG_RATIO)
        return states, memory_bytes - states

    def requests(self, memory_bytes: int, lengths: Lengths) -> int:
        """How many requests of these lengths run at once, by the pool that is exhausted first."""
        states, kv = self.pools(memory_bytes)
        limits = []
        if self.state_bytes:
            limits.append(int(states / ((self.reserved + self.drafts) * self.state_bytes)))
        if self.kv_bytes_per_token:
            limits.append(int(kv / (lengths.mean_tokens * self.kv_bytes_per_token)))
        return min(limits)


def _replayed(layer: Layer) -> bool:
    """Whether drafts take no state of this layer: it has none, or its rule is one that vLLM replays."""
    mixer = layer.mixer
    linear = mixer.linear if isinstance(mixer, Parallel) else mixer
    return isinstance(linear, VLLM_REPLAYS) or not linear.state_tensors("float32", "float32")


def _state_bytes(layer: Layer, spec: ModelSpec, drafts: int) -> int:
    """One layer's state, its window longer by `drafts` columns."""
    size = 0
    for tensor in layer.mixer.state_tensors(spec.state_dtype, spec.dtype):
        size += tensor.bytes
        if tensor.role == "conv" and tensor.shape[0]:
            size += drafts * tensor.shape[1] * DTYPE_BYTES[tensor.dtype]
    return size
