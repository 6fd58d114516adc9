"""The draw without filters on the device gives the tokens of the definition."""

import pytest
import torch

pytest.importorskip("triton")

from denim.runner.draw import draw, unit_of
from denim.runner.kernels.draw_free import draw_free_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def both(
    logits: torch.Tensor, rows: list[int], temperature: list[float], uniforms: list[float]
) -> tuple[list[int], list[int]]:
    """Tokens of the definition on the CPU, and of the kernels."""
    vocab = logits.shape[1]
    index, heat = torch.tensor(rows), torch.tensor(temperature)
    numbers = torch.tensor(uniforms, dtype=torch.float64)
    expected = draw(logits[index].float() / heat[:, None], numbers[index][:, None])
    given = [part.to(DEVICE) for part in (logits, index, logits.argmax(-1), heat, numbers)]
    return expected.tolist(), draw_free_rows(*given, unit=unit_of(vocab)).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [37, 2048, 5001])
def test_some_rows_of_a_batch(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(6, vocab, generator=generator) * 3).to(dtype)
    logits[4, 7] = -torch.inf
    rows = [5, 0, 4, 1, 2]
    uniforms = [0.0, 0.5, 0.8, 0.1, 0.9999999, 0.3]  # of all rows
    expected, tokens = both(logits, rows, [0.7, 1.0, 1.0, 2.0, 0.05], uniforms)
    assert tokens == expected
    assert len(set(tokens)) > 2


def test_one_token_alone_is_possible() -> None:
    for place in (0, 2047, 2048, 4999):
        logits = torch.full((1, 5000), -torch.inf)
        logits[0, place] = 1.0
        for uniform in (0.0, 0.5, 1 - 2**-53):
            assert both(logits, [0], [1.0], [uniform]) == ([place], [place])


def test_a_row_without_numbers_ends() -> None:
    logits = torch.full((2, 100), float("nan"), device=DEVICE)
    logits[1] = float("-inf")
    rows, ones = torch.arange(2, device=DEVICE), torch.ones(2, device=DEVICE)
    best = torch.full((2,), -1, device=DEVICE)
    tokens = draw_free_rows(logits, rows, best, ones, ones.double() / 2, unit=unit_of(100))
    assert (tokens == best).all()


@pytest.mark.gpu
def test_a_large_vocabulary() -> None:
    """Equal up to the last bits of exp, which decide once in many thousands of draws."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(64, 248_320, generator=generator) * 2).bfloat16()
    uniforms = torch.rand(64, generator=generator).tolist()
    expected, tokens = both(logits, list(range(64)), [0.8] * 64, uniforms)
    assert sum(abs(ours - theirs) > 1 for ours, theirs in zip(tokens, expected, strict=True)) <= 1
