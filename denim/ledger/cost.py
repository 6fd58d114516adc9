"""What a request costs in memory, hybrid and as if every layer were full attention.

Owns the sums over layers, the crossover and the JSON form. What one layer stores it says itself
(`denim.spec.model`). Sizes are exact bytes of content: how the arena aligns and groups them is its affair.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from denim.errors import ConfigError
from denim.ledger.flops import decode_flops, prefill_flops
from denim.ledger.parameters import count_parameters, weight_bytes
from denim.spec.mixers import DTYPE_BYTES, NoMixer
from denim.spec.model import ModelSpec

LENGTHS = (512, 1024, 4096, 32768, 262144)
"""Lengths that a table shows where nothing else is asked for."""


@dataclass(frozen=True)
class Ledger:
    """Bytes. `conv_bytes` is the convolution window of width - 1 columns, which is all that is needed;
    `conv_bytes_stored_width` that of engines which store `width` columns.

    `all_full_kv_bytes_per_token` is KV per token if every layer were full attention with the model's own
    attention geometry; None for a model without attention. `mtp_kv_bytes_per_token` comes on top of
    `kv_bytes_per_token` when the model's MTP head drafts.
    """

    kv_bytes_per_token: int
    all_full_kv_bytes_per_token: int | None
    mtp_kv_bytes_per_token: int
    state_bytes: int
    conv_bytes: int
    conv_bytes_stored_width: int

    @property
    def bytes_per_request(self) -> int:
        """What a request holds whatever its length."""
        return self.state_bytes + self.conv_bytes

    @property
    def crossover_tokens(self) -> int | None:
        """The length from which the hybrid is the smaller one; None if there is none."""
        return self._crossover(self.bytes_per_request)

    @property
    def crossover_tokens_stored_width(self) -> int | None:
        """The crossover of an engine that stores `width` columns of the convolution."""
        return self._crossover(self.state_bytes + self.conv_bytes_stored_width)

    def _crossover(self, fixed: int) -> int | None:
        """Smallest n with fixed + n · kv ≤ n · all_full."""
        saved = (self.all_full_kv_bytes_per_token or 0) - self.kv_bytes_per_token
        return -(-fixed // saved) if saved > 0 else None

    def hybrid_bytes(self, tokens: int) -> int:
        """A request of `tokens` tokens."""
        return self.bytes_per_request + tokens * self.kv_bytes_per_token

    def all_full_bytes(self, tokens: int) -> int | None:
        """The same request if every layer were full attention."""
        per_token = self.all_full_kv_bytes_per_token
        return None if per_token is None else tokens * per_token

    @property
    def checkpoint_equals_kv_of_tokens(self) -> int | None:
        """Tokens whose KV takes as many bytes as one checkpoint, rounded up; None without KV."""
        kv = self.kv_bytes_per_token
        return -(-self.bytes_per_request // kv) if kv else None

    def checkpoint_ratio(self, tokens: int) -> float | None:
        """Bytes of one checkpoint over those of the KV of `tokens` tokens; None without KV."""
        kv = tokens * self.kv_bytes_per_token
        return self.bytes_per_request / kv if kv else None


def ledger_of(spec: ModelSpec, kv_dtype: str = "auto") -> Ledger:
    """The costs of `spec`; `kv_dtype` "auto" is the model's dtype. Raises ConfigError for an unknown one."""
    kv_dtype = spec.dtype if kv_dtype == "auto" else kv_dtype
    if kv_dtype not in DTYPE_BYTES:
        raise ConfigError(f"kv_dtype is {kv_dtype!r}; supported: auto, {', '.join(DTYPE_BYTES)}")
    per_element = DTYPE_BYTES[kv_dtype]
    mixers = [layer.mixer for layer in spec.layers]
    tensors = [tensor for mixer in mixers for tensor in mixer.state_tensors(spec.state_dtype, spec.dtype)]
    convs = [tensor for tensor in tensors if tensor.role == "conv"]
    kv = [mixer.kv_elements() * per_element for mixer in mixers]
    mixing = sum(not isinstance(mixer, NoMixer) for mixer in mixers)
    return Ledger(
        kv_bytes_per_token=sum(kv),
        all_full_kv_bytes_per_token=mixing * max(kv) if any(kv) else None,
        mtp_kv_bytes_per_token=sum(layer.mixer.kv_elements() for layer in spec.mtp_layers) * per_element,
        state_bytes=sum(tensor.bytes for tensor in tensors if tensor.role == "recurrent"),
        conv_bytes=sum(tensor.bytes for tensor in convs),
        # A window of width - 1 = 0 columns means that there is no convolution.
        conv_bytes_stored_width=sum(t.bytes // t.shape[0] * (t.shape[0] + 1) for t in convs if t.shape[0]),
    )


def ledger_json(spec: ModelSpec, lengths: Iterable[int] = LENGTHS, kv_dtype: str = "auto") -> dict[str, Any]:
    """Everything that the ledger knows, as plain JSON values. Keys stay; more may follow."""
    ledger = ledger_of(spec, kv_dtype)
    return {
        "family": spec.family,
        "layers": spec.pattern,
        "dtype": spec.dtype,
        "kv_dtype": spec.dtype if kv_dtype == "auto" else kv_dtype,
        "state_dtype": spec.state_dtype,
        "parameters": count_parameters(spec).total,
        "weight_bytes": weight_bytes(spec),
        "kv_bytes_per_token": ledger.kv_bytes_per_token,
        "all_full_kv_bytes_per_token": ledger.all_full_kv_bytes_per_token,
        "mtp_kv_bytes_per_token": ledger.mtp_kv_bytes_per_token,
        "state_bytes": ledger.state_bytes,
        "conv_bytes": ledger.conv_bytes,
        "conv_bytes_stored_width": ledger.conv_bytes_stored_width,
        "bytes_per_request": ledger.bytes_per_request,
        "crossover_tokens": ledger.crossover_tokens,
        "crossover_tokens_stored_width": ledger.crossover_tokens_stored_width,
        "lengths": [
            {
                "tokens": tokens,
                "hybrid_bytes": ledger.hybrid_bytes(tokens),
                "all_full_bytes": ledger.all_full_bytes(tokens),
                "checkpoint_ratio": ledger.checkpoint_ratio(tokens),
                "prefill_flops": prefill_flops(spec, tokens),
                "decode_flops": decode_flops(spec, tokens),
            }
            for tokens in lengths
        ],
    }
