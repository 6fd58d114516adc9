"""Steps of both rules with matrix states, over rows that lie anywhere."""

import pytest
import torch

from denim.recurrence.state_rows import blocks_of
from tests.recurrence.cases import (
    DECAYS,
    FLOAT64_BOUND,
    RULES,
    assert_close,
    inputs,
    offsets,
    states,
)

every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
every_decay = pytest.mark.parametrize("decay", DECAYS)


@every_rule
@every_decay
@pytest.mark.parametrize("repeat", [1, 3])
@pytest.mark.parametrize("slot_gap", [0, 7])
@pytest.mark.parametrize("as_list", [False, True])
def test_steps_equal_recurrent(rule, decay, repeat, slot_gap, as_list):
    """Step by step for several rows; with a gap, the rows are slots of an arena that lie apart."""
    rows, steps, heads = 3, 4, 2 * repeat
    args = inputs(rule, decay, rows * steps, value_heads=heads)
    initial = states(rows, heads)
    arena = torch.full((rows, initial[0].numel() + slot_gap), torch.nan, dtype=torch.float64)
    state = arena[:, : initial[0].numel()].unflatten(1, initial.shape[1:])
    state.copy_(initial)
    given = list(state) if as_list else state
    outs = []
    for t in range(steps):
        token = [x if x is None or x.dim() == 1 else x.unflatten(0, (rows, steps))[:, t] for x in args]
        outs.append(rule.step(*token, given, scale=0.7))
    want = rule.recurrent(*args, cu_seqlens=offsets([steps] * rows), initial_state=initial, scale=0.7)
    assert_close((torch.stack(outs, 1).flatten(0, 1), state), want, FLOAT64_BOUND)
    assert arena[:, initial[0].numel() :].isnan().all(), "wrote beside the state"


@every_rule
@every_decay
@pytest.mark.parametrize("as_list", [False, True])
def test_narrow_states_are_widened(rule, decay, as_list):
    """A bf16 state is one rounding away from the fp32 result, and stays where it is."""
    args = inputs(rule, decay, 2, dtype=torch.float32)
    args[:3] = (x.bfloat16() for x in args[:3])
    want = rule.recurrent(*args, cu_seqlens=[0, 1, 2], initial_state=(before := states(2).bfloat16()))
    given = list(before.clone()) if as_list else before.clone()
    out = rule.step(*args, given)
    torch.testing.assert_close(out, want[0], atol=1e-6, rtol=2**-7)
    for row, row_want in zip(given, want[1], strict=True):
        torch.testing.assert_close(row, row_want.bfloat16(), atol=1e-6, rtol=2**-7)


@every_rule
@pytest.mark.parametrize("decay", ["constant", "scalar", "vector"])
def test_forgetting_all(rule, decay):
    """log_decay -inf: nothing of the state before is left."""
    args = inputs(rule, decay, 2)
    args[3] = torch.full_like(args[3], -torch.inf)
    fresh, used = torch.zeros(2, 4, 12, 8, dtype=torch.float64), states(2)
    assert torch.equal(rule.step(*args, used), rule.step(*args, fresh))
    assert torch.equal(used, fresh)


@every_rule
@pytest.mark.parametrize("as_list", [False, True])
def test_no_rows(rule, as_list):
    given = [] if as_list else states(0)
    assert rule.step(*inputs(rule, "vector", 0), given).shape == (0, 4, 12)


def test_rows_of_one_tensor_are_one_block():
    arena = torch.zeros(4, 2, 3, 5)

    def blocks(state):
        return blocks_of(state, (len(state), 2, 3, 5), arena)

    assert [block.shape for block in blocks(arena)] == [(4, 2, 3, 5)]
    assert [block.shape for block in blocks(arena[::2])] == [(1, 2, 3, 5)] * 2
    assert [block.shape for block in blocks(arena[1:2])] == [(1, 2, 3, 5)]
    for state in (arena, arena[::2], list(arena)):
        for block in blocks(state):
            assert block.untyped_storage().data_ptr() == arena.untyped_storage().data_ptr()


ROW = torch.zeros(2, 3, 5)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (torch.zeros(4, 2, 5, 3), r"state must be \[4, 2, 3, 5\]; got \[4, 2, 5, 3\]"),  # would be read as it
        (torch.zeros(5, 2, 3, 5), r"state must be \[4, 2, 3, 5\]; got \[5"),
        (torch.zeros(4, 30), r"state must be \[4, 2, 3, 5\]; got \[4, 30\]"),
        (torch.zeros(4, 2, 5, 3).mT, "each row of state must be dense"),
        (ROW.expand(4, 2, 3, 5), "the rows of state lie in one place"),
        (
            torch.zeros(4, 2, 3, 5, dtype=torch.int64),
            "state must hold floating-point numbers, got torch.int64",
        ),
        (torch.zeros(4, 2, 3, 5, device="meta"), "state is on meta but the tokens on cpu"),
        ([ROW.clone() for _ in range(3)], "state must have a tensor for each of 4 rows; got 3"),
        ([], "state must have a tensor for each of 4 rows; got 0"),
        ([ROW] * 4, "state has the same tensor twice"),
        (
            [ROW.clone(), *torch.zeros(3, 1, 2, 3, 5)],
            r"a row of state must be \[2, 3, 5\]; got \[1, 2, 3, 5\]",
        ),
        (
            [ROW.clone(), *torch.zeros(3, 2, 3, 5).double()],
            "a row of state is torch.float64, the first torch.float32",
        ),
        ([ROW.clone(), *torch.zeros(3, 2, 5, 3).mT], "each row of state must be dense"),
    ],
)
def test_states_that_a_step_could_not_write_are_refused(state, message):
    with pytest.raises(ValueError, match=message):
        blocks_of(state, (4, 2, 3, 5), ROW)
