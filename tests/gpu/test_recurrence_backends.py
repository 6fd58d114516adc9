"""Other libraries' prefill of the gated delta rule against Denim's own kernel, where they are installed."""

import pytest
import torch

from denim.recurrence.backend import PEERS, TRITON, installed
from denim.recurrence.backends import gated_delta_chunks_of
from denim.recurrence.chunk_table import ChunkTable
from denim.recurrence.gated_delta import l2norm

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
    unit = l2norm(torch.randn(tokens, 2 * KEY_HEADS, DIM, device="cuda")).flatten(1)
    rows = torch.cat((unit.to(**place), torch.randn(tokens, heads * DIM, **place)), 1)
    b, a = torch.randn(2, tokens, heads, **place)
    a_log, dt_bias = torch.rand(heads, device="cuda"), torch.full((heads,), -2.0, **place)
    states = torch.randn(7, heads, DIM, DIM, device="cuda") * 0.1
    table = ChunkTable.of(OFFSETS, SLOT_IN, SLOT_OUT, 64, "cuda")

    made = {}
    for form in (TRITON, peer):
        state = states.clone()
        out = gated_delta_chunks_of(form)(rows, b, a, a_log, dt_bias, table, state, KEY_HEADS, beta_limit=2.0)
        made[form] = (out.float(), state)
    for own, other in zip(made[TRITON], made[peer], strict=True):
        assert (own - other).norm() <= TOLERANCE * own.norm()
    assert torch.equal(made[peer][1][[0, 2, 5]], states[[0, 2, 5]])
