"""What Hopper's kernel makes of KDA's chunks, against the portable kernels and float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.kernels.delta_pass import ChunkTerms
from denim.recurrence.kernels.hopper_kimi_chunks import kimi_chunk_terms, suits
from denim.recurrence.kernels.kimi_delta_chunks import chunk_terms
from tests.gpu.test_delta_prefill import CHUNK, DIM, SLOT_IN, SLOT_OUT, Case, error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper"
    ),
]

HEADS = 16
# The same products, of operands of 11 bits in both; sums in another order.
CLOSE = 5e-4


def both(case: Case, floor: float | None) -> tuple[ChunkTerms, ChunkTerms, Tensor]:
    """(Hopper's, the portable ones, which tokens of the chunks there are, [M, C])."""
    saves = [[(100, 6), (1024, 3)], [], [(70, 7)]]  # so that chunks are of every length
    table = ChunkTable.of(case.offsets, SLOT_IN, SLOT_OUT, CHUNK, "cuda", saves)
    assert suits(case.rows, case.gate, table, case.state)
    inputs = (case.rows, case.b, case.gate, case.a_log, case.bias, table, HEADS, floor, DIM**-0.5)
    live = torch.arange(CHUNK, device="cuda") < table.chunks[:, 2:]
    return kimi_chunk_terms(*inputs), chunk_terms(*inputs), live


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("floor", [None, -5.0], ids=["softplus", "floor"])
@pytest.mark.parametrize("decay", [1e-3, 0.3, 30.0], ids=["weak", "middling", "strong"])
def test_gives_what_the_portable_kernels_give(decay: float, floor: float | None, dtype: torch.dtype) -> None:
    case = Case(HEADS, HEADS, decay, vector=True)
    case.rows, case.gate = case.rows.to(dtype), case.gate.to(dtype)
    case.rows = torch.cat((case.rows, torch.full_like(case.rows[:64], torch.nan)))  # behind the last token
    hopper, portable, live = both(case, floor)
    for name in ("solve", "scores", "keys", "queries", "later"):
        mine, theirs = (getattr(terms, name).transpose(1, 2)[live] for terms in (hopper, portable))
        assert error(mine, theirs.double()) < CLOSE, name
    torch.testing.assert_close(hopper.left, portable.left, atol=1e-6, rtol=1e-4)
    strengths = (terms.strength.transpose(1, 2)[live] for terms in (hopper, portable))
    torch.testing.assert_close(*strengths, atol=1e-6, rtol=1e-5)


def test_behind_a_chunk_nothing_is_read_or_written() -> None:
    case = Case(HEADS, HEADS, 0.3, vector=True)
    hopper, _, live = both(case, None)
    for name in ("keys", "queries", "later", "strength"):
        assert not getattr(hopper, name).transpose(1, 2)[~live].any(), name
    unit = torch.eye(CHUNK, dtype=case.rows.dtype, device="cuda")[(~live).nonzero()[:, 1]]
    solve = hopper.solve.transpose(1, 2)[~live]
    assert torch.equal(solve, unit[:, None].expand_as(solve))
