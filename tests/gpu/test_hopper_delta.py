"""The gated delta rule's kernels for Hopper at real sizes, against float64 and the portable kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.kernels.delta_pass import plan_of
from denim.recurrence.kernels.gated_delta_chunks import gated_delta_chunks
from denim.recurrence.kernels.hopper_delta import hopper_delta, suits
from tests.gpu.test_delta_prefill import (
    CHUNK,
    LENGTHS,
    MOST_BY_DECAY,
    MOST_ERROR,
    SLOT_IN,
    SLOT_OUT,
    Case,
    error,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper"
    ),
]

# Against the portable kernels: the same products of the same roundings, sums in another order.
CLOSE = 5e-4
SAVES = [[(100, 6), (1024, 3)], [], [(64, 7)]]


def run(case: Case, table: ChunkTable, span: int = 0, since: int = 0) -> Tensor:
    rows, b, a = (x[since:] for x in (case.rows, case.b, case.gate))
    assert suits(rows, table, case.state)
    return hopper_delta(rows, b, a, case.a_log, case.bias, table, case.state, case.key_heads, span=span)


def portable(case: Case, table: ChunkTable) -> Tensor:
    plan = plan_of(table, case.state, case.rows.dtype)
    return gated_delta_chunks(
        case.rows, case.b, case.gate, case.a_log, case.bias, table, case.state, case.key_heads, plan=plan
    )


@pytest.mark.parametrize("decay", MOST_BY_DECAY, ids=["weak", "middling", "strong"])
@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("span", [0, 4], ids=["whole", "cut"])
def test_error_against_float64(heads: int, decay: float, span: int) -> None:
    case = Case(16, heads, decay)
    expected, states = case.reference()
    out = run(case, ChunkTable.of(case.offsets, SLOT_IN, SLOT_OUT, CHUNK, "cuda"), span)
    most_of_outputs, most_of_states = MOST_BY_DECAY[decay]
    assert error(out, expected) < most_of_outputs
    assert error(case.state[SLOT_OUT], states) < most_of_states


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("span", [0, 4, 13], ids=["whole", "short segments", "long segments"])
def test_gives_what_the_portable_kernels_give(span: int, dtype: torch.dtype) -> None:
    """With states in the midst of sequences, a sequence that is padding, and slots that nobody may touch."""
    case, other = Case(16, 32, 0.3), Case(16, 32, 0.3)
    slots = {"slot_in": SLOT_IN, "slot_out": [0, -1, 5]}
    for one in (case, other):
        one.rows = one.rows.to(dtype)
        one.state[[1, 4]] = torch.nan
    table = ChunkTable.of(case.offsets, **slots, size=CHUNK, device="cuda", saves=SAVES)
    out, expected = run(case, table, span), portable(other, table)
    assert error(out, expected.double()) < CLOSE
    written = [0, 3, 5, 6, 7]
    assert error(case.state[written], other.state[written].double()) < CLOSE
    assert torch.equal(case.state.isnan(), other.state.isnan())
    assert torch.equal(case.state[2], other.state[2])


def test_fewer_tokens_than_a_chunk() -> None:
    case, other = Case(16, 16, 0.3), Case(16, 16, 0.3)
    for one in (case, other):
        one.rows, one.b, one.gate = one.rows[:5].clone(), one.b[:5], one.gate[:5]
    table = ChunkTable.of([0, 5], [0], [1], CHUNK, "cuda")
    assert error(run(case, table), portable(other, table).double()) < CLOSE
    assert error(case.state[1], other.state[1].double()) < CLOSE


def test_what_lies_behind_a_chunk_is_not_read() -> None:
    case = Case(16, 16, 0.3)
    case.rows[100:] = torch.nan
    table = ChunkTable.of([0, 100], [0], [1], CHUNK, "cuda")
    out = run(case, table)
    assert out[:100].isfinite().all()
    assert case.state[1].isfinite().all()


def test_equal_keys() -> None:
    """A is full of ones: a series of its powers would need binomials, and roundings hardly fade. So the
    portable kernels' own error is the measure."""
    case, other = Case(16, 16, 1e-8), Case(16, 16, 1e-8)
    for one in (case, other):
        one.rows[:, 16 * 128 : 32 * 128] = one.rows[:1, 16 * 128 : 32 * 128]
        one.b.fill_(20.0)
    table = ChunkTable.of(case.offsets, SLOT_IN, SLOT_OUT, CHUNK, "cuda")
    expected, _ = case.reference()
    portable_error = error(portable(other, table), expected)
    assert error(run(case, table), expected) < max(MOST_ERROR, 1.2 * portable_error)
    assert portable_error < 4 * MOST_ERROR


def test_a_resumed_sequence_is_bit_identical() -> None:
    """From the state that was saved at a chunk's end, in a call of its own; and twice the same."""
    case = Case(16, 16, 0.3)
    length, place = LENGTHS[0], 1024
    whole = ChunkTable.of([0, length], [0], [1], CHUNK, "cuda", [[(place, 3)]])
    out = run(case, whole)
    rest = ChunkTable.of([0, length - place], [3], [6], CHUNK, "cuda")
    resumed = run(case, rest, since=place)
    assert torch.equal(resumed[: length - place], out[place:length])
    assert torch.equal(case.state[6], case.state[1])
    assert all(torch.equal(run(case, whole)[:length], out[:length]) for _ in range(5))
