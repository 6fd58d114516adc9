"""The chunked prefill kernels of KDA against the recurrence in float64; on the CPU interpreted."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.gated_delta import gated_delta_recurrent, l2norm
from denim.recurrence.kernels.delta_pass import PassPlan
from denim.recurrence.kernels.kimi_delta_chunks import kimi_delta_chunks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NARROW = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies bf16 as integers
# Of one rounding: root mean square of the error against that of the values, which are normal.
ROUNDING = 0.213 * torch.finfo(NARROW).eps
MOST_ERROR = 6e-3
SLOTS = 12


def check(
    lengths: list[int],
    slot_in: list[int],
    slot_out: list[int],
    saves: list[list[tuple[int, int]]] | None = None,
    *,
    sizes: tuple[int, int, int] = (2, 16, 16),
    dtype: torch.dtype = torch.float32,
    size: int = 16,
    decay: float = 1.0,
    decay_floor: float | None = None,
    plan: PassPlan | None = None,
    most: tuple[float, float] = (MOST_ERROR, MOST_ERROR),
) -> None:
    """Outputs and every slot. sizes: heads, d_k, d_v; decay multiplies the log-decays; most: error in 16 bits
    of outputs and of states. Unread slots: NaN."""
    heads, key_dim, value_dim = sizes
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tokens = sum(lengths)
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    qk = l2norm(randn(tokens, 2 * heads, key_dim)).flatten(1)
    rows = torch.cat((qk, randn(tokens, heads * value_dim)), 1).to(dtype)
    gates = randn(tokens, heads * (key_dim + 1) + 3).to(dtype)
    b, f = gates[:, :heads], gates[:, heads : heads * (key_dim + 1)]
    a_log, dt_bias = torch.tensor(decay).log() + 0.5 * randn(heads), randn(heads * key_dim)
    state = torch.full((SLOTS, heads + 1, value_dim, key_dim), float("nan"))
    for slot in slot_in:
        if slot >= 0:
            state[slot, :heads] = 0.3 * randn(heads, value_dim, key_dim)

    wide = rows.double().split((heads * key_dim, heads * key_dim, heads * value_dim), 1)
    q, k, v = (x.unflatten(1, (heads, -1)) for x in wide)
    biased = (f.double() + dt_bias.double()).unflatten(1, (heads, key_dim))
    rate = a_log.double().exp().unsqueeze(1)
    log_decay = -rate * F.softplus(biased) if decay_floor is None else decay_floor * (rate * biased).sigmoid()
    expected, wanted = [], state.double()
    for n, (first, end) in enumerate(pairwise(offsets)):
        places = [*(saves[n] if saves else ()), (end - first, slot_out[n])]
        out, found = gated_delta_recurrent(
            *(x[first:end] for x in (q, k, v, log_decay, b.double().sigmoid())),
            cu_seqlens=[0, end - first],
            initial_state=state[slot_in[n], :heads][None].double() if slot_in[n] >= 0 else None,
            states_at=[[place for place, _ in places]],
        )
        expected.append(out)
        for (_, slot), one in zip(places, found, strict=True):
            if slot >= 0:
                wanted[slot, :heads] = one

    slots = state.to(DEVICE)
    out = kimi_delta_chunks(
        *(x.to(DEVICE) for x in (rows, b, f, a_log, dt_bias)),
        ChunkTable.of(offsets, slot_in, slot_out, size, DEVICE, saves),
        slots[:, :heads],
        decay_floor=decay_floor,
        plan=plan,
    )
    assert torch.equal(slots.cpu().isnan(), wanted.isnan())
    both = ((out, torch.cat(expected)), (slots.nan_to_num(), wanted.nan_to_num()))
    for (mine, theirs), bound in zip(both, most, strict=True):
        mine = mine.cpu().double()
        if dtype == torch.float32:
            torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5)
        else:
            assert (mine - theirs).norm() <= bound * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("sizes", [(2, 16, 16), (1, 24, 40), (1, 16, 32)], ids=str)
def test_fresh_and_carried_sequences_of_different_lengths(
    sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    check([5, 33, 1, 16], [-1, 3, 2, -1], [1, 3, 5, 6], sizes=sizes, dtype=dtype)


@pytest.mark.parametrize(("size", "dtype"), [(1, torch.float32), (32, torch.float32), (64, NARROW)])
def test_any_chunk_size(size: int, dtype: torch.dtype) -> None:
    check([70, 3], [4, -1], [4, 2], size=size, dtype=dtype)


def test_saved_states_and_padding() -> None:
    check([37, 32, 4], [4, -1, 5], [7, 1, -1], [[(1, 9), (20, 10)], [(16, 11)], []])


@pytest.mark.parametrize("decay", [1e-8, 1e4], ids=["none", "strong"])
@pytest.mark.parametrize("dtype", [torch.float32, NARROW], ids=["wide", "narrow"])
def test_weak_and_strong_decay(decay: float, dtype: torch.dtype) -> None:
    check([50], [4], [4], dtype=dtype, decay=decay)


def test_strong_decay_leaves_a_value_few_roundings() -> None:
    """beta v on its way into the state; the score and the output itself on its way out. A second one of the
    state, or a third of the output, would be seen."""
    most = 2.5**0.5 * ROUNDING, 1.5**0.5 * ROUNDING
    check([128], [4], [4], sizes=(8, 32, 32), dtype=NARROW, size=64, decay=1e4, most=most)


def test_decay_with_a_floor() -> None:
    """Ling-3.0."""
    check([40], [4], [4], decay_floor=-5.0)


@pytest.mark.parametrize("span", [1, 2])
def test_segments_in_parallel(span: int) -> None:
    plan = PassPlan(rows=16, warps=4, stages=1, span=span)
    check([75, 5, 64], [4, -1, 5], [4, 2, 1], [[(20, 10), (70, 9)], [], []], plan=plan)
