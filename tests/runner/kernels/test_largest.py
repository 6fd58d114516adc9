from math import inf, nan

import pytest
import torch

pytest.importorskip("triton")

from denim.runner.kernels.largest import largest_of_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 5), (1, 5000), (3, 2048), (5, 3001)])
def test_the_first_of_the_largest(rows: int, vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)).round(decimals=1)
    logits = logits.to(dtype).to(DEVICE)  # rounded, so that several are the largest
    expected = torch.stack([(row == row.max()).nonzero()[0, 0] for row in logits])
    assert torch.equal(largest_of_rows(logits, -1), expected)
    wide = torch.cat([logits, torch.full_like(logits, 100)], 1)[:, :vocab]
    assert torch.equal(largest_of_rows(wide, -1), expected)


def test_rows_without_an_answer() -> None:
    logits = torch.randn(5, 3000, device=DEVICE)
    logits[1, 2999] = nan
    logits[2] = -inf
    logits[3, 7] = inf
    tokens = largest_of_rows(logits, -1).tolist()
    assert tokens == [logits[0].argmax().item(), -1, -1, -1, logits[4].argmax().item()]
    assert largest_of_rows(logits[:0], -1).tolist() == []
