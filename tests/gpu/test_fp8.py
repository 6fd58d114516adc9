"""FP8 blocks on Hopper: the quantiser, the product, and a whole model, each against what it stands for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from denim.layers import fp8_linear
from denim.layers.fp8_linear import BLOCK, Fp8Linear, multiplies_blocks, product, quantise
from denim.layers.moe import SparseMoE
from denim.ledger import weight_bytes
from denim.models import fp8_kept
from denim.models.weights import load_model
from denim.spec.ffn import MoEFFN
from denim.spec.reader import read_spec
from tests.layers.test_fp8_linear import filled, meant, reference_product
from tests.models.test_fp8 import quantise as quantise_files
from tests.models.test_fp8_kept import DIMS, published
from tests.tiny import VOCAB, Bench, checkpoint

CUDA = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and not multiplies_blocks(CUDA, torch.bfloat16), reason="no FP8 blocks"
    ),
]


def on_gpu(linear: Fp8Linear) -> Fp8Linear:
    linear.plain.data = linear.plain.data.bfloat16()
    return linear.to(CUDA)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 64, 333])
@pytest.mark.parametrize("columns", [128, 640, 5120])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantiser(rows: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = torch.randn(rows, columns + 8) * torch.logspace(-3, 3, rows)[:, None]
    wide[0, :BLOCK] = 0
    x = wide.to(dtype)[:, :columns]
    values, scales = quantise(x.to(CUDA))
    expected, expected_scales = quantise(x)
    assert values.shape == expected.shape and scales.stride() == (1, len(values))
    torch.testing.assert_close(scales.cpu()[:rows], expected_scales[:rows], rtol=1e-6, atol=0)
    differing = values.cpu()[:rows].view(torch.uint8) != expected[:rows].view(torch.uint8)
    assert differing.float().mean() < 5e-3, "more than rounding at ties, of which bf16 inputs have many"
    step = (values.cpu()[:rows].float() - expected[:rows].float()).abs()
    assert (step <= expected[:rows].float().abs() / 8 + 2.0**-9).all()


def test_not_a_number_stays_one() -> None:
    x = torch.ones(4, BLOCK, device=CUDA)
    x[2, 5] = torch.nan
    values, scales = quantise(x)
    back = values.float() * scales
    assert back[2].isnan().any() and back[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 64, 130, 1000])
@pytest.mark.parametrize(("columns", "rows"), [(128, 128), (640, 384), (5120, 1024), (2048, 12288)])
def test_product(tokens: int, columns: int, rows: int) -> None:
    """Sums in fp32, rounded to bf16 once: half a step of 2^-8, and what the order of sums makes."""
    linear = on_gpu(filled(columns, rows, rows))
    values, scales = quantise(torch.randn(tokens, columns, device=CUDA, dtype=torch.bfloat16))
    expected = reference_product(values, scales, linear.values, linear.scales)[:tokens]
    ours = product(values, scales, linear.values, linear.scales)[:tokens].float()
    error = (ours - expected).abs()
    print(f"{(error / expected.std()).max().item():.1e} of the spread")
    assert (error <= expected.abs() * 2.0**-8 + expected.std() * 2e-3).all()


def test_beside_plain_rows_in_a_graph() -> None:
    linear = on_gpu(filled(5 * BLOCK, 2 * BLOCK + 40, 2 * BLOCK))
    x = torch.randn(6, 5 * BLOCK, device=CUDA, dtype=torch.bfloat16)
    linear(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear(x)
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    exact = x.float() @ meant(linear).float().t()
    assert out.shape == (6, 2 * BLOCK + 40)
    for columns in (slice(0, 2 * BLOCK), slice(2 * BLOCK, None)):
        error, size = (out.float() - exact)[:, columns], exact[:, columns]
        # Activations are rounded to three bits behind the point for FP8 rows; the weights are what is meant.
        assert error.pow(2).mean().sqrt() < 0.04 * size.pow(2).mean().sqrt()


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_experts(tokens: int) -> None:
    """In one launch against one expert after another, whose weights are dequantised to bf16 first: that
    rounds each of them once more, by up to 2^-9."""
    torch.manual_seed(0)
    spec = MoEFFN(num_experts=11, top_k=3, intermediate=384)
    layer = SparseMoE(spec, 256, dtype=torch.bfloat16, device=CUDA, fp8_experts=True)
    layer.router.weight.data.normal_()
    for values, scales in ((layer.up, layer.up_scales), (layer.down, layer.down_scales)):
        values.data.copy_((torch.randn_like(values, dtype=torch.float32) * 50).to(torch.float8_e4m3fn))
        scales.data.uniform_(0.5e-3, 1.5e-3)
    x = torch.randn(tokens, 256, device=CUDA, dtype=torch.bfloat16)
    weights, chosen = layer._route(x)
    ours = layer._at_once(x, weights, chosen).float()
    expected = layer._one_by_one(x, weights, chosen).float()
    assert (ours - expected).abs().max() < 0.06 * expected.std()


def test_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 logits with FP8 products: within 15% of the spread (root mean square) of FP8 activations times the
    same in fp32, where a sum rounded otherwise sends activations of the next layer to another FP8 number; and
    within 30% of the dequantised model, which rounds no activation to FP8. The random weights of the model
    magnify: rounding to bf16 alone moves its logits by 3%."""
    quantise_files(tmp_path, checkpoint(tmp_path, **DIMS), published, (BLOCK, BLOCK))
    spec = read_spec(tmp_path, dtype="bfloat16")
    tokens = torch.randint(0, VOCAB, (100,), generator=torch.Generator().manual_seed(0)).tolist()

    def logits() -> tuple[Tensor, int, int]:
        model = load_model(spec, tmp_path, device=CUDA, chunk_size=64)
        kept = sum(isinstance(module, Fp8Linear) for module in model.modules())
        size = sum(parameter.nbytes for parameter in model.parameters())
        bench = Bench(model, spec)
        parts = [bench.run(tokens, 0, 90, -1, 1)]
        parts += [bench.run(tokens, i, i + 1, 1, 1) for i in range(90, 100)]
        return torch.cat(parts), kept, size

    ours, kept, size = logits()
    assert kept == 4 * 4
    assert abs(size - weight_bytes(spec, fp8_blocks=True)) < 4096, "fp32 in place of bf16 for small vectors"
    monkeypatch.setattr(fp8_linear, "product", lambda *args: reference_product(*args).bfloat16())
    same, _, _ = logits()
    monkeypatch.setattr(fp8_kept, "multiplies_blocks", lambda device, dtype: False)
    dequantised, none, full = logits()
    assert none == 0 and size < full

    def distance(a: Tensor, b: Tensor) -> float:
        return ((a - b).pow(2).mean().sqrt() / b.std()).item()

    print(f"against fp32 products {distance(ours, same):.3f}, dequantised {distance(ours, dequantised):.3f}")
    assert distance(ours, same) < 0.15
    assert distance(ours, dequantised) < 0.3
