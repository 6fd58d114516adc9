"""What does not fit is refused by name in every form of every rule; nothing is broadcast or cut by chance."""

import math

import pytest
import torch

from denim.recurrence.operands import check_operands, whole_numbers
from denim.recurrence.selective_scan import (
    selective_scan_chunked,
    selective_scan_recurrent,
    selective_scan_step,
)
from denim.recurrence.short_conv import short_conv, short_conv_step
from tests.recurrence.cases import RULES, inputs, states

TOKENS = 6


def test_a_name_means_one_size():
    x, y = torch.zeros(6, 2), torch.zeros(2, 6)
    assert check_operands(x=(x, "T C"), y=(y, "C T")) == {"T": 6, "C": 2}
    with pytest.raises(ValueError, match=r"y must be \[T, C\] = \[6, 2\]; got \[2, 6\]"):
        check_operands(x=(x, "T C"), y=(y, "T C"))
    with pytest.raises(ValueError, match=r"x must be \[T, H, C\]; got \[6, 2\]"):
        check_operands(x=(x, "T H C"))
    assert check_operands(x=(x[:0], "T C"))["T"] == 0
    with pytest.raises(ValueError, match=r"of which T alone may be 0; got \[6, 0\]"):
        check_operands(x=(x[:, :0], "T C"))


def test_whole_numbers():
    assert whole_numbers(torch.tensor([1, 2], dtype=torch.int32)) == [1, 2]
    assert whole_numbers([]) == []
    for bad in ([1.0], torch.tensor([1.0]), [[1]], None, 3, "1", [True], torch.tensor([False])):
        assert whole_numbers(bad) is None


def zeros(*shape, **kinds):
    return torch.zeros(*shape, dtype=kinds.pop("dtype", torch.float64), **kinds)


# Which operand (q, k, v, log_decay, beta), what it is instead, and what the error says.
MATRIX_FAULTS = {
    "more tokens of k": (1, zeros(9, 2, 8), r"k must be \[T, Hk, d_k\] = \[6, 2, 8\]; got \[9, 2, 8\]"),
    "one token of k": (1, zeros(1, 2, 8), "k must be"),
    "more tokens of v": (
        2,
        zeros(12, 4, 12),
        r"v must be \[T, Hv, d_v\] = \[6, Hv, d_v\]; got \[12, 4, 12\]",
    ),
    "one head of q": (0, zeros(TOKENS, 1, 8), r"k must be .* = \[6, 1, 8\]; got \[6, 2, 8\]"),
    "one channel of k": (1, zeros(TOKENS, 2, 1), "k must be"),
    "no channel": (0, zeros(TOKENS, 2, 0), "q must be .* of which T alone may be 0"),
    "a batch": (0, zeros(1, TOKENS, 2, 8), r"q must be \[T, Hk, d_k\]; got"),
    "whole numbers": (
        2,
        zeros(TOKENS, 4, 12, dtype=torch.int64),
        r"v must hold floating-point .* v.float\(\)",
    ),
    "complex numbers": (2, zeros(TOKENS, 4, 12, dtype=torch.complex64), "v must hold floating-point numbers"),
    "another device": (1, zeros(TOKENS, 2, 8, device="meta"), "k is on meta but q on cpu"),
    "no tensor": (2, [[1.0]], "v must be a torch.Tensor; got list"),
    "decays of values": (
        3,
        zeros(TOKENS, 4, 12),
        r"log_decay must be None, \[Hv\].* d_k = 8; got \[6, 4, 12\]",
    ),
    "decays of tokens": (3, zeros(TOKENS), "log_decay must be None"),
    "turned decays": (3, zeros(4, TOKENS), "log_decay must be None"),
    "one decay": (3, -0.5, "log_decay must be a torch.Tensor; got float"),
    "decays elsewhere": (3, zeros(TOKENS, 4, device="meta"), "log_decay is on meta but"),
    "strengths of heads": (4, zeros(4), r"beta must be \[T, Hv\] = \[6, 4\]; got \[4\]"),
    "strengths of tokens": (4, zeros(TOKENS), "beta must be"),
    "strengths of one head": (4, zeros(TOKENS, 1), "beta must be"),
    "turned strengths": (4, zeros(4, TOKENS), "beta must be"),
    "sparse numbers": (2, zeros(TOKENS, 4, 12).to_sparse(), r"v must be dense, .*pass v.to_dense\(\)"),
    "numbers of 8 bits": (
        0,
        zeros(TOKENS, 2, 8).to(torch.float8_e4m3fn),
        r"q must hold numbers of 16 bits or more, got torch.float8_e4m3fn; pass q.float\(\)",
    ),
    "no strengths": (4, None, "beta must be a torch.Tensor; got NoneType"),
}


BETA = 4
CASES = {
    f"{rule}: {fault}": (RULES[rule], *case)
    for rule in RULES
    for fault, case in MATRIX_FAULTS.items()
    if RULES[rule].has_beta or case[0] != BETA
}


