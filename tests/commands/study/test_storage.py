"""What each way to keep a state does to its numbers."""

from __future__ import annotations

import pytest
import torch

from denim.commands.study.storage import STORAGES, bfloat16, bfloat16_stochastic, float8, int8


@pytest.fixture
def state() -> torch.Tensor:
    return torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(1))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(2)


def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average(state: torch.Tensor) -> None:
    draws = torch.stack([bfloat16_stochastic(state, g) for g in [generator()] for _ in range(2000)])
    assert torch.equal(draws, draws.bfloat16().float())
    gap = 2.0**-7 * state.abs()  # bf16 has 8 significant bits: neighbours lie at most this far apart
    assert ((draws - state).abs() <= gap).all()
    # A draw's deviation is at most half a gap, so the mean of 2,000 has 0.011; 6 of them bound 384 elements.
    assert ((draws.mean(0) - state).abs() <= 6 * 0.5 / 2000**0.5 * gap).all()
    assert ((bfloat16(state, generator()) - state).abs() <= gap / 2).all()


def test_scales_are_per_head(state: torch.Tensor) -> None:
    state = state * torch.tensor([1e-6, 1.0, 1e6]).view(3, 1, 1)
    largest = state.abs().amax((1, 2), keepdim=True)
    assert ((int8(state, generator()) - state).abs() <= largest / 127 * 0.501).all()
    # e4m3 has 4 significant bits: half a gap is at most 1/16 of a number, or 2^-10 among the subnormal ones.
    wrong = (float8(state, generator()) - state).abs()
    assert (wrong <= state.abs() * 0.0626 + largest / 448 * 2.0**-10).all()


@pytest.mark.parametrize("storage", STORAGES, ids=lambda storage: storage.name)
def test_an_empty_state_stays_empty(storage) -> None:
    assert not storage.kept(torch.zeros(2, 4, 4), generator()).any()
