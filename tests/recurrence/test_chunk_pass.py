"""Chunked against recurrent forms: both rules with matrix states, every kind of decay."""

import math
from functools import cache

import pytest
import torch

from tests.recurrence.cases import (
    ACCUMULATION,
    BOUNDS,
    CHUNK_SIZES,
    DECAYS,
    DELTA,
    FLOAT64_BOUND,
    POSITIONS,
    RAGGED,
    RULES,
    assert_close,
    in_double,
    inputs,
    offsets,
    part,
    states,
)

every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
every_decay = pytest.mark.parametrize("decay", DECAYS)


@cache
def ragged(rule, decay, dtype):
    """(arguments, states before, reference with the last states, reference with those at POSITIONS)."""
    args, initial = inputs(rule, decay, sum(RAGGED), dtype=dtype), states(len(RAGGED), dtype=dtype)
    run = {"cu_seqlens": offsets(RAGGED), "initial_state": initial}
    return args, initial, rule.recurrent(*args, **run), rule.recurrent(*args, **run, states_at=POSITIONS)


@every_rule
@every_decay
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("dtype, bound", BOUNDS)
def test_chunked_equals_recurrent(rule, decay, chunk_size, dtype, bound):
    args, initial, last, inside = ragged(rule, decay, dtype)
    untouched = initial.clone()
    run = {"cu_seqlens": offsets(RAGGED), "initial_state": initial, "chunk_size": chunk_size}
    assert_close(rule.chunked(*args, **run), last, bound)
    assert_close(rule.chunked(*args, **run, states_at=POSITIONS), inside, bound)
    assert torch.equal(initial, untouched)


@every_rule
@pytest.mark.parametrize("decay", ["scalar", "vector"])
@pytest.mark.parametrize("lengths", [[130], [128, 128], [70, 70, 70], [1, 1, 1], [0, 0], [0, 5], []])
def test_batches(rule, decay, lengths):
    args, cu = inputs(rule, decay, sum(lengths)), offsets(lengths)
    initial = states(len(lengths))
    for states_at in (None, [list(range(length + 1)) for length in lengths], [[]] * len(lengths)):
        run = {"cu_seqlens": cu, "initial_state": initial, "states_at": states_at}
        want = rule.recurrent(*args, **run)
        assert_close(rule.chunked(*args, **run, chunk_size=16), want, FLOAT64_BOUND)


@every_rule
def test_states_inside_are_those_of_shorter_sequences(rule):
    """The meaning of states_at, without it: the state at p is the last state of the first p tokens."""
    args, initial = inputs(rule, "scalar", 7), states(1)
    _, inside = rule.recurrent(*args, cu_seqlens=[0, 7], initial_state=initial, states_at=[[3, 0, 7]])
    for p, state in zip((3, 0, 7), inside, strict=True):
        _, last = rule.recurrent(*part(args, 0, p), cu_seqlens=[0, p], initial_state=initial)
        assert torch.equal(state, last[0])


@every_rule
@every_decay
@pytest.mark.parametrize("repeat", [1, 3])
@pytest.mark.parametrize("d_k, d_v", [(16, 4), (3, 10)])
def test_head_counts_and_sizes_may_differ(rule, decay, repeat, d_k, d_v):
    args = inputs(rule, decay, 75, key_heads=2, value_heads=2 * repeat, d_k=d_k, d_v=d_v)
    run = {"scale": 0.3, "states_at": [[70, 17], [4]]}
    want = rule.recurrent(*args, cu_seqlens=[0, 70, 75], **run)
    got = rule.chunked(*args, cu_seqlens=torch.tensor([0, 70, 75]), chunk_size=24, **run)
    assert_close(got, want, FLOAT64_BOUND)


@every_rule
@pytest.mark.parametrize("decay", ["scalar", "vector"])
def test_sequences_of_a_batch_do_not_touch(rule, decay):
    """Each sequence of a ragged batch is what it is alone, whatever lies beside it (NaN included)."""
    args, cu = inputs(rule, decay, sum(RAGGED)), offsets(RAGGED)
    args[2][cu[3] : cu[4]] = torch.nan
    initial = states(len(RAGGED))
    initial[6] = torch.nan
    out, final = rule.chunked(*args, cu_seqlens=cu, initial_state=initial)
    for n in (0, 1, 2, 4, 5, 7):
        alone = slice(cu[n], cu[n + 1])
        want = rule.recurrent(
            *part(args, cu[n], cu[n + 1]), cu_seqlens=[0, RAGGED[n]], initial_state=initial[n : n + 1]
        )
        assert_close((out[alone], final[n : n + 1]), want, FLOAT64_BOUND)


