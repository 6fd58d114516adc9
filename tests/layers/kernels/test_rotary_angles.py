"""Cosines and sines in one kernel against torch's in float64, up to long contexts."""

from __future__ import annotations

import pytest
import torch

from denim.layers.kernels.rotary_angles import rotary_angles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("half", [2, 12])
def test_equals_torch(half: int) -> None:
    positions = torch.cat((torch.arange(20), torch.tensor([4095, 262_143])))
    frequencies = 1e4 ** -(torch.arange(half) / half)
    cos, sin = rotary_angles(positions.to(DEVICE), frequencies.to(DEVICE), 1.5, torch.float32)
    assert cos.shape == sin.shape == (len(positions), 1, half)
    angle = (positions.float()[:, None, None] * frequencies).double()
    torch.testing.assert_close(cos.cpu().double(), 1.5 * angle.cos(), atol=2e-6, rtol=0)
    torch.testing.assert_close(sin.cpu().double(), 1.5 * angle.sin(), atol=2e-6, rtol=0)
