"""Other libraries' prefill of the gated delta rule against Denim's own kernel, where they are installed."""

import pytest
import torch

from denim.recurrence.backend import PEERS, installed
from denim.recurrence.backends import gated_delta_by
from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.gated_delta import l2norm
from denim.recurrence.kernels.gated_delta_chunks import gated_delta_chunks

pytestmark = pytest.mark.gpu

OFFSETS = [0, 5, 700, 701, 2000]
SLOT_IN, SLOT_OUT = [-1, 2, 6, -1], [1, 3, 6, 4]
KEY_HEADS, DIM = 16, 128
# Of bf16 outputs and of states: rounding of operands to bf16, in another order.
TOLERANCE = 2e-2


@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_gives_what_the_own_kernel_gives(peer: str, heads: int) -> None:
    if not installed(peer):
        pytest.skip(f"{peer} is not installed")
    torch.manual_seed(0)
    tokens = OFFSETS[-1]
    place = {"device": "cuda", "dtype": torch.bfloat16}
    q, k = l2norm(torch.randn(2, tokens, KEY_HEADS, DIM, device="cuda")).to(**place)
    v = torch.randn(tokens, heads, DIM, **place)
    gates = (*torch.randn(2, tokens, heads, **place), torch.rand(heads, device="cuda"))
    dt_bias = torch.full((heads,), -2.0, **place)
    states = torch.randn(7, heads, DIM, DIM, device="cuda") * 0.1
    table = ChunkTable.of(OFFSETS, SLOT_IN, SLOT_OUT, 64, "cuda")

    rest = (*gates, dt_bias, table)
    own_state, state = states.clone(), states.clone()
    rows = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), 1)
    own = gated_delta_chunks(rows, *rest, own_state, KEY_HEADS, beta_limit=2.0)
    parts = torch.cat((q.flatten(), k.flatten(), v.flatten()))
    out = gated_delta_by(peer)(parts, *rest, state, KEY_HEADS, beta_limit=2.0)

    for expected, made in ((own.float(), out.float()), (own_state, state)):
        assert (expected - made).norm() <= TOLERANCE * expected.norm()
    untouched = [0, 2, 5]
    assert torch.equal(state[untouched], states[untouched])
