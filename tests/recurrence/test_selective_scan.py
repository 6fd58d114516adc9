"""The forms of the selective scan against each other, the plain equation and transformers."""

import math
from functools import cache

import pytest
import torch

from denim.recurrence import selective_scan
from denim.recurrence.selective_scan import (
    selective_scan_chunked,
    selective_scan_recurrent,
    selective_scan_step,
)
from tests.recurrence.cases import (
    BOUNDS,
    CHUNK_SIZES,
    FLOAT32_BOUND,
    FLOAT64_BOUND,
    POSITIONS,
    RAGGED,
    assert_close,
    offsets,
)

CHANNELS, N = 10, 4


def inputs(tokens, dtype=torch.float64, channels=CHANNELS, n=N):
    """x, delta, A, B, C, D."""
    rng = torch.Generator().manual_seed(0)
    x, delta = torch.randn(2, tokens, channels, dtype=dtype, generator=rng)
    A = -4 * torch.rand(channels, n, dtype=dtype, generator=rng)
    B, C = torch.randn(2, tokens, n, dtype=dtype, generator=rng)
    return [x, delta.abs(), A, B, C, torch.randn(channels, dtype=dtype, generator=rng)]


def states(sequences, dtype=torch.float64, channels=CHANNELS, n=N):
    return torch.randn(sequences, channels, n, dtype=dtype, generator=torch.Generator().manual_seed(1))


def part(args, begin, end):
    x, delta, A, B, C, D = args
    return [x[begin:end], delta[begin:end], A, B[begin:end], C[begin:end], D]


@pytest.mark.parametrize("with_skip", [False, True])
def test_recurrent_is_the_equation(with_skip):
    """y_t[c] = sum over n and s <= t of C_t[n] exp(A[c, n] (delta_{s+1}[c] + .. + delta_t[c])) B_s[n] ..."""
    x, delta, A, B, C, D = inputs(5)
    initial = states(1)
    out, final = selective_scan_recurrent(
        x, delta, A, B, C, D if with_skip else None, cu_seqlens=[0, 5], initial_state=initial
    )
    for c in range(CHANNELS):
        for t in range(5):
            h = initial[0, c] * (A[c] * delta[: t + 1, c].sum()).exp()
            for s in range(t + 1):
                h = h + (A[c] * delta[s + 1 : t + 1, c].sum()).exp() * delta[s, c] * x[s, c] * B[s]
            want = C[t] @ h + (D[c] * x[t, c] if with_skip else 0)
            torch.testing.assert_close(out[t, c], want, atol=1e-12, rtol=0)
        torch.testing.assert_close(final[0, c], h, atol=1e-12, rtol=0)


@cache
def ragged(dtype):
    args, initial = inputs(sum(RAGGED), dtype), states(len(RAGGED), dtype)
    run = {"cu_seqlens": offsets(RAGGED), "initial_state": initial}
    last, inside = (selective_scan_recurrent(*args, **run, states_at=at) for at in (None, POSITIONS))
    return args, initial, last, inside


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("dtype, bound", BOUNDS)
def test_chunked_equals_recurrent(chunk_size, dtype, bound):
    args, initial, last, inside = ragged(dtype)
    untouched = initial.clone()
    run = {"cu_seqlens": offsets(RAGGED), "initial_state": initial, "chunk_size": chunk_size}
    assert_close(selective_scan_chunked(*args, **run), last, bound)
    assert_close(selective_scan_chunked(*args, **run, states_at=POSITIONS), inside, bound)
    assert torch.equal(initial, untouched)


@pytest.mark.parametrize("lengths", [[130], [128, 128], [70, 70, 70], [1, 1, 1], [0, 0], [0, 5], []])
def test_batches(lengths):
    args, cu = inputs(sum(lengths)), offsets(lengths)
    for initial in (None, states(len(lengths))):
        for states_at in (None, [list(range(length + 1)) for length in lengths], [[]] * len(lengths)):
            run = {"cu_seqlens": cu, "initial_state": initial, "states_at": states_at}
            want = selective_scan_recurrent(*args, **run)
            assert_close(selective_scan_chunked(*args, **run, chunk_size=16), want, FLOAT64_BOUND)