@every_rule
@every_decay
def test_split_anywhere(rule, decay):
    tokens = 131
    args, initial = inputs(rule, decay, tokens), states(1)
    want = rule.recurrent(*args, cu_seqlens=[0, tokens], initial_state=initial)
    for form, stride in ((rule.chunked, 3), (rule.recurrent, 43)):
        for cut in range(1, tokens, stride):
            out1, middle = form(*part(args, 0, cut), cu_seqlens=[0, cut], initial_state=initial)
            rest = [0, tokens - cut]
            out2, final = form(*part(args, cut, tokens), cu_seqlens=rest, initial_state=middle)
            assert_close((torch.cat((out1, out2)), final), want, FLOAT64_BOUND)


@every_rule
@pytest.mark.parametrize("decay", ["scalar", "vector"])
def test_many_groups_of_chunks(rule, decay):
    """Long enough, with enough heads, that a CPU takes the chunks in several groups; ragged over them."""
    lengths = [700, 64, 1400, 129]
    args, cu = inputs(rule, decay, sum(lengths), 8, 8, 32, 32), offsets(lengths)
    states_at = [[700, 64, 300], [], [1400, 1001], [129, 128]]
    want = rule.recurrent(*args, cu_seqlens=cu, states_at=states_at)
    assert_close(rule.chunked(*args, cu_seqlens=cu, states_at=states_at), want, FLOAT64_BOUND)
    out, final = rule.chunked(*args, cu_seqlens=cu)
    assert_close((out, final[[0, 2, 3]]), (want[0], want[1][[0, 3, 5]]), FLOAT64_BOUND)