@pytest.mark.parametrize(("rule", "position", "operand", "message"), CASES.values(), ids=CASES)
def test_rules_with_matrix_states(rule, position, operand, message):
    args = inputs(rule, "scalar", TOKENS)
    args[position] = operand
    for form in (rule.recurrent, rule.chunked):
        with pytest.raises(ValueError, match=message):
            form(*args, cu_seqlens=[0, TOKENS])
    with pytest.raises(ValueError, match=message):
        rule.step(*args, before := states(TOKENS))
    assert torch.equal(before, states(TOKENS)), "refused, and yet written"


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("scale", [True, "1", [1.0], 1 + 2j, math.nan, math.inf, torch.ones(2)], ids=repr)
def test_a_scale_is_one_number(rule, scale):
    args = inputs(rule, "scalar", TOKENS)
    for form in (rule.recurrent, rule.chunked):
        with pytest.raises(ValueError, match="scale must be None or a finite number; got"):
            form(*args, cu_seqlens=[0, TOKENS], scale=scale)
    with pytest.raises(ValueError, match="scale must be None or a finite number; got"):
        rule.step(*args, before := states(TOKENS), scale)
    assert torch.equal(before, states(TOKENS)), "refused, and yet written"


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_states_and_positions_of_another_kind(rule):
    args = inputs(rule, "scalar", TOKENS)
    for state in (None, 3):
        with pytest.raises(ValueError, match="state must be a torch.Tensor or a list of them; got"):
            rule.step(*args, state)
    for form in (rule.recurrent, rule.chunked):
        with pytest.raises(ValueError, match="states_at must be a list of lists of token counts; got 3"):
            form(*args, cu_seqlens=[0, TOKENS], states_at=3)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_key_heads_are_shared_evenly(rule):
    args = inputs(rule, "scalar", TOKENS, key_heads=3)
    for form in (rule.recurrent, rule.chunked):
        with pytest.raises(ValueError, match="v has 4 heads, which must be a multiple of the 3 of q and k"):
            form(*args, cu_seqlens=[0, TOKENS])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_decay_of_one_channel_is_one_of_all(rule):
    args = inputs(rule, "scalar", TOKENS)
    want = rule.chunked(*args, cu_seqlens=[0, TOKENS])
    args[3] = args[3].unsqueeze(-1)
    for form in (rule.recurrent, rule.chunked):
        torch.testing.assert_close(form(*args, cu_seqlens=[0, TOKENS]), want)


def scan_inputs():
    x, delta, B, C = zeros(TOKENS, 5), zeros(TOKENS, 5), zeros(TOKENS, 3), zeros(TOKENS, 3)
    return {"x": x, "delta": delta, "A": zeros(5, 3), "B": B, "C": C, "D": zeros(5)}


@pytest.mark.parametrize(
    ("name", "operand"),
    [
        ("delta", zeros(TOKENS, 1)),
        ("delta", zeros(9, 5)),
        ("A", zeros(5, 1)),
        ("A", zeros(3, 5)),
        ("B", zeros(TOKENS, 1)),
        ("C", zeros(1, 3)),
        ("D", zeros(1)),
        ("D", zeros(TOKENS, 5)),
        ("x", zeros(TOKENS, 5, dtype=torch.int32)),
    ],
)
def test_selective_scan(name, operand):
    args = list((scan_inputs() | {name: operand}).values())
    state = zeros(TOKENS, 5, 3)
    # What is seen first gives a dimension its size: an A of one column makes B the odd one.
    for form in (selective_scan_recurrent, selective_scan_chunked):
        with pytest.raises(ValueError, match=r"must (be \[|hold floating)"):
            form(*args, cu_seqlens=[0, TOKENS])
    with pytest.raises(ValueError, match=r"must (be \[|hold floating)"):
        selective_scan_step(*args, state)


def test_selective_scan_of_no_rows():
    args = {name: x[:0] if name not in "AD" else x for name, x in scan_inputs().items()}
    assert selective_scan_step(*args.values(), zeros(0, 5, 3)).shape == (0, 5)
    with pytest.raises(ValueError, match=r"state must be \[0, 5, 3\]; got \[0, 3, 5\]"):
        selective_scan_step(*args.values(), zeros(0, 3, 5))


@pytest.mark.parametrize(
    ("weight", "window", "message"),
    [
        (zeros(1, 4), None, r"weight must be \[C, W\] = \[5, W\]; got \[1, 4\]"),
        (zeros(5, 4).int(), None, "weight must hold floating-point numbers"),
        (zeros(5, 4), zeros(1, 4, 5), r"window must be \[N, W - 1, C\] = \[., 3, 5\]; got \[1, 4, 5\]"),
        (zeros(5, 4), zeros(9, 3, 5), "window must be"),
        (zeros(5, 4), zeros(1, 3, 1), "window must be"),
        (zeros(5, 4), zeros(1, 3, 5, device="meta"), "window is on meta but x on cpu"),
    ],
)
def test_short_convolution(weight, window, message):
    for offsets in ([0, TOKENS], [0, 2, TOKENS]):
        with pytest.raises(ValueError, match=message):
            short_conv(zeros(TOKENS, 5), weight, cu_seqlens=offsets, window=window)
    if window is not None:
        with pytest.raises(ValueError, match=message):
            short_conv_step(zeros(TOKENS, 5), weight, window)