@pytest.mark.parametrize("channels, n", [(3, 16), (130, 1)])
def test_blocks_of_channels(channels, n, monkeypatch):
    """A CPU takes some channels at a time; here two blocks and a rest, or one channel each."""
    args = inputs(150, channels=channels, n=n)
    run = {"cu_seqlens": [0, 70, 150], "initial_state": states(2, channels=channels, n=n)}
    want = selective_scan_recurrent(*args, **run)
    for block in (4096, 1):  # however little that is
        monkeypatch.setattr(selective_scan, "_CPU_BLOCK_BYTES", block)
        assert_close(selective_scan_chunked(*args, **run, chunk_size=16), want, FLOAT64_BOUND)


def test_sequences_of_a_batch_do_not_touch():
    args, cu = inputs(sum(RAGGED)), offsets(RAGGED)
    args[0][cu[3] : cu[4]] = torch.nan
    initial = states(len(RAGGED))
    initial[6] = torch.nan
    out, final = selective_scan_chunked(*args, cu_seqlens=cu, initial_state=initial)
    for n in (0, 1, 2, 4, 5, 7):
        want = selective_scan_recurrent(
            *part(args, cu[n], cu[n + 1]), cu_seqlens=[0, RAGGED[n]], initial_state=initial[n : n + 1]
        )
        assert_close((out[cu[n] : cu[n + 1]], final[n : n + 1]), want, FLOAT64_BOUND)


def test_split_anywhere():
    tokens = 131
    args, initial = inputs(tokens), states(1)
    want = selective_scan_recurrent(*args, cu_seqlens=[0, tokens], initial_state=initial)
    for form, stride in ((selective_scan_chunked, 3), (selective_scan_recurrent, 43)):
        for cut in range(1, tokens, stride):
            out1, middle = form(*part(args, 0, cut), cu_seqlens=[0, cut], initial_state=initial)
            rest = [0, tokens - cut]
            out2, final = form(*part(args, cut, tokens), cu_seqlens=rest, initial_state=middle)
            assert_close((torch.cat((out1, out2)), final), want, FLOAT64_BOUND)


@pytest.mark.parametrize("strong", [50.0, 1e4, math.inf])
@pytest.mark.parametrize("dtype, bound", BOUNDS)
def test_strong_decay_stays_finite_and_right(strong, dtype, bound):
    """Half of the states forget nearly all at each token, the others nearly nothing."""
    args, initial = inputs(300, dtype), states(1, dtype)
    args[2][:, ::2] = -strong
    args[2][:, 1::2] = -1e-3
    run = {"cu_seqlens": [0, 300], "initial_state": initial}
    want = selective_scan_recurrent(*args, **run)
    assert_close(selective_scan_chunked(*args, **run, chunk_size=128), want, bound)


def test_a_hundred_thousand_tokens():
    tokens, cut, last = 100_000, 33_333, 300
    args = inputs(tokens, torch.float32, channels=4, n=2)
    args[2] *= 1e-4
    out, inside = selective_scan_chunked(
        *args, cu_seqlens=[0, tokens], states_at=[[cut, tokens - last, tokens]], chunk_size=256
    )
    rest = [0, tokens - cut]
    tail = selective_scan_chunked(*part(args, cut, tokens), cu_seqlens=rest, initial_state=inside[:1])
    assert_close((out[cut:], inside[2:]), tail, 1e-4)
    end = [x.double() for x in part(args, tokens - last, tokens)]
    want = selective_scan_recurrent(*end, cu_seqlens=[0, last], initial_state=inside[1:2].double())
    assert_close((out[-last:].double(), inside[2:].double()), want, 1e-4)


