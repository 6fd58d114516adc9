"""Norm, RoPE and the write of KV in one kernel against the layer's plain parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from denim.layers.attention import narrowed
from denim.layers.kernels.output_gate import gate_output
from denim.layers.kernels.query_key import FEW_TOKENS, query_key
from denim.layers.norm import RMSNorm
from denim.layers.rotary import rotate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGES, PAGE = 7, 4


def norm(dim: int) -> RMSNorm:
    layer = RMSNorm(dim, 1e-5, zero_centred=True, dtype=torch.float32, device="cpu")
    torch.nn.init.normal_(layer.weight)
    layer.prepare()
    return layer


@pytest.mark.parametrize("tokens", [3, FEW_TOKENS + 5])
@pytest.mark.parametrize(
    ("dim", "half", "normed"), [(16, 2, True), (16, 8, False), (24, 4, True), (8, 0, True), (8, 0, False)]
)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn], ids=["fp32", "fp8"])
def test_equals_the_plain_parts(
    tokens: int, dim: int, half: int, normed: bool, kv_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    heads, kv_heads = 3, 2
    # [q | gate] by heads, then k, then v, as one projection gives them.
    projected = torch.randn(tokens, heads * 2 * dim + 2 * kv_heads * dim)
    projected[0, -1] = 1e4  # beyond what 8 bits hold
    q, k, v = projected.split((heads * 2 * dim, kv_heads * dim, kv_heads * dim), dim=-1)
    q = q.view(tokens, heads, 2 * dim)[..., :dim]
    k, v = k.view(tokens, kv_heads, dim), v.view(tokens, kv_heads, dim)
    norms = (norm(dim), norm(dim)) if normed else None
    angles = torch.randn(tokens, 1, half)
    cos, sin = (angles.cos(), angles.sin()) if half else (None, None)
    slots = torch.randperm(PAGES * PAGE)[:tokens] if tokens <= PAGES * PAGE else torch.arange(tokens)
    pages, offsets = slots // PAGE, slots % PAGE
    pages[1] = -1
    room = max(PAGES, tokens // PAGE + 1)

    def empty() -> Tensor:
        """Pages with a gap between them, NaN where nothing was written."""
        whole = torch.full((room, 3, PAGE, kv_heads, dim), float("nan")).to(kv_dtype).to(DEVICE)
        return whole[:, :2]

    expected_q, expected_k = (norms[0](q), norms[1](k)) if norms else (q, k)
    if half:
        expected_q, expected_k = rotate(expected_q, cos, sin), rotate(expected_k, cos, sin)
    expected, live = empty(), pages >= 0
    for side, x in enumerate((expected_k, v)):
        expected[pages[live], side, offsets[live]] = narrowed(x, kv_dtype)[live].to(DEVICE)

    kv = empty()
    got = query_key(
        *(t.to(DEVICE) for t in (q, k, v)),
        kv,
        pages.to(DEVICE),
        offsets.to(DEVICE),
        q_scale=norms[0].scale.to(DEVICE) if norms else None,
        k_scale=norms[1].scale.to(DEVICE) if norms else None,
        eps=1e-5,
        cos=cos.to(DEVICE) if half else None,
        sin=sin.to(DEVICE) if half else None,
    )
    torch.testing.assert_close(got.cpu(), expected_q, atol=1e-5, rtol=1e-5)
    tolerance = {"atol": 1e-5, "rtol": 1e-5}
    if kv_dtype != torch.float32:
        # A value on the edge between two numbers of 8 bits may go to either, 1/8 apart. The interpreter drops
        # the carry into the exponent, which halves a number.
        tolerance = {"atol": 2**-9, "rtol": 0.126 if DEVICE == "cuda" else 0.51}
    torch.testing.assert_close(kv.float(), expected.float(), equal_nan=True, **tolerance)


def test_output_gate() -> None:
    torch.manual_seed(0)
    out, both = torch.randn(5, 3, 16), torch.randn(5, 3, 40)
    gate = both[..., 16:32]
    got = out.to(DEVICE, copy=True)
    gate_output(got, gate.to(DEVICE))
    torch.testing.assert_close(got.cpu(), out * gate.sigmoid())
