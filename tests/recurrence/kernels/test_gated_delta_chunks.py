"""The chunked prefill kernels of Gated DeltaNet against the recurrence in float64; on the CPU interpreted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.gated_delta import gated_delta_recurrent, l2norm
from denim.recurrence.kernels.delta_pass import PassPlan
from denim.recurrence.kernels.gated_delta_chunks import gated_delta_chunks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NARROW = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies bf16 as integers
# Of one rounding: root mean square of the error against that of the values, which are normal.
ROUNDING = 0.213 * torch.finfo(NARROW).eps
SLOTS = 12
Saves = Sequence[Sequence[tuple[int, int]]]


@dataclass
class Case:
    """Sequences of one layer. Slots that no sequence begins from hold NaN."""

    key_heads: int
    rows: Tensor
    b: Tensor
    a: Tensor
    a_log: Tensor
    dt_bias: Tensor
    state: Tensor
    offsets: list[int]
    slot_in: list[int]
    slot_out: list[int]
    saves: Saves | None = None
    size: int = 16
    beta_limit: float = 1.0

    @classmethod
    def random(
        cls,
        lengths: list[int],
        slot_in: list[int],
        slot_out: list[int],
        saves: Saves | None = None,
        *,
        sizes: tuple[int, int, int, int] = (1, 2, 16, 16),
        dtype: torch.dtype = torch.float32,
        decay: float = 1.0,
        **options: float,
    ) -> Case:
        """sizes: key heads, value heads for each, d_k, d_v; decay multiplies the log-decays."""
        key_heads, group, key_dim, value_dim = sizes
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        heads, tokens = key_heads * group, sum(lengths)
        offsets = [0]
        for length in lengths:
            offsets.append(offsets[-1] + length)
        qk = l2norm(randn(tokens, 2 * key_heads, key_dim)).flatten(1)
        gates = randn(tokens, 2 * heads + 3).to(dtype)
        state = torch.full((SLOTS, heads, value_dim, key_dim), float("nan"))
        for slot in slot_in:
            if slot >= 0:
                state[slot] = 0.3 * randn(heads, value_dim, key_dim)
        return cls(
            key_heads,
            torch.cat((qk, randn(tokens, heads * value_dim)), 1).to(dtype),
            gates[:, :heads],
            gates[:, heads : 2 * heads],
            torch.tensor(decay).log() + 0.5 * randn(heads),
            randn(heads).to(dtype),
            state,
            offsets,
            slot_in,
            slot_out,
            saves,
            **options,
        )

    def reference(self) -> tuple[Tensor, Tensor]:
        """Outputs [T, Hv, d_v] and states in their slots, float64."""
        heads, value_dim, key_dim = self.state.shape[1:]
        keys = self.key_heads * key_dim
        q, k, v = self.rows.double().split((keys, keys, heads * value_dim), 1)
        q, k = (x.unflatten(1, (self.key_heads, key_dim)) for x in (q, k))
        softplus = F.softplus(self.a.double() + self.dt_bias.double())
        log_decay, beta = -self.a_log.double().exp() * softplus, self.beta_limit * self.b.double().sigmoid()
        states = self.state.double()
        outs = []
        for n, (first, end) in enumerate(pairwise(self.offsets)):
            wanted = [*(self.saves[n] if self.saves else ()), (end - first, self.slot_out[n])]
            begin = self.state[self.slot_in[n]][None].double() if self.slot_in[n] >= 0 else None
            out, found = gated_delta_recurrent(
                *(x[first:end] for x in (q, k, v.unflatten(1, (heads, value_dim)), log_decay, beta)),
                cu_seqlens=[0, end - first],
                initial_state=begin,
                states_at=[[tokens for tokens, _ in wanted]],
            )
            outs.append(out)
            for (_, slot), one in zip(wanted, found, strict=True):
                if slot >= 0:
                    states[slot] = one
        return torch.cat(outs), states

    def run(self, plan: PassPlan | None = None) -> tuple[Tensor, Tensor]:
        """On states with gaps between slots, as the arena gives them."""
        slots, heads, *shape = self.state.shape
        gaps = torch.full((slots, heads + 1, *shape), float("nan"), device=DEVICE)
        state = gaps[:, :-1]
        state.copy_(self.state)
        found = replace(self, state=state).run_in_place(plan)
        assert gaps[:, -1].isnan().all()
        return found

    def run_in_place(self, plan: PassPlan | None = None) -> tuple[Tensor, Tensor]:
        tensors = [x.to(DEVICE) for x in (self.rows, self.b, self.a, self.a_log, self.dt_bias)]
        table = ChunkTable.of(self.offsets, self.slot_in, self.slot_out, self.size, DEVICE, self.saves)
        out = gated_delta_chunks(
            *tensors, table, self.state, self.key_heads, beta_limit=self.beta_limit, plan=plan
        )
        return out.cpu(), self.state.cpu()


def assert_near(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    """fp32: to rounding. Else the root mean square of the error against that of the values."""
    assert torch.equal(found[1].isnan(), expected[1].isnan())
    for mine, theirs in zip(found, expected, strict=True):
        mine, theirs = mine.double().nan_to_num(), theirs.nan_to_num()
        if dtype == torch.float32:
            torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5)
        else:
            # 6.5e-3 on an H200 for a state that never fades; one rounding of an input is 2e-3
            assert (mine - theirs).norm() <= 8e-3 * theirs.norm()


# Key heads, value heads for each, d_k, d_v; Qwen3.5's own where a GPU makes it quick.
SIZES = [(2, 1, 16, 16), (1, 3, 24, 40), (1, 2, 16, 32)]
if DEVICE == "cuda":
    SIZES += [(16, 1, 128, 128), (16, 2, 128, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_fresh_and_carried_sequences_of_different_lengths(
    sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    case = Case.random([5, 33, 1, 16], [-1, 3, 2, -1], [1, 3, 5, 6], sizes=sizes, dtype=dtype)
    assert_near(case.run(), case.reference(), dtype)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(1, torch.float32), (2, NARROW), (16, torch.float32), (32, torch.float32), (64, NARROW)],
)
def test_any_chunk_size(size: int, dtype: torch.dtype) -> None:
    case = Case.random([70, 3], [4, -1], [4, 2], size=size, dtype=dtype)
    assert_near(case.run(), case.reference(), dtype)


def test_saved_states_and_padding() -> None:
    saves = [[(1, 9), (20, 10)], [(16, 11)], []]
    case = Case.random([37, 32, 4], [4, -1, 5], [7, 1, -1], saves)
    assert_near(case.run(), case.reference(), torch.float32)


@pytest.mark.parametrize("decay", [1e-8, 1e4], ids=["none", "strong"])
@pytest.mark.parametrize("dtype", [torch.float32, NARROW], ids=["wide", "narrow"])
def test_weak_and_strong_decay(decay: float, dtype: torch.dtype) -> None:
    case = Case.random([80], [4], [4], dtype=dtype, decay=decay, beta_limit=2.0)
    assert_near(case.run(), case.reference(), dtype)


def test_strong_decay_leaves_a_value_few_roundings() -> None:
    """beta v on its way into the state; the score and the output itself on its way out. A second one of the
    state, or a third of the output, would be seen."""
    case = Case.random([128], [4], [4], sizes=(8, 1, 32, 32), dtype=NARROW, size=64, decay=1e4)
    for roundings, mine, theirs in zip((2, 1), case.run(), case.reference(), strict=True):
        error = (mine.double() - theirs).nan_to_num().norm() / theirs.nan_to_num().norm()
        assert error < (roundings + 0.5) ** 0.5 * ROUNDING


def test_equal_keys() -> None:
    """A is full of ones: a series of its powers would need binomials."""
    case = Case.random([64], [4], [4], size=32, decay=1e-8)
    case.rows[:, 16:32] = case.rows[:1, 16:32]
    case.b.fill_(20.0)
    assert_near(case.run(), case.reference(), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("span", [1, 2, 3])
def test_segments_in_parallel(span: int, dtype: torch.dtype) -> None:
    saves = [[(20, 10), (70, 9)], [], [], []]
    case = Case.random(
        [75, 5, 90, 64], [4, -1, -1, 5], [4, 2, 3, 1], saves, sizes=(1, 2, 16, 32), dtype=dtype
    )
    plan = PassPlan(rows=16, warps=4, stages=1, span=span)
    assert_near(case.run(plan), case.reference(), dtype)


def test_a_resumed_sequence_is_bit_identical() -> None:
    """From the state saved at a chunk's end, in a call of its own."""
    whole = Case.random([64], [4], [7], [[(32, 9)]], dtype=NARROW)
    out, states = whole.run()
    rest = replace(
        whole,
        **{name: getattr(whole, name)[32:] for name in ("rows", "b", "a")},
        offsets=[0, 32],
        slot_in=[9],
        saves=None,
        state=states,
    )
    resumed, after = rest.run()
    assert torch.equal(resumed, out[32:])
    assert torch.equal(after[7], states[7])


@pytest.mark.slow
def test_slots_beyond_32_bits() -> None:
    """A slot whose offset passes 2^31 elements is read and written where it lies."""
    near = Case.random([20, 20], [0, 2], [1, 2], [[(16, 3)], []])
    near.state = near.state[:4].to(DEVICE)
    far = replace(near, state=spread(near.state))
    (out, state), (expected, wanted) = far.run_in_place(), near.run_in_place()
    assert torch.equal(out, expected)
    assert torch.equal(state.nan_to_num(), wanted.nan_to_num())


def spread(rows: Tensor, pitch: int = 2**30 + 64) -> Tensor:
    """The same rows, `pitch` elements apart; what is not touched takes no memory."""
    size = rows[0].numel()
    buffer = torch.empty((len(rows) - 1) * pitch + size, dtype=rows.dtype, device=DEVICE)
    return buffer.as_strided(rows.shape, (pitch, *rows[0].stride())).copy_(rows)
