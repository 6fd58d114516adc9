"""The gates as one kernel against torch, in Triton's interpreter on the CPU."""

import pytest
import torch
import torch.nn.functional as F

from denim.recurrence.kernels.delta_gates import delta_gates

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("as_log", [True, False])
@pytest.mark.parametrize("tokens", [1, 700])
def test_same_as_torch(tokens, as_log):
    torch.manual_seed(0)
    heads = 6
    rows = torch.randn(tokens, 3 * heads, device=DEVICE) * 10  # softplus in both of its forms
    b, a = rows[:, :heads], rows[:, heads : 2 * heads]  # as the projection gives them
    a_log, dt_bias = torch.randn(2, heads, device=DEVICE)
    decay, beta = delta_gates(b, a, a_log, dt_bias, 2.0, as_log=as_log)
    expected = -a_log.exp() * F.softplus(a + dt_bias)
    torch.testing.assert_close(decay, expected if as_log else expected.exp(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(beta, 2.0 * b.sigmoid())