@every_rule
@pytest.mark.parametrize("decay", ["scalar", "vector"])
@pytest.mark.parametrize("strong", [-50.0, -1e4, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_strong_decay_stays_finite_and_right(rule, decay, strong, dtype):
    """Two of three tokens forget nearly everything or all, every third keeps nearly everything."""
    args = inputs(rule, decay, 300, dtype=dtype)
    args[3] = torch.full_like(args[3], strong)
    args[3][::3] = -0.01
    run = {"cu_seqlens": [0, 300], "initial_state": states(1, dtype=dtype), "states_at": [[128, 200, 300]]}
    want = rule.recurrent(*args, **run)
    got = rule.chunked(*args, **run, chunk_size=128)
    assert_close(got, want, FLOAT64_BOUND if dtype == torch.float64 else 5e-6)


@every_rule
@pytest.mark.parametrize("decay", ["none", "scalar", "vector"])
def test_a_hundred_thousand_tokens(rule, decay):
    """Finite, independent of where the long sequence is cut, and right at its end; weak decay so that the far
    past counts. Without decay the accumulated state grows with the square root of the number of tokens."""
    tokens, cut, last = 100_000, 33_333, 300
    args = inputs(rule, decay, tokens, 1, 2, 8, 8, torch.float32, strength=1e-3)
    out, inside = rule.chunked(*args, cu_seqlens=[0, tokens], states_at=[[cut, tokens - last, tokens]])
    bound = 1e-4
    tail = rule.chunked(*part(args, cut, tokens), cu_seqlens=[0, tokens - cut], initial_state=inside[:1])
    assert_close((out[cut:], inside[2:]), tail, bound)
    end = in_double(part(args, tokens - last, tokens))
    want = rule.recurrent(*end, cu_seqlens=[0, last], initial_state=inside[1:2].double())
    assert_close((out[-last:].double(), inside[2:].double()), want, bound)


@every_rule
@every_decay
def test_lower_precision_inputs(rule, decay):
    """bf16 q, k, v with fp32 gates: the arithmetic and the states are fp32, outputs are rounded once."""
    args = inputs(rule, decay, 70, dtype=torch.float32)
    args[:3] = (x.bfloat16() for x in args[:3])
    exact = rule.recurrent(*in_double(args), cu_seqlens=[0, 70])
    for form in (rule.recurrent, rule.chunked):
        out, final = form(*args, cu_seqlens=[0, 70])
        assert out.dtype == torch.bfloat16 and final.dtype == torch.float32
        torch.testing.assert_close(final.double(), exact[1], atol=5e-6, rtol=0)
        torch.testing.assert_close(out.double(), exact[0], atol=1e-6, rtol=2**-8)


@every_rule
@every_decay
@pytest.mark.parametrize("states_at", [None, [[3, 0], [2], [], [7, 4]]])
def test_gradients(rule, decay, states_at):
    """Against numeric differences, in every tensor argument; through padding, groups of heads and ends."""
    lengths = [5, 2, 0, 7]
    args = inputs(rule, decay, sum(lengths), key_heads=1, value_heads=2, d_k=3, d_v=2)
    given = [x is not None for x in args]
    leaves = [x.requires_grad_() for x in (*args, states(len(lengths), 2, 2, 3)) if x is not None]

    def run(*tensors):
        rest = iter(tensors)
        full = [next(rest) if is_given else None for is_given in given]
        return rule.chunked(
            *full,
            cu_seqlens=offsets(lengths),
            initial_state=next(rest),
            states_at=states_at,
            chunk_size=4,
        )

    assert torch.autograd.gradcheck(run, leaves)


@every_rule
@pytest.mark.parametrize("decay", ["scalar", "vector"])
def test_memory_for_the_backward_pass_is_linear(rule, decay):
    """Distinct bytes saved for the backward pass: twice the tokens, twice the bytes."""

    def saved(tokens):
        storages = {}

        def keep(x):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage()  # the reference keeps it unique
            return x

        args = [x.requires_grad_() for x in inputs(rule, decay, tokens, dtype=torch.float32)]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out, _ = rule.chunked(*args, cu_seqlens=[0, tokens])
        assert out.requires_grad
        return sum(storage.nbytes() for storage in storages.values())

    small, large = saved(1024), saved(2048)
    assert math.isclose(large, 2 * small, rel_tol=0.02)


@every_rule
def test_arguments_must_fit(rule):
    args = inputs(rule, "scalar", 10)
    for form in (rule.recurrent, rule.chunked):
        with pytest.raises(
            ValueError, match="cu_seqlens must be whole numbers that rise from 0 to the number of tokens, 10"
        ):
            form(*args, cu_seqlens=[0, 9])
        with pytest.raises(ValueError, match=r"initial_state must be \[1, 4, 12, 8\]; got \[1, 4, 8, 12\]"):
            form(*args, cu_seqlens=[0, 10], initial_state=states(1, 4, 8, 12))
        with pytest.raises(ValueError, match=r"states_at\[0\] must be .* in 0 .. 10; got \[11\]"):
            form(*args, cu_seqlens=[0, 10], states_at=[[11]])
        with pytest.raises(ValueError, match="log_decay must be None"):
            form(*args[:3], args[3][1:], *args[4:], cu_seqlens=[0, 10])


@every_rule
@pytest.mark.parametrize("decay", ["constant", "scalar", "vector"])
def test_a_growing_state_is_computed_as_the_formula_says(rule, decay):
    """log_decay > 0, which no model has."""
    args = inputs(rule, decay, sum(RAGGED), strength=-0.2)
    assert (args[3] > 0).any()
    want = rule.recurrent(*args, cu_seqlens=offsets(RAGGED))
    assert_close(rule.chunked(*args, cu_seqlens=offsets(RAGGED)), want, 1e-10)


@pytest.mark.parametrize(
    ("rule", "operand"), [(DELTA, i) for i in range(5)] + [(ACCUMULATION, i) for i in range(4)]
)
def test_a_nan_stays_in_its_sequence_and_is_never_lost(rule, operand):
    """Products over a chunk carry it to the chunk's other tokens too."""
    args = inputs(rule, "vector", 300)
    args[operand][120, 0] = torch.nan
    want, want_states = rule.recurrent(*args, cu_seqlens=[0, 100, 200, 300])
    out, ends = rule.chunked(*args, cu_seqlens=[0, 100, 200, 300], chunk_size=16)
    assert want.isnan().any() and out[want.isnan()].isnan().all()
    assert ends[want_states.isnan()].isnan().all()
    begins = 100 + 16  # of the chunk with token 120
    untouched = [*range(begins), *range(200, 300)]
    assert torch.isfinite(out[untouched]).all() and torch.isfinite(ends[[0, 2]]).all()
