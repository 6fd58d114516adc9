"""The recurrence on a CUDA device against the float64 reference on the CPU."""

import pytest
import torch

from denim.recurrence.gated_delta import (
    gated_delta_chunked,
    gated_delta_recurrent,
    gated_delta_step,
    l2norm,
)
from denim.recurrence.selective_scan import (
    selective_scan_chunked,
    selective_scan_recurrent,
    selective_scan_step,
)
from denim.recurrence.short_conv import short_conv, short_conv_step
from tests.recurrence import cases

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BOUND = 5e-6  # as in tests/recurrence: fp32, values of the order of 1


@pytest.fixture(autouse=True)
def ieee_products():
    """TF32 would round the factors to 10 bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def inputs(tokens):
    torch.manual_seed(0)
    q, k = l2norm(torch.randn(2, tokens, 2, 32))
    gates = torch.rand(2, tokens, 6)
    return [q, k, torch.randn(tokens, 6, 48), -gates[0], gates[1]]


@pytest.mark.parametrize("cu", [[0, 1, 64, 64, 200, 330], [0, 130, 260]])
def test_rule(cu):
    x = inputs(cu[-1])
    initial = torch.randn(len(cu) - 1, 6, 48, 32)
    want = gated_delta_recurrent(*(t.double() for t in x), cu_seqlens=cu, initial_state=initial)
    leaves = [t.to(DEVICE, copy=True).requires_grad_() for t in x]
    out, final = gated_delta_chunked(*leaves, cu_seqlens=cu, initial_state=initial.to(DEVICE))
    torch.testing.assert_close(out.cpu().double(), want[0], atol=BOUND, rtol=0)
    torch.testing.assert_close(final.cpu().double(), want[1], atol=BOUND, rtol=0)
    (out.sum() + final.sum()).backward()
    references = [t.double().requires_grad_() for t in x]
    out, final = gated_delta_chunked(*references, cu_seqlens=cu, initial_state=initial)
    (out.sum() + final.sum()).backward()
    for leaf, reference in zip(leaves, references, strict=True):
        torch.testing.assert_close(leaf.grad.cpu().double(), reference.grad, atol=1e-3, rtol=1e-4)


def test_rule_by_steps():
    x = inputs(5)
    initial = torch.randn(5, 6, 48, 32)
    want = gated_delta_recurrent(*(t.double() for t in x), cu_seqlens=list(range(6)), initial_state=initial)
    for given in (initial.to(DEVICE, copy=True), list(initial.to(DEVICE, copy=True))):
        out = gated_delta_step(*(t.to(DEVICE) for t in x), given)
        torch.testing.assert_close(out.cpu().double(), want[0], atol=BOUND, rtol=0)
        for row, row_want in zip(given, want[1], strict=True):
            torch.testing.assert_close(row.cpu().double(), row_want, atol=BOUND, rtol=0)


@pytest.mark.parametrize("rule", cases.RULES.values(), ids=cases.RULES)
@pytest.mark.parametrize("decay", cases.DECAYS)
@pytest.mark.parametrize("states_at", [None, cases.POSITIONS])
def test_every_decay(rule, decay, states_at):
    lengths = cases.RAGGED
    args, initial = cases.inputs(rule, decay, sum(lengths), dtype=torch.float32), cases.states(len(lengths))
    cu = cases.offsets(lengths)
    want = rule.recurrent(*cases.in_double(args), cu_seqlens=cu, initial_state=initial, states_at=states_at)
    args = [x if x is None else x.to(DEVICE) for x in args]
    initial = initial.float().to(DEVICE)
    out, states = rule.chunked(*args, cu_seqlens=cu, initial_state=initial, states_at=states_at)
    cases.assert_close((out.cpu().double(), states.cpu().double()), want, BOUND)
    token = cases.part(args, 0, len(lengths))
    want = rule.recurrent(*token, cu_seqlens=range(len(lengths) + 1), initial_state=initial)
    out = rule.step(*token, initial)
    cases.assert_close((out, initial), want, BOUND)


@pytest.mark.parametrize("states_at", [None, cases.POSITIONS])
def test_selective_scan(states_at):
    torch.manual_seed(0)
    tokens, sequences = sum(cases.RAGGED), len(cases.RAGGED)
    x, delta = torch.randn(tokens, 20), torch.rand(tokens, 20)
    A, B, C, D = -4 * torch.rand(20, 8), torch.randn(tokens, 8), torch.randn(tokens, 8), torch.randn(20)
    args, initial = (x, delta, A, B, C, D), torch.randn(sequences, 20, 8)
    run = {"cu_seqlens": cases.offsets(cases.RAGGED), "states_at": states_at}
    want = selective_scan_recurrent(*cases.in_double(args), **run, initial_state=initial.double())
    on_device = [t.to(DEVICE) for t in args]
    y, states = selective_scan_chunked(*on_device, **run, initial_state=initial.to(DEVICE))
    cases.assert_close((y.cpu().double(), states.cpu().double()), want, BOUND)
    x, delta, A, B, C, D = on_device
    some = slice(0, sequences)
    token, state = (x[some], delta[some], A, B[some], C[some], D), initial.to(DEVICE)
    want = selective_scan_recurrent(*token, cu_seqlens=range(sequences + 1), initial_state=state)
    cases.assert_close((selective_scan_step(*token, state), state), want, BOUND)


@pytest.mark.parametrize("cu", [[0, 1, 4, 4, 70], [0, 9, 18]])
def test_convolution(cu):
    torch.manual_seed(0)
    x, weight = torch.randn(cu[-1], 20), torch.randn(20, 4)
    window = torch.randn(len(cu) - 1, 3, 20)
    want = short_conv(x.double(), weight.double(), cu_seqlens=cu, window=window.double())
    got = short_conv(x.to(DEVICE), weight.to(DEVICE), cu_seqlens=cu, window=window.to(DEVICE))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, atol=BOUND, rtol=0)
    past = got[1].clone()
    y = short_conv_step(x[: len(past)].to(DEVICE), weight.to(DEVICE), past)
    rows = torch.cat((want[1], x[: len(past), None].double()), 1)
    torch.testing.assert_close(y.cpu().double(), (rows * weight.double().t()).sum(1), atol=BOUND, rtol=0)
    assert torch.equal(past.cpu().double(), rows[:, 1:])
