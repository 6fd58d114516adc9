"""The draw on the device gives the tokens of the definition, which sorts."""

import pytest
import torch

pytest.importorskip("triton")

from denim.runner import draw
from denim.runner.kernels import draw_filtered as kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def both(logits: torch.Tensor, min_p, top_k, top_p, uniforms) -> tuple[list[int], list[int]]:
    """Tokens of the definition on the CPU, and of the kernel."""
    vocab = logits.shape[1]
    uniforms = torch.tensor(uniforms, dtype=torch.float64)[:, None]
    filters = draw.make_filters(min_p, top_k, top_p, vocab, torch.device("cpu"))
    expected = draw.draw_filtered(logits, filters, uniforms)
    given = [part[:, 0].to(DEVICE) for part in (filters.min_log, filters.top_k, filters.top_p, uniforms)]
    rows, temperature = torch.arange(len(logits), device=DEVICE), torch.ones(len(logits), device=DEVICE)
    unit, logits = draw.unit_of(vocab), logits.to(DEVICE)
    tokens = kernel.draw_filtered_rows(logits, rows, logits.argmax(-1), temperature, *given, unit=unit)
    return expected.tolist(), tokens.tolist()


FILTERS = [
    (0.0, 0, 0.9),
    (0.0, 5, 1.0),
    (0.0, 40, 0.8),
    (0.1, 0, 1.0),
    (0.05, 20, 0.95),
    (0.0, 1, 1.0),
    (0.0, 0, 0.01),
    (0.0, 0, 1.0),
    (0.9, 3, 0.5),
]


@pytest.mark.parametrize("scale", [0.1, 6.0])
@pytest.mark.parametrize("vocab", [37, 900])
def test_every_filter(vocab: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    uniforms = [0.3, 0.999999] if scale > 1 else [0.0]
    rows = [(*filters, uniform) for filters in FILTERS for uniform in uniforms]
    logits = torch.randn(len(rows), vocab, generator=generator) * scale
    expected, tokens = both(logits, *(list(part) for part in zip(*rows, strict=True)))
    assert tokens == expected


def test_equal_logits_go_by_id() -> None:
    logits = torch.zeros(6, 300)
    logits[:, 100:110] = 2.0
    rows = [(0.0, 5, 1.0, 0.0), (0.0, 5, 1.0, 0.99), (0.0, 15, 1.0, 0.999), (0.0, 0, 0.5, 0.5)]
    rows += [(0.5, 0, 1.0, 0.55), (0.0, 12, 0.97, 0.98)]
    expected, tokens = both(logits, *(list(part) for part in zip(*rows, strict=True)))
    assert tokens == expected
    assert tokens[:2] == [100, 104]


def test_rows_that_what_was_put_together_does_not_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few values are put together, so most rows are searched whole; a flat row has nothing to put
    together."""
    monkeypatch.setattr(kernel, "_KEPT", 16)
    monkeypatch.setattr(kernel, "_BLOCK", 64)
    generator = torch.Generator().manual_seed(3)
    logits = torch.cat([torch.randn(4, 200, generator=generator), torch.zeros(2, 200)])
    rows = [(0.0, 0, 0.99, 0.5), (0.0, 100, 1.0, 0.9), (0.0, 5, 1.0, 0.4), (0.0, 0, 0.05, 0.8)]
    rows += [(0.0, 0, 0.5, 0.77), (0.0, 30, 1.0, 0.5)]
    expected, tokens = both(logits, *(list(part) for part in zip(*rows, strict=True)))
    assert tokens == expected


def test_a_row_without_numbers_ends() -> None:
    logits = torch.full((2, 100), float("nan"))
    logits[1] = float("-inf")
    given = [torch.tensor(v, device=DEVICE) for v in ([float("-inf")] * 2, [5, 100])]
    given += [torch.tensor([0.9] * 2, dtype=torch.float64, device=DEVICE)] * 2
    rows, temperature = torch.arange(2, device=DEVICE), torch.ones(2, device=DEVICE)
    best = torch.full((2,), -1, device=DEVICE)
    unit = draw.unit_of(100)
    tokens = kernel.draw_filtered_rows(logits.to(DEVICE), rows, best, temperature, *given, unit=unit)
    assert (tokens == best).all()


@pytest.mark.gpu
def test_a_large_vocabulary() -> None:
    """Equal up to the last bits of exp, which decide once in many thousands of draws."""
    generator = torch.Generator().manual_seed(1)
    rows = [(*filters, uniform) for filters in FILTERS for uniform in torch.rand(8).tolist()]
    logits = torch.randn(len(rows), 248_320, generator=generator) * 2
    expected, tokens = both(logits, *(list(part) for part in zip(*rows, strict=True)))
    assert sum(ours != theirs for ours, theirs in zip(tokens, expected, strict=True)) <= 1
