"""Who attends over the pages of a step: plain torch, Triton or FlashInfer behind one interface.

Owns the choice and the contract. Knows a model's attention shapes and the largest step; must not know how a
step is scheduled or captured.

    shapes = attention_shapes(spec)
    backend = attention_backend("auto", shapes, dtype=dtype, device_type=device.type)
    attention = paged_attention(backend, shapes, limits, ...)  # once a runner; None: plain torch
    attention.plan(batch)  # once a step, on the host
    batch.attention = attention  # layers call `run`

A captured graph takes an object of its own from `attention.captured(...)`: `plan` runs outside the graph
before the capture and before every replay, with a batch of the captured numbers of spans and tokens; `run` is
what is captured. Padding: a decode row with kv_length 0 and no pages, token_pages -1. All objects of a runner
share one workspace, so two of its steps must not run at the same time. Nothing here waits for the device.
Plain torch (None) knows no padding and cannot be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from denim.errors import ConfigError
from denim.recurrence.backend import FLASHINFER, TORCH, TRITON, installed
from denim.spec.attention import FullAttention, LatentAttention
from denim.spec.model import ModelSpec
from denim.spec.parallel import Parallel

if TYPE_CHECKING:
    from denim.layers.batch import StepBatch

BACKENDS = ("auto", TORCH, TRITON, FLASHINFER)

FLASHINFER_HEAD_DIMS = (64, 128, 256)
FLASHINFER_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class StepLimits:
    """The largest step: spans at once, tokens at once, pages of all spans' tables together."""

    spans: int
    tokens: int
    pages: int


@dataclass(frozen=True)
class AttentionShape:
    """Heads of one attention layer. `dim` is that of values; keys have `extra` more."""

    num_heads: int
    num_kv_heads: int
    dim: int
    extra: int = 0

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


class PagedAttention(Protocol):
    """Attention of the spans of a step over their pages. Padding reads nothing, and its rows of the result
    may hold anything."""

    def plan(self, batch: StepBatch) -> None:
        """Prepare for `batch`, whose host lists are read. Once a step, before any `run`."""
        ...

    def run(
        self, q: Tensor, kv: Tensor, batch: StepBatch, scale: float, gate: Tensor | None = None
    ) -> Tensor:
        """q [T, heads, head_dim], kv [pages, 2, page_size, kv_heads, head_dim], gate [T, heads, head_dim] ->
        [T, heads, head_dim], dense, times sigmoid(gate) where there is one. Causal: a span's last token sees
        all kv_lens tokens of it. `q` and `gate` may be strided views with dense heads."""
        ...

    def run_latent(self, q: Tensor, pages: Tensor, batch: StepBatch, value_dim: int, scale: float) -> Tensor:
        """The decode rows over latents that all heads share: q [R, heads, dim], pages [pages, page_size, dim]
        -> [R, heads, value_dim], the weighted sums of the latents' first `value_dim` numbers."""
        ...

    def captured(self, num_decode: int, limits: StepLimits) -> PagedAttention:
        """For one captured graph of `num_decode` decode rows and at most `limits`."""
        ...


def attention_shapes(spec: ModelSpec) -> tuple[AttentionShape, ...]:
    """The distinct shapes of a model's attention layers, the multi-token-prediction head's included."""
    shapes = []
    for layer in spec.layers + spec.mtp_layers:
        mixer = layer.mixer.attention if isinstance(layer.mixer, Parallel) else layer.mixer
        if isinstance(mixer, FullAttention):
            shapes.append(AttentionShape(mixer.num_heads, mixer.num_kv_heads, mixer.head_dim))
        elif isinstance(mixer, LatentAttention):
            shapes.append(AttentionShape(mixer.num_heads, 1, mixer.latent_dim, mixer.rope_dim))
    return tuple(dict.fromkeys(shapes))


def attention_backend(
    wanted: str,
    shapes: Sequence[AttentionShape],
    *,
    dtype: torch.dtype,
    device_type: str,
) -> str:
    """TORCH, TRITON or FLASHINFER for `wanted`, one of BACKENDS. "auto" is Triton wherever that runs:
    on an H200 FlashInfer was nowhere faster, and its plan costs the host every step (docs/attention.md).

    Raises ConfigError when `wanted` cannot serve these shapes, dtype of queries or device ("cpu", "cuda")."""
    no_triton = None
    if device_type != "cuda":
        no_triton = f"needs a CUDA device; this one is {device_type!r}"
    elif not installed(TRITON):
        no_triton = "needs Triton, which is not installed"
    others = sorted({shape.dim for shape in shapes if not shape.extra} - set(FLASHINFER_HEAD_DIMS))
    no_flashinfer = no_triton
    if no_triton is None and not installed(FLASHINFER):
        no_flashinfer = "is not installed; pip install flashinfer-python"
    elif no_triton is None and dtype not in FLASHINFER_DTYPES:
        no_flashinfer = f"computes in bfloat16 or float16, not in {dtype}"
    elif no_triton is None and others:
        no_flashinfer = f"has no kernels for heads of {others[0]}, only of {FLASHINFER_HEAD_DIMS}"
    reasons = {TORCH: None, TRITON: no_triton, FLASHINFER: no_flashinfer}
    if wanted == "auto":
        return TRITON if no_triton is None else TORCH
    if reasons[wanted] is not None:
        raise ConfigError(f'attention_backend={wanted!r} {reasons[wanted]}; "auto" takes what there is')
    return wanted


def paged_attention(
    backend: str,
    shapes: Sequence[AttentionShape],
    limits: StepLimits,
    *,
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> PagedAttention | None:
    """The object behind `backend`, a name that `attention_backend` gave. None: plain torch, or no
    attention."""
    if backend == TORCH or not shapes:
        return None
    from denim.layers.triton_attention import TritonAttention

    triton = TritonAttention(shapes, limits, page_size, device)
    if backend == TRITON:
        return triton
    from denim.layers.flashinfer_attention import FlashInferAttention

    return FlashInferAttention(shapes, page_size, dtype, kv_dtype, device, others=triton)
