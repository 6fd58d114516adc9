"""Products of tokens through decay against their definition."""

import math

import pytest
import torch

from denim.recurrence.decay import fade, per_token


def definition(row, key, log_decay):
    """since, until and scores, each exponent summed by itself, in float64."""
    size = len(row)
    log_decay = log_decay.expand(size, row.shape[1]).double()
    since = torch.stack([log_decay[: t + 1].sum(0).exp() for t in range(size)])
    until = torch.stack([log_decay[t + 1 :].sum(0).exp() for t in range(size)])
    scores = torch.zeros(size, size, dtype=torch.float64)
    for t in range(size):
        for s in range(t + 1):
            scores[t, s] = (row[t] * log_decay[s + 1 : t + 1].sum(0).exp() * key[s]).sum()
    return since, until, scores


@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 13, 16, 31])
@pytest.mark.parametrize("strength", [0.0, 1.0, 100.0])
def test_definition(channels, size, strength):
    rng = torch.Generator().manual_seed(0)
    rows = torch.randn(2, size, 5, dtype=torch.float64, generator=rng)
    key = torch.randn(size, 5, dtype=torch.float64, generator=rng)
    log_decay = -strength * torch.rand(size, channels, dtype=torch.float64, generator=rng)
    got = fade(rows, key, log_decay)
    for row, scores in zip(rows, got.scores, strict=True):
        since, until, want = definition(row, key, log_decay)
        torch.testing.assert_close(scores, want, atol=1e-12, rtol=0)
    torch.testing.assert_close(got.since.expand(size, 5), since, atol=1e-12, rtol=0)
    torch.testing.assert_close(got.until.expand(size, 5), until, atol=1e-12, rtol=0)
    assert torch.equal(got.left, got.since[-1:])


@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("strong", [-1e4, -1e30, -math.inf])
def test_weak_decay_beside_strong(channels, strong):
    """fp32. Per channel no sum reaches over tokens that are not asked for; the scalar form takes differences
    of sums that are kept as two numbers. Neither loses the weak decay."""
    rng = torch.Generator().manual_seed(0)
    row, key = torch.randn(2, 64, 5, generator=rng) * 5**-0.5
    log_decay = torch.full((64, channels), strong)
    log_decay[1::4] = log_decay[2::4] = -0.3
    got = fade([row], key, log_decay)
    since, until, scores = definition(row.double(), key.double(), log_decay)
    for a, b in ((got.scores[0], scores), (got.since, since[:, :channels]), (got.until, until[:, :channels])):
        torch.testing.assert_close(a.double(), b, atol=1e-6, rtol=0)


@pytest.mark.parametrize("channels", [1, 3])
def test_no_exponent_is_positive(channels, monkeypatch):
    """Factors are at most 1 wherever an exponential is taken, also where rounding could raise a sum."""
    largest = []
    exp = torch.Tensor.exp
    monkeypatch.setattr(torch.Tensor, "exp", lambda x: largest.append(x.max().item()) or exp(x))
    rng = torch.Generator().manual_seed(0)
    for strength in (1e-6, 1.0, 1e3):
        log_decay = -strength * torch.rand(64, channels, generator=rng)
        fade([torch.randn(64, 3)], torch.randn(64, 3), log_decay)
    assert len(largest) >= 9 and max(largest) <= 0


def test_leading_dimensions_broadcast():
    """As the rules use it: keys of a head for all its value heads."""
    rng = torch.Generator().manual_seed(0)
    row, key = torch.randn(2, 3, 2, 1, 5, 4, dtype=torch.float64, generator=rng)
    for channels in (1, 4):
        log_decay = -torch.rand(3, 2, 6, 5, channels, dtype=torch.float64, generator=rng)
        (scores,) = fade([row], key, log_decay).scores
        (want,) = fade([row[1, 1, 0]], key[1, 1, 0], log_decay[1, 1, 4]).scores
        assert scores.shape == (3, 2, 6, 5, 5)
        torch.testing.assert_close(scores[1, 1, 4], want)


def test_four_shapes():
    v = torch.zeros(7, 3, 2)
    constant, scalar, vector = -torch.rand(3), -torch.rand(7, 3), -torch.rand(7, 3, 5)
    assert torch.equal(per_token(None, 7, v), torch.zeros(7, 3, 1))
    assert torch.equal(per_token(constant, 7, v), constant.repeat(7, 1).unsqueeze(2))
    assert torch.equal(per_token(scalar, 7, v), scalar.unsqueeze(2))
    assert per_token(vector, 7, v) is vector
