"""The short convolution against torch's, for every length, split and batch, and step by step."""

import pytest
import torch
from torch.nn import functional as F

from denim.recurrence.short_conv import (
    channels_last_convolution,
    shifted_sum,
    short_conv,
    short_conv_step,
)

CHANNELS = 5


def inputs(tokens, width=4, dtype=torch.float64, seed=0):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, CHANNELS, dtype=dtype, generator=rng)
    return x, torch.randn(CHANNELS, width, dtype=dtype, generator=rng)


def windows(sequences, width=4, dtype=torch.float64):
    return torch.randn(
        sequences, width - 1, CHANNELS, dtype=dtype, generator=torch.Generator().manual_seed(1)
    )


def reference(x, weight, window):
    """torch's depthwise convolution of [window | x], and the last W - 1 inputs."""
    rows = torch.cat((window, x))
    if not len(x):  # torch refuses rows shorter than the kernel
        return x, window
    y = F.conv1d(rows.t()[None], weight[:, None], groups=CHANNELS)[0].t()
    return y, rows[len(x) :]


def offsets(lengths):
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 70])
def test_one_sequence(width, tokens):
    x, weight = inputs(tokens, width)
    window = windows(1, width)
    y, new_window = short_conv(x, weight, cu_seqlens=[0, tokens], window=window)
    want_y, want_window = reference(x, weight, window[0])
    torch.testing.assert_close(y, want_y, atol=1e-12, rtol=0)
    assert torch.equal(new_window, want_window[None])


def test_without_a_window_the_past_is_zero():
    x, weight = inputs(6)
    y, window = short_conv(x, weight, cu_seqlens=[0, 6])
    want_y, _ = reference(x, weight, torch.zeros(3, CHANNELS, dtype=x.dtype))
    torch.testing.assert_close(y, want_y, atol=1e-12, rtol=0)
    assert torch.equal(window, x[None, 3:])


@pytest.mark.parametrize("lengths", [[1, 2, 3, 4, 0, 9], [3, 3, 3], [1, 1], [0, 0], [40, 1]])
def test_a_batch_is_its_sequences(lengths):
    """NaN in a neighbour or its window reaches nobody else."""
    x, weight = inputs(sum(lengths))
    window, cu = windows(len(lengths)), offsets(lengths)
    x[cu[1] : cu[2]] = torch.nan
    window[1] = torch.nan
    y, new_window = short_conv(x, weight, cu_seqlens=torch.tensor(cu), window=window)
    assert y.shape == x.shape and new_window.shape == window.shape
    for n in (0, *range(2, len(lengths))):
        want_y, want_window = reference(x[cu[n] : cu[n + 1]], weight, window[n])
        torch.testing.assert_close(y[cu[n] : cu[n + 1]], want_y, atol=1e-12, rtol=0)
        assert torch.equal(new_window[n], want_window)


def test_every_split_in_three():
    tokens = 12
    x, weight = inputs(tokens)
    start = windows(1)
    want_y, want_window = reference(x, weight, start[0])
    for first in range(1, tokens - 1):
        for second in range(first + 1, tokens):
            window, parts = start, []
            for part in (x[:first], x[first:second], x[second:]):
                y, window = short_conv(part, weight, cu_seqlens=[0, len(part)], window=window)
                parts.append(y)
            torch.testing.assert_close(torch.cat(parts), want_y, atol=1e-12, rtol=0)
            assert torch.equal(window[0], want_window)


@pytest.mark.parametrize("slot_gap", [0, 2])
@pytest.mark.parametrize("width", [2, 4])
def test_steps_equal_the_sequence(width, slot_gap):
    """Several rows at a time; with a gap, their windows are slots of an arena that lie apart."""
    rows, steps = 3, 6
    x, weight = inputs(rows * steps, width)
    start = windows(rows, width)
    arena = torch.full((rows, width - 1 + slot_gap, CHANNELS), torch.nan, dtype=x.dtype)
    window = arena[:, : width - 1]
    window.copy_(start)
    by_row = x.unflatten(0, (rows, steps))
    y = torch.stack([short_conv_step(by_row[:, t], weight, window) for t in range(steps)], 1)
    want_y, want_window = short_conv(x, weight, cu_seqlens=offsets([steps] * rows), window=start)
    torch.testing.assert_close(y.flatten(0, 1), want_y, atol=1e-12, rtol=0)
    assert torch.equal(window, want_window)
    assert arena[:, width - 1 :].isnan().all(), "wrote beside the window"


def test_bf16_sums_in_fp32():
    """One rounding at the end, in both forms: the result is the exact sum rounded to bf16."""
    x, weight = inputs(40, dtype=torch.bfloat16)
    exact = reference(x.double(), weight.double(), torch.zeros(3, CHANNELS).double())[0]
    y, window = short_conv(x, weight, cu_seqlens=[0, 40])
    assert y.dtype == window.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact, atol=1e-6, rtol=2**-8)
    past = torch.zeros(1, 3, CHANNELS, dtype=torch.bfloat16)
    steps = torch.cat([short_conv_step(row[None], weight, past) for row in x])
    torch.testing.assert_close(steps.double(), exact, atol=1e-6, rtol=2**-8)
    assert torch.equal(past, window)


@pytest.mark.parametrize("convolve", [channels_last_convolution, shifted_sum])
@pytest.mark.parametrize("width, length", [(2, 1), (4, 1), (4, 2), (4, 9)])
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_both_ways_to_convolve(convolve, width, length, dtype, bound):
    """One is used on CPUs, the other elsewhere."""
    x, weight = inputs(3 * (length + width - 1), width, dtype)
    rows = x.unflatten(0, (3, -1))
    y = convolve(rows, weight)
    want = F.conv1d(rows.mT.double(), weight.double()[:, None], groups=CHANNELS).mT
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), want, atol=bound, rtol=0)


@pytest.mark.parametrize("lengths", [[7], [3, 3], [1, 4]])
def test_gradients(lengths):
    x, weight = inputs(sum(lengths))
    leaves = [t.requires_grad_() for t in (x, weight, windows(len(lengths)))]
    assert torch.autograd.gradcheck(
        lambda x, w, past: short_conv(x, w, cu_seqlens=offsets(lengths), window=past), leaves
    )


def test_offsets_must_fit():
    x, weight = inputs(5)
    with pytest.raises(ValueError, match="cu_seqlens"):
        short_conv(x, weight, cu_seqlens=[0, 4])