@pytest.mark.parametrize("slot_gap", [0, 7])
@pytest.mark.parametrize("as_list", [False, True])
def test_steps_equal_recurrent(slot_gap, as_list):
    """Step by step for several rows; with a gap, the rows are slots of an arena that lie apart."""
    rows, steps = 3, 4
    x, delta, A, B, C, D = inputs(rows * steps)
    initial = states(rows)
    arena = torch.full((rows, CHANNELS * N + slot_gap), torch.nan, dtype=torch.float64)
    state = arena[:, : CHANNELS * N].unflatten(1, (CHANNELS, N))
    state.copy_(initial)
    given = list(state) if as_list else state
    by_row = [t.unflatten(0, (rows, steps)) for t in (x, delta, B, C)]
    outs = []
    for t in range(steps):
        x_t, delta_t, B_t, C_t = (tokens[:, t] for tokens in by_row)
        outs.append(selective_scan_step(x_t, delta_t, A, B_t, C_t, D, given))
    cu = offsets([steps] * rows)
    want = selective_scan_recurrent(x, delta, A, B, C, D, cu_seqlens=cu, initial_state=initial)
    assert_close((torch.stack(outs, 1).flatten(0, 1), state), want, FLOAT64_BOUND)
    assert arena[:, CHANNELS * N :].isnan().all(), "wrote beside the state"


def test_lower_precision_inputs_and_states():
    """bf16 x, B and C: the arithmetic and the states are fp32; a bf16 state is widened for a step."""
    args = inputs(70, torch.float32)
    for i in (0, 3, 4):
        args[i] = args[i].bfloat16()
    exact = selective_scan_recurrent(*(t.double() for t in args), cu_seqlens=[0, 70])
    for form in (selective_scan_recurrent, selective_scan_chunked):
        y, final = form(*args, cu_seqlens=[0, 70])
        assert y.dtype == torch.bfloat16 and final.dtype == torch.float32
        torch.testing.assert_close(final.double(), exact[1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(y.double(), exact[0], atol=1e-5, rtol=2**-8)
    two, before = part(args, 0, 2), states(2).bfloat16()
    want = selective_scan_recurrent(*two, cu_seqlens=[0, 1, 2], initial_state=before)
    for given in (before.clone(), list(before.clone())):
        y = selective_scan_step(*two, given)
        torch.testing.assert_close(y, want[0], atol=1e-6, rtol=2**-7)
        for row, row_want in zip(given, want[1], strict=True):
            torch.testing.assert_close(row, row_want.bfloat16(), atol=1e-6, rtol=2**-7)


@pytest.mark.parametrize("model", ["mamba", "jamba"])
@pytest.mark.parametrize("tokens", [1, 64, 130])
def test_against_transformers(model, tokens):
    """Whole sequences from zero states, and single steps from any: its sequence form takes no state."""
    peer = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    args = inputs(tokens, torch.float32)
    x, delta, A, B, C, D = args
    y, final = peer.mamba_selective_scan(
        x.T[None], delta.T[None], A, B.T[None], C.T[None], D=D, return_last_state=True
    )
    got = selective_scan_chunked(*args, cu_seqlens=[0, tokens], chunk_size=16)
    assert_close(got, (y[0].T, final), FLOAT32_BOUND)

    theirs, ours = states(1, torch.float32), states(1, torch.float32)
    for t in range(min(tokens, 20)):
        x, delta, A, B, C, D = part(args, t, t + 1)
        y = peer.mamba_selective_state_update(theirs, x, delta, A, B, C, D=D)
        assert_close((selective_scan_step(x, delta, A, B, C, D, ours), ours), (y, theirs), FLOAT32_BOUND)


def test_arguments_must_fit():
    args = inputs(10)
    for form in (selective_scan_recurrent, selective_scan_chunked):
        with pytest.raises(ValueError, match="cu_seqlens"):
            form(*args, cu_seqlens=[0, 9])
        with pytest.raises(ValueError, match=r"initial_state must be \[1, 10, 4\]"):
            form(*args, cu_seqlens=[0, 10], initial_state=states(2))
        with pytest.raises(ValueError, match=r"states_at has 2 lists for 1 sequences"):
            form(*args, cu_seqlens=[0, 10], states_at=[[1], [2]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_skip_may_be_of_another_dtype(dtype):
    x, delta, A, B, C, D = inputs(5, torch.float32)
    skip = D.to(dtype)
    state = torch.zeros(5, CHANNELS, N)
    for run in (
        lambda D: selective_scan_recurrent(x, delta, A, B, C, D, cu_seqlens=[0, 5])[0],
        lambda D: selective_scan_chunked(x, delta, A, B, C, D, cu_seqlens=[0, 5])[0],
        lambda D: selective_scan_step(x, delta, A, B, C, D, state.clone()),
    ):
        assert torch.equal(run(skip), run(skip.float()))
