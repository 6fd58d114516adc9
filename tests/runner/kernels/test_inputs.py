import pytest
import torch

pytest.importorskip("triton")

from denim.runner.kernels.inputs import inputs_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_tokens_that_the_last_step_drew_take_their_places() -> None:
    count = 600
    tokens = torch.arange(count, device=DEVICE)
    sources = torch.full((count,), -1, device=DEVICE)
    sources[[0, 5, 599]] = torch.tensor([2, 0, 1], device=DEVICE)
    tokens[[0, 5, 599]] = -1
    positions = torch.arange(count, device=DEVICE) * 3
    drawn = torch.tensor([70, -1, 90], device=DEVICE)
    ids, offsets = inputs_of(tokens, sources, positions, drawn, 16)
    expected = torch.arange(count, device=DEVICE)
    expected[[0, 5, 599]] = torch.tensor([90, 70, 0], device=DEVICE)
    assert torch.equal(ids, expected)
    assert torch.equal(offsets, positions % 16)
