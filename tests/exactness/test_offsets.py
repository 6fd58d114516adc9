"""Tokens and slots whose place in memory passes 2^31 elements.

Rows lie so far apart that a few of them span a large buffer; what is not touched takes no memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from denim.engine.core import EngineCore
from denim.memory.layout import SLOT
from denim.recurrence.kernels.delta_inputs import DeltaInputs
from denim.recurrence.kernels.fused_delta_step import fused_delta_step
from denim.recurrence.short_conv import short_conv
from denim.sampling_params import SamplingParams
from tests.exactness.conftest import Model
from tests.exactness.harness import Case, Way, make_core, tokens_of
from tests.tiny import VOCAB

pytestmark = pytest.mark.slow

FAR = 2**31  # elements: the first offset that a signed 32-bit number does not hold
BF16 = {"dtype": "bfloat16", "state_dtype": "bfloat16"}


def spread(rows: Tensor, pitch: int) -> Tensor:
    """The same rows, `pitch` elements apart."""
    size = rows[0].numel()
    buffer = torch.empty((len(rows) - 1) * pitch + size, dtype=rows.dtype)
    view = buffer.as_strided(rows.shape, (pitch, *rows[0].contiguous().stride()))
    return view.copy_(rows)


@pytest.mark.parametrize("pitch", [FAR // 2, FAR])
@pytest.mark.parametrize("cu_seqlens", [[0, 3], [0, 1, 3]])
def test_convolution_of_tokens_far_apart(pitch: int, cu_seqlens: list[int]) -> None:
    """LC-04, LC-05: the last token is read where it lies, beyond 2^31 and 2^32 elements."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 24).bfloat16(), torch.randn(24, 4).bfloat16()
    far = spread(x, pitch)
    assert far[-1].storage_offset() == 2 * pitch
    for ours, expected in zip(
        short_conv(far, weight, cu_seqlens=cu_seqlens),
        short_conv(x, weight, cu_seqlens=cu_seqlens),
        strict=True,
    ):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("what", ["tokens", "slots"])
def test_fused_step_far_apart(what: str) -> None:
    """LC-03, LC-06: the kernel's offsets of a token's row, of a window and of a state."""
    torch.manual_seed(0)
    key_heads, heads, key_dim, value_dim = 2, 4, 16, 12
    channels = 2 * key_heads * key_dim + heads * value_dim
    projected = torch.randn(3, channels + heads * value_dim + 2 * heads)
    projected, window = projected.bfloat16(), torch.randn(3, 3, channels).bfloat16()
    state = torch.randn(3, heads, value_dim, key_dim).bfloat16()
    parts = torch.randn(4, channels).bfloat16(), torch.randn(heads), torch.randn(heads), torch.ones(value_dim)

    def step(projected: Tensor, window: Tensor, state: Tensor) -> Tensor:
        slots = torch.tensor([2, 0, 1])
        arrivals = torch.zeros(3, key_heads, dtype=torch.int32)
        token = projected.split((channels, heads * value_dim, heads, heads), dim=1)
        return fused_delta_step(DeltaInputs(*token, *parts, 1e-6, slots, window, state), arrivals)

    if what == "tokens":
        places = spread(projected, FAR // 2), window.clone(), state.clone()
    else:
        places = projected, spread(window, FAR // 2), spread(state, FAR // 2)
    expected = step(projected, window, state)
    assert torch.equal(step(*places), expected)
    assert torch.equal(places[1], window) and torch.equal(places[2], state)


def displaced_once(core: EngineCore, case: Case) -> list[Any]:
    """Tokens and reports of a request that is moved to the host and back after some tokens."""
    output = core.requests[core.add(*case)].output.outputs[0]
    while len(output.token_ids) < 5:
        core.step()
    core.add([1, 2], SamplingParams(max_tokens=2), priority=-1)
    while core.has_work:
        core.step()
    assert core.stats()["preempted_swap"] == 1
    return [output.token_ids, output.logprobs]


def test_a_request_in_the_last_slot(dense: Model) -> None:
    """LC-06: the same bits as in the first slot; another holds all slots below."""
    case = Case(tokens_of(70, 0, VOCAB), SamplingParams(temperature=0, max_tokens=20, logprobs=1))
    way = Way(options={**BF16, "max_num_seqs": 1, "debug": False}, swap=True)
    near = make_core(dense.folder, [case], way)
    slabs = FAR * torch.bfloat16.itemsize // near.layout.slab_bytes + 6
    core = make_core(dense.folder, [case], Way(way.options, slabs=slabs, swap=True))
    size = core.layout.size_class(SLOT)
    held = core.arena.alloc_many(SLOT, (slabs - 5) * size.count)
    slot = core.arena.alloc(SLOT)
    assert core.runner.storage.state(0, "recurrent")[slot].storage_offset() >= FAR
    core.arena.release(SLOT, [slot])
    assert displaced_once(core, case) == displaced_once(near, case)
    core.arena.release(SLOT, held)
    core.check()
    assert core.stats()["slabs"]["used"] == 0
