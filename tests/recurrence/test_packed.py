"""The way to a library of packed sequences and back, with the plain torch form in the library's place."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from denim.recurrence.backend import PEERS
from denim.recurrence.backends import gated_delta_by
from denim.recurrence.backends.packed import through
from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.gated_delta import gated_delta_chunked, l2norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 6, 10
OFFSETS = [0, 5, 6, 17]
SLOTS = 7


def library(packed):
    """Takes what such libraries take, and refuses what they would refuse."""
    assert all(x.is_contiguous() and x.shape[0] == 1 for x in packed[:5])
    assert packed.decay.dtype == packed.beta.dtype == packed.states.dtype == torch.float32
    assert packed.longest >= max(end - begin for begin, end in pairwise(OFFSETS))
    out, last = gated_delta_chunked(
        *(x[0] for x in packed[:5]),
        cu_seqlens=packed.cu_seqlens.tolist(),
        initial_state=packed.states,
        scale=packed.scale,
    )
    return out.unsqueeze(0), last


@pytest.mark.parametrize("beta_limit", [1.0, 2.0])
def test_same_as_the_plain_form_on_slots(beta_limit):
    torch.manual_seed(0)
    tokens = OFFSETS[-1]
    q, k = l2norm(torch.randn(2, tokens, KEY_HEADS, KEY_DIM, device=DEVICE))
    v = torch.randn(tokens, HEADS, VALUE_DIM, device=DEVICE)
    b, a = torch.randn(2, tokens, HEADS, device=DEVICE)
    a_log, dt_bias = torch.rand(2, HEADS, device=DEVICE)
    state = torch.full((SLOTS, HEADS, VALUE_DIM, KEY_DIM), math.nan, device=DEVICE)
    begin = torch.randn(HEADS, VALUE_DIM, KEY_DIM, device=DEVICE)
    state[3] = begin
    # Fresh, from a slot that it does not write, and fresh again: slot 0 holds NaN, as a freed slot may.
    table = ChunkTable.of(OFFSETS, [-1, 3, -1], [1, 5, 2], 8, DEVICE)
    parts = torch.cat((q.flatten(), k.flatten(), v.flatten()))

    out = through(library, parts, b, a, a_log, dt_bias, table, state, KEY_HEADS, beta_limit=beta_limit)

    initial = torch.stack((torch.zeros_like(begin), begin, torch.zeros_like(begin)))
    expected, last = gated_delta_chunked(
        q,
        k,
        v,
        -a_log.exp() * F.softplus(a + dt_bias),
        beta_limit * b.sigmoid(),
        cu_seqlens=OFFSETS,
        initial_state=initial,
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(state[[1, 5, 2]], last)
    torch.testing.assert_close(state[3], begin)
    assert state[[0, 4, 6]].isnan().all()


@pytest.mark.parametrize("peer", PEERS)
def test_every_peer_has_its_file(peer):
    assert gated_delta_by(peer).keywords["log_decay"] in (True, False)
