"""Prefill of the delta rules at real sizes in bf16 against float64: what tests of small sizes cannot show."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.gated_delta import gated_delta_chunked, l2norm
from denim.recurrence.kernels.delta_pass import PassPlan, plan_of
from denim.recurrence.kernels.gated_delta_chunks import gated_delta_chunks
from denim.recurrence.kernels.kimi_delta_chunks import kimi_delta_chunks

pytestmark = pytest.mark.gpu

DIM, CHUNK, SLOTS = 128, 64, 8
LENGTHS, SLOT_IN, SLOT_OUT = [3000, 64, 777], [0, -1, 2], [0, 4, 5]
# Root mean square of the error against that of the values: operands of 8 bits, more of them with weak decay.
MOST_ERROR = 5e-3
# By decay, of outputs and of states: 5 to 15% above what an emulation of the kernels' roundings gives. One
# more rounding on a value's way through a chunk is above it. So is fla, but for states under strong decay:
# they meet one rounding in both.
MOST_BY_DECAY = {1e-6: (4.15e-3, 3.5e-3), 0.3: (3.2e-3, 2.4e-3), 30.0: (2.6e-3, 1.9e-3)}


class Case:
    """Sequences of one layer on the GPU; log-decays are about -decay."""

    def __init__(self, key_heads: int, heads: int, decay: float, *, vector: bool = False) -> None:
        generator = torch.Generator(device="cuda").manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device="cuda")

        tokens, self.key_heads, self.heads, self.vector = sum(LENGTHS), key_heads, heads, vector
        qk = l2norm(randn(tokens, 2 * key_heads, DIM)).flatten(1)
        self.rows = torch.cat((qk, randn(tokens, heads * DIM)), 1).bfloat16()
        self.b = randn(tokens, heads).bfloat16()
        self.gate = randn(tokens, heads * (DIM if vector else 1)).bfloat16()
        self.a_log = torch.full((heads,), decay, device="cuda").log()
        self.bias = torch.zeros(self.gate.shape[1], device="cuda")
        self.state = 0.1 * randn(SLOTS, heads, DIM, DIM)
        self.offsets = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]

    def reference(self) -> tuple[Tensor, Tensor]:
        keys = self.key_heads * DIM
        q, k, v = self.rows.double().split((keys, keys, self.heads * DIM), 1)
        gate = self.gate.double().unflatten(1, (self.heads, -1))
        log_decay = -self.a_log.double().exp()[:, None] * F.softplus(gate)
        begin = torch.stack([self.state[slot] * (slot >= 0) for slot in SLOT_IN]).double()
        return gated_delta_chunked(
            *(x.unflatten(1, (-1, DIM)) for x in (q, k, v)),
            log_decay if self.vector else log_decay.squeeze(2),
            self.b.double().sigmoid(),
            cu_seqlens=self.offsets,
            initial_state=begin,
            chunk_size=CHUNK,
        )

    def run(self, table: ChunkTable, plan: PassPlan | None = None, since: int = 0) -> Tensor:
        rows, b, gate = (x[since:] for x in (self.rows, self.b, self.gate))
        if self.vector:
            return kimi_delta_chunks(rows, b, gate, self.a_log, self.bias, table, self.state, plan=plan)
        return gated_delta_chunks(
            rows, b, gate, self.a_log, self.bias, table, self.state, self.key_heads, plan=plan
        )


def error(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.double() - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("decay", MOST_BY_DECAY, ids=["weak", "middling", "strong"])
@pytest.mark.parametrize("kind", ["16 of 16", "16 of 32", "kimi"])
def test_error_against_float64(kind: str, decay: float) -> None:
    case = Case(16, 32 if "32" in kind else 16, decay, vector=kind == "kimi")
    expected, states = case.reference()
    out = case.run(ChunkTable.of(case.offsets, SLOT_IN, SLOT_OUT, CHUNK, "cuda"))
    most_of_outputs, most_of_states = MOST_BY_DECAY[decay]
    assert error(out, expected) < most_of_outputs
    assert error(case.state[SLOT_OUT], states) < most_of_states


@pytest.mark.parametrize("span", [4, 13])
def test_segments_agree_with_one_walk(span: int) -> None:
    case = Case(16, 16, 0.3)
    table = ChunkTable.of(case.offsets, SLOT_IN, [1, 4, 5], CHUNK, "cuda")
    plan = plan_of(table, case.state, torch.bfloat16)
    whole = case.run(table, plan._replace(span=0))
    assert error(case.run(table, plan._replace(span=span)), whole.double()) < MOST_ERROR


def test_a_resumed_sequence_is_bit_identical() -> None:
    """From the state that was saved at a chunk's end, in a call of its own."""
    case = Case(16, 16, 0.3)
    length, place = LENGTHS[0], 1024
    whole = ChunkTable.of([0, length], [0], [1], CHUNK, "cuda", [[(place, 3)]])
    plan = plan_of(whole, case.state, torch.bfloat16)._replace(span=0)
    out = case.run(whole, plan)
    rest = ChunkTable.of([0, length - place], [3], [6], CHUNK, "cuda")
    resumed = case.run(rest, plan, since=place)
    assert torch.equal(resumed[: length - place], out[place:length])
    assert torch.equal(case.state[6], case.state[1])
