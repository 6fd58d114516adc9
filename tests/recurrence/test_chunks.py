"""Where tokens lie in chunks."""

import pytest
import torch

from denim.recurrence.chunks import ChunkLayout


def layout(lengths, chunk_size):
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return ChunkLayout.of(offsets, chunk_size, torch.device("cpu"))


@pytest.mark.parametrize("lengths", [[1], [4], [9], [8, 8], [3, 3, 3], [2, 9, 0, 4], [1, 5]])
def test_unpack_undoes_pack(lengths):
    x = torch.randn(sum(lengths), 2, 3)
    where = layout(lengths, 4)
    packed = where.pack(x, torch.float64)
    # A chunk is no longer than the power of two that holds the longest sequence.
    size = {1: 1, 2: 2}.get(max(lengths), 4)
    assert packed.shape == (sum(where.active), 2, size, 3) and packed.is_contiguous()
    assert torch.equal(where.unpack(packed), x.double())
    assert packed.count_nonzero() == x.count_nonzero(), "padding is not zero"


def test_chunks_of_one_place_lie_together_the_longest_sequence_first():
    where = layout([2, 9, 0, 5], 4)
    assert where.active == [3, 2, 1]
    assert where.order.tolist() == [1, 3, 0, 2]
    packed = where.pack(torch.arange(16.0).view(16, 1, 1), torch.float32).flatten(1)
    assert packed.tolist() == [
        [2, 3, 4, 5],
        [11, 12, 13, 14],
        [0, 1, 0, 0],
        [6, 7, 8, 9],
        [15, 0, 0, 0],
        [10, 0, 0, 0],
    ]


def test_equal_lengths_of_whole_chunks_are_packed_by_one_copy():
    """Training packs equal lengths: no gather, and no padding when they are whole chunks."""
    assert layout([8, 8], 4).place is None
    assert layout([8, 4], 4).place is not None


@pytest.mark.parametrize("size", [0, -1, 2.0, None])
def test_a_chunk_has_a_token(size):
    with pytest.raises(ValueError, match="chunk_size must be a whole number of tokens, 1 or more; got"):
        layout([3], size)


def test_groups_hold_whole_places():
    where = layout([12, 12, 4], 4)
    assert where.active == [3, 2, 2]
    assert where.groups(1) == [[3], [2], [2]]
    assert where.groups(4) == [[3], [2, 2]]
    assert where.groups(100) == [[3, 2, 2]]


@pytest.mark.parametrize("lengths", [[9], [8, 8], [3, 3, 3], [2, 9, 0, 5]])
def test_places_of_positions(lengths):
    """At its place lies the last of a position's tokens; position 0 has none."""
    where, cu = layout(lengths, 4), [sum(lengths[:i]) for i in range(len(lengths))]
    packed = where.pack(torch.arange(float(sum(lengths))).view(-1, 1, 1), torch.float32)
    positions = [list(range(length, -1, -1)) for length in lengths]
    flat = [(n, p) for n, at in enumerate(positions) for p in at]
    found = where.places_of(positions)
    assert [index for index, _, _ in found] == [i for i, (_, p) in enumerate(flat) if p]
    for index, chunk, row in found:
        n, p = flat[index]
        assert packed[chunk, 0, row, 0] == cu[n] + p - 1
