import pytest

from denim.recurrence.chunk_table import ChunkTable, chunk_arrays


def test_chunks_cover_every_sequence_in_order():
    table = ChunkTable.of([0, 5, 13, 13], [3, -1, -1], [3, 7, 1], 4, "cpu")
    assert table.chunks.tolist() == [[0, 0, 4], [0, 4, 1], [1, 5, 4], [1, 9, 4]]
    assert table.first_chunk.tolist() == [0, 2, 4, 4]
    assert table.cu_seqlens.tolist() == [0, 5, 13, 13]
    assert table.slot_in.tolist() == [3, -1, -1]
    assert table.slot_out.tolist() == [3, 7, 1]
    assert table.save is None
    assert (table.size, table.longest) == (4, 2)


def test_a_wanted_state_ends_a_chunk_and_the_grid_stays():
    table = ChunkTable.of([0, 2, 12], [-1, -1], [0, 1], 4, "cpu", saves=[[], [(5, 9), (10, 8), (8, 6)]])
    assert table.chunks.tolist() == [[0, 0, 2], [1, 2, 4], [1, 6, 1], [1, 7, 3], [1, 10, 2]]
    assert table.save is not None and table.save.tolist() == [-1, -1, 9, 6, 8]


def test_no_sequence_at_all():
    table = ChunkTable.of([0], [], [], 64, "cpu")
    assert (len(table.chunks), len(table.slot_in), table.longest) == (0, 0, 0)


@pytest.mark.parametrize("saves", [[(0, 1)], [(6, 1)], [(3, 1), (3, 2)], [(2.5, 1)], [(2, 1.0)], [(2, 0)]])
def test_a_place_outside_the_sequence_or_taken_twice_is_refused(saves):
    with pytest.raises(ValueError, match="saves"):
        ChunkTable.of([0, 5], [-1], [0], 4, "cpu", saves=[saves])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 5], [-1, 0], [0], 4), "1 sequences; .* as many entries, got 2, 1 and"),
        (([0, 5], [-1], [0, 1], 4), "1 sequences; .* as many entries, got 1, 2 and"),
        (([0, 5, 3], [-1, -1], [0, 1], 4), "cu_seqlens must be whole numbers that rise"),
        (([1, 5], [-1], [0], 4), "cu_seqlens must be whole numbers that rise"),
        (([], [], [], 4), "cu_seqlens must be whole numbers that rise"),
        (([0, 5], [-2], [0], 4), r"slots must be .* or -1 for none.*; got slot_in \[-2\]"),
        (([0, 5], [0.5], [0], 4), "slots must be whole numbers"),
        (([0, 5, 9], [-1, -1], [1, 1], 4), r"may be written once; got \[1, 1\]"),
        (([0, 5], [-1], [0], 0), "chunk_size must be a whole number"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ChunkTable.of(*arguments, "cpu")


def test_padding_belongs_to_no_sequence():
    places, slots, longest = chunk_arrays([0, 5, 5], [2, -1], [2, -1], 4, saves=[[], []], padded_to=4)
    assert places.tolist() == [0, 0, 4, 0, 4, 1, -1, 0, 0, -1, 0, 0, 0, 2, 2, 0, 5, 5]
    assert slots.tolist() == [2, -1, 2, -1, -1, -1, -1, -1]
    assert longest == 2
