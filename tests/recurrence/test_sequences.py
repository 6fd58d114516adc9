"""Packed sequences and the states wanted of them."""

import numpy as np
import pytest
import torch

from denim.recurrence.sequences import (
    offsets_of,
    positions_of,
    repeated_for,
    starting_states,
    token_by_token,
)


def test_offsets():
    assert offsets_of(torch.tensor([0, 2, 2, 5]), 5) == [0, 2, 2, 5]
    assert offsets_of(np.array([0, 2, 5], dtype=np.int32), 5) == [0, 2, 5]
    not_whole = ([0.0, 5.0], torch.tensor([0.0, 5.0]), torch.tensor([[0, 5]]), "05", None)
    for bad in ([0, 4], [1, 5], [0, 3, 2, 5], [], *not_whole):
        with pytest.raises(
            ValueError, match="cu_seqlens must be whole numbers that rise from 0 to .* tokens, 5"
        ):
            offsets_of(bad, 5)


def test_positions():
    assert positions_of(None, [0, 2, 2, 5]) == [[2], [0], [3]]
    assert positions_of([(2, 0), (), [1, 1]], [0, 2, 2, 5]) == [[2, 0], [], [1, 1]]
    with pytest.raises(ValueError, match="states_at has 1 lists for 2 sequences"):
        positions_of([[1]], [0, 2, 5])
    assert positions_of(torch.tensor([[2, 0]]), [0, 2]) == [[2, 0]]
    for bad in (4, -1, 1.5):
        with pytest.raises(ValueError, match=r"states_at\[1\] must be .* 0 .. 3; got \[1, " + str(bad)):
            positions_of([[2], [1, bad]], [0, 2, 5])
    with pytest.raises(ValueError, match=r"states_at\[0\] must be a list of token counts in 0 .. 2; got 2"):
        positions_of([2, 1], [0, 2, 5])


def test_starting_states():
    x = torch.zeros(1, dtype=torch.bfloat16)
    assert torch.equal(starting_states(None, 2, (3, 4), x), torch.zeros(2, 3, 4))
    given = torch.randn(2, 3, 4)
    assert torch.equal(starting_states(given.double(), 2, (3, 4), x), given)
    assert starting_states(given, 2, (3, 4), x.double()).dtype == torch.float64
    with pytest.raises(ValueError, match=r"initial_state must be \[2, 3, 4\]; got \[2, 4, 3\]"):
        starting_states(given.mT, 2, (3, 4), x)
    with pytest.raises(ValueError, match=r"initial_state must be \[2, 3, 4\]; got \[1, 3, 4\]"):
        starting_states(given[:1], 2, (3, 4), x)
    with pytest.raises(ValueError, match="initial_state is on meta but the tokens on cpu"):
        starting_states(given.to("meta"), 2, (3, 4), x)


def test_token_by_token():
    """A rule that counts: each sequence's own tokens in order, and its states where they are wanted."""
    starting = torch.tensor([100.0, 200.0, 300.0])
    outs, states = token_by_token(
        lambda state, t: (state + 1, state * 0 + t), starting, [0, 2, 2, 5], [[2, 0], [0], [1, 3, 1]]
    )
    assert [out.item() for out in outs] == [0, 1, 2, 3, 4]
    assert states.tolist() == [102, 100, 200, 301, 303, 301]
    assert token_by_token(lambda state, t: (state, state), starting, [0, 1, 1, 1], [[], [], []])[1].shape == (
        0,
    )


def test_repeated_for():
    starting = torch.tensor([1.0, 2.0, 3.0])
    repeated = repeated_for([[5, 0], [], [7]], starting)
    assert repeated.tolist() == [1, 1, 3]
    assert repeated_for([[], [], []], starting).shape == (0,)
    repeated_for([[1], [1], [1]], starting).zero_()
    assert starting.tolist() == [1, 2, 3], "not a copy"
