"""The prefill convolution against the plain form, in Triton's interpreter on the CPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.gated_delta import l2norm
from denim.recurrence.kernels.short_conv import short_conv_chunks
from denim.recurrence.short_conv import short_conv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 14


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check(
    lengths: list[int],
    slot_in: list[int],
    slot_out: list[int],
    saves: list[list[tuple[int, int]]] | None = None,
    *,
    channels: int = 40,
    width: int = 4,
    size: int = 8,
    bias: bool = False,
    silu: bool = False,
    unit_heads: int = 0,
    head_dim: int = 0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Outputs and every slot against the plain form, sequence by sequence. Unused slots hold NaN."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    # Rows and slots with gaps, as the projection and the arena give them.
    x = randn(offsets[-1], channels + 3).to(dtype)[:, :channels]
    weight, offset = randn(channels, width, seed=1).to(dtype), randn(channels, seed=2).to(dtype)
    windows = torch.full((SLOTS, width + 1, channels), float("nan"), dtype=dtype)[:, : width - 1]
    for slot in slot_in:
        if slot >= 0:
            windows[slot] = randn(width - 1, channels, seed=3 + slot).to(dtype)

    expected, wanted = [], windows.clone()
    for n, (first, end) in enumerate(pairwise(offsets)):
        window = windows[slot_in[n]][None] if slot_in[n] >= 0 else None
        for tokens, slot in [*(saves[n] if saves else ()), (end - first, slot_out[n])]:
            part = x[first : first + tokens]
            y, after = short_conv(part.float(), weight.float(), cu_seqlens=[0, tokens], window=window)
            if slot >= 0:
                wanted[slot] = after[0].to(dtype)
        y = y + offset.float() if bias else y
        y = F.silu(y) if silu else y
        if unit_heads:
            heads, rest = y.split((unit_heads * head_dim, channels - unit_heads * head_dim), 1)
            y = torch.cat((l2norm(heads.unflatten(1, (unit_heads, head_dim))).flatten(1), rest), 1)
        expected.append(y)

    windows = windows.to(DEVICE)
    out = short_conv_chunks(
        x.to(DEVICE),
        weight.to(DEVICE),
        ChunkTable.of(offsets, slot_in, slot_out, size, DEVICE, saves),
        windows,
        bias=offset.to(DEVICE) if bias else None,
        silu=silu,
        unit_heads=unit_heads,
        head_dim=head_dim,
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.cpu().float(), torch.cat(expected), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(windows.cpu(), wanted, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("width", [2, 4, 5])
@pytest.mark.parametrize("slot_out", [0, 7], ids=["in place", "elsewhere"])
def test_sequences_shorter_and_longer_than_the_window(slot_out: int, width: int) -> None:
    lengths = [1, 2, 3, 4, 8, 9, 30]
    check(lengths, [*range(7)], [*range(slot_out, slot_out + 7)], width=width)


def test_fresh_and_carried_of_different_lengths() -> None:
    check([5, 17, 1, 2, 33], [-1, 3, 2, -1, 8], [1, 3, 5, 6, 8])


def test_padding_writes_nothing() -> None:
    check([5, 6], [4, 2], [4, -1])


@pytest.mark.parametrize(
    "saves", [[(1, 9), (2, 10)], [(2, 9), (3, 10)], [(3, 9)], [(4, 9), (20, 10)], [(8, 9)]]
)
@pytest.mark.parametrize("slot_out", [4, 7])
def test_saved_windows(saves: list[tuple[int, int]], slot_out: int) -> None:
    """Early ones too, whose chunks are shorter than the window."""
    check([21, 6], [4, -1], [slot_out, 1], [saves, [(5, 11)]])


@pytest.mark.parametrize("size", [1, 16, 128])
def test_any_chunk_size(size: int) -> None:
    check([150, 3, 67], [4, 2, -1], [4, 2, 1], [[(2, 9), (130, 10)], [], []], size=size, channels=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bias_activation_and_unit_heads(dtype: torch.dtype) -> None:
    check(
        [9, 20],
        [4, -1],
        [4, 2],
        channels=2 * 12 + 50,
        bias=True,
        silu=True,
        unit_heads=2,
        head_dim=12,
        dtype=dtype,
    )


def test_more_channels_than_one_program_takes() -> None:
    check([9], [4], [4], channels=300)


@pytest.mark.slow
def test_slots_beyond_32_bits() -> None:
    """A window whose offset passes 2^31 elements is read and written where it lies."""
    pitch, channels = 2**30 + 64, 8
    near = randn(4, 3, channels).to(DEVICE)
    far = torch.empty(3 * pitch + near[0].numel(), device=DEVICE).as_strided(near.shape, (pitch, channels, 1))
    far.copy_(near)
    x, weight = randn(12, channels).to(DEVICE), randn(channels, 4, seed=1).to(DEVICE)
    table = ChunkTable.of([0, 9, 12], [3, -1], [2, 1], 8, DEVICE)
    assert torch.equal(short_conv_chunks(x, weight, table, far), short_conv_chunks(x, weight, table, near))
    assert torch.equal(far, near)


def test_groups_of_heads_apart() -> None:
    tokens, heads, dim, rest = 21, 3, 8, 20
    channels = heads * dim + rest
    x, weight = randn(tokens, channels).to(DEVICE), randn(channels, 4, seed=1).to(DEVICE)
    table = ChunkTable.of([0, 9, tokens], [-1, -1], [0, 1], 8, DEVICE)
    windows = torch.zeros(2, 3, channels, device=DEVICE)
    form = {"silu": True, "unit_heads": heads, "head_dim": dim}
    whole = short_conv_chunks(x, weight, table, windows, **form)
    parts = short_conv_chunks(x, weight, table, windows, **form, apart=(2 * dim, dim))
    widths = (2 * dim, dim, rest)
    for part, expected in zip(
        parts.split([tokens * width for width in widths]), whole.split(widths, 1), strict=True
    ):
        assert torch.equal(part.view_as(expected), expected)
