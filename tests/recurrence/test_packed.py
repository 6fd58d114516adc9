"""The way to a library of packed sequences and back, with the plain torch form in the library's place."""

import math

import pytest
import torch
import torch.nn.functional as F

from denim.recurrence.backends.packed import through
from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.gated_delta import gated_delta_chunked, l2norm

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 6, 10
OFFSETS = [0, 5, 6, 17]
SLOTS = 7


def library(q, k, v, log_decay, beta, states, cu_seqlens, scale):
    """Takes what such libraries take, and refuses what they would refuse."""
    assert all(x.is_contiguous() and x.shape[0] == 1 for x in (q, k, v))
    assert log_decay.dtype == beta.dtype == states.dtype == torch.float32
    out, last = gated_delta_chunked(
        *(x[0] for x in (q, k, v, log_decay, beta)),
        cu_seqlens=cu_seqlens.tolist(),
        initial_state=states,
        scale=scale,
    )
    return out.unsqueeze(0), last


@pytest.mark.parametrize("beta_limit", [1.0, 2.0])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_same_as_the_plain_form_on_slots(beta_limit, scale):
    torch.manual_seed(0)
    tokens = OFFSETS[-1]
    q, k = l2norm(torch.randn(2, tokens, KEY_HEADS, KEY_DIM))
    v = torch.randn(tokens, HEADS, VALUE_DIM)
    b, a = torch.randn(2, tokens, HEADS)
    a_log, dt_bias = torch.rand(2, HEADS)
    state = torch.full((SLOTS, HEADS, VALUE_DIM, KEY_DIM), math.nan)
    begin = torch.randn(HEADS, VALUE_DIM, KEY_DIM)
    state[3] = begin
    # Fresh, from a slot that it does not write, and fresh again: slot 0 holds NaN, as a freed slot may.
    table = ChunkTable.of(OFFSETS, [-1, 3, -1], [1, 5, 2], 64, "cpu")
    rows = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), 1)

    out = through(
        library, rows, b, a, a_log, dt_bias, table, state, KEY_HEADS, beta_limit=beta_limit, scale=scale
    )

    initial = torch.stack((torch.zeros_like(begin), begin, torch.zeros_like(begin)))
    expected, last = gated_delta_chunked(
        q,
        k,
        v,
        -a_log.exp() * F.softplus(a + dt_bias),
        beta_limit * b.sigmoid(),
        cu_seqlens=OFFSETS,
        initial_state=initial,
        scale=scale,
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(state[[1, 5, 2]], last)
    torch.testing.assert_close(state[3], begin)
    assert state[[0, 4, 6]].isnan().all()
