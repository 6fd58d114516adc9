"""The forms of the gated delta rule against each other, the plain equation and transformers."""

import math

import pytest
import torch

from denim.recurrence.gated_delta import (
    gated_delta_chunked,
    gated_delta_recurrent,
    gated_delta_step,
    l2norm,
)

FLOAT64_BOUND = 1e-10
# fp32, unit q and k, normal v: outputs and states are of the order of 1. Measured 5e-7 at most.
FLOAT32_BOUND = 5e-6

RAGGED = [1, 63, 64, 65, 0, 3, 130, 16]


def inputs(tokens, key_heads=2, value_heads=4, d_k=8, d_v=12, dtype=torch.float64, seed=0, decay=1.0):
    """q, k, v, log_decay, beta; unit q and k as the models have them, log_decay in (-decay, 0)."""
    rng = torch.Generator().manual_seed(seed)
    q, k = l2norm(torch.randn(2, tokens, key_heads, d_k, dtype=dtype, generator=rng))
    v = torch.randn(tokens, value_heads, d_v, dtype=dtype, generator=rng)
    log_decay, beta = torch.rand(2, tokens, value_heads, dtype=dtype, generator=rng)
    return q, k, v, -decay * log_decay, beta


def states(sequences, value_heads=4, d_k=8, d_v=12, dtype=torch.float64):
    return torch.randn(
        sequences, value_heads, d_v, d_k, dtype=dtype, generator=torch.Generator().manual_seed(1)
    )


def offsets(lengths):
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def assert_close(got, want, bound):
    for name, a, b in zip(("out", "state"), got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, name
        assert torch.isfinite(a).all(), name
        if a.numel():
            error = (a.double() - b.double()).abs().max().item()
            assert error <= bound, f"{name} differs by {error}"


def test_recurrent_is_the_equation():
    """S_t = alpha (S - beta S k k^T) + beta v k^T written out; value head i uses key head i // 2."""
    q, k, v, log_decay, beta = inputs(5)
    initial = states(1)
    out, final = gated_delta_recurrent(q, k, v, log_decay, beta, cu_seqlens=[0, 5], initial_state=initial)
    for head in range(4):
        s = initial[0, head]
        for t in range(5):
            key = k[t, head // 2]
            forget = torch.eye(8, dtype=torch.float64) - beta[t, head] * torch.outer(key, key)
            s = log_decay[t, head].exp() * s @ forget + beta[t, head] * torch.outer(v[t, head], key)
            torch.testing.assert_close(out[t, head], s @ q[t, head // 2] * 8**-0.5, atol=1e-12, rtol=0)
        torch.testing.assert_close(final[0, head], s, atol=1e-12, rtol=0)


@pytest.mark.parametrize("chunk_size", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("lengths", [RAGGED, [130], [128, 128], [70, 70, 70], [1, 1, 1], [0, 0], [0, 5]])
@pytest.mark.parametrize("dtype, bound", [(torch.float64, FLOAT64_BOUND), (torch.float32, FLOAT32_BOUND)])
def test_chunked_equals_recurrent(chunk_size, lengths, dtype, bound):
    args, cu = inputs(sum(lengths), dtype=dtype), offsets(lengths)
    initial = states(len(lengths), dtype=dtype)
    want = gated_delta_recurrent(*args, cu_seqlens=cu, initial_state=initial)
    got = gated_delta_chunked(*args, cu_seqlens=cu, initial_state=initial, chunk_size=chunk_size)
    assert_close(got, want, bound)


@pytest.mark.parametrize("repeat", [1, 2, 3])
@pytest.mark.parametrize("d_k, d_v", [(8, 8), (16, 4), (3, 10)])
def test_head_counts_and_sizes_may_differ(repeat, d_k, d_v):
    args = inputs(75, key_heads=2, value_heads=2 * repeat, d_k=d_k, d_v=d_v)
    want = gated_delta_recurrent(*args, cu_seqlens=[0, 70, 75], scale=0.3)
    got = gated_delta_chunked(*args, cu_seqlens=torch.tensor([0, 70, 75]), chunk_size=16, scale=0.3)
    assert_close(got, want, FLOAT64_BOUND)


def test_sequences_of_a_batch_do_not_touch():
    """Each sequence of a ragged batch is what it is alone, whatever lies beside it (NaN included)."""
    args, cu = list(inputs(sum(RAGGED))), offsets(RAGGED)
    args[2] = args[2].clone()
    args[2][cu[3] : cu[4]] = torch.nan
    initial = states(len(RAGGED))
    initial[6] = torch.nan
    out, final = gated_delta_chunked(*args, cu_seqlens=cu, initial_state=initial)
    for n in (0, 1, 2, 4, 5, 7):
        alone = slice(cu[n], cu[n + 1])
        want = gated_delta_recurrent(
            *(x[alone] for x in args), cu_seqlens=[0, RAGGED[n]], initial_state=initial[n : n + 1]
        )
        assert_close((out[alone], final[n : n + 1]), want, FLOAT64_BOUND)


@pytest.mark.parametrize("form", [gated_delta_recurrent, gated_delta_chunked])
def test_split_anywhere(form):
    tokens = 131
    args = inputs(tokens)
    initial = states(1)
    want = gated_delta_recurrent(*args, cu_seqlens=[0, tokens], initial_state=initial)
    for cut in range(1, tokens, 1 if form is gated_delta_chunked else 26):
        out1, middle = form(*(x[:cut] for x in args), cu_seqlens=[0, cut], initial_state=initial)
        out2, final = form(*(x[cut:] for x in args), cu_seqlens=[0, tokens - cut], initial_state=middle)
        assert_close((torch.cat((out1, out2)), final), want, FLOAT64_BOUND)


def test_many_groups_of_chunks():
    """Long enough, with enough heads, that a CPU takes the chunks in several groups; ragged over them."""
    lengths = [700, 64, 1400, 129]
    args, cu = inputs(sum(lengths), 8, 8, 32, 32), offsets(lengths)
    want = gated_delta_recurrent(*args, cu_seqlens=cu)
    assert_close(gated_delta_chunked(*args, cu_seqlens=cu), want, FLOAT64_BOUND)


def test_equal_keys_with_full_writing():
    """The worst system: one key again and again, beta 1, no decay. Its powers grow like binomials, so a
    solver that sums powers would lose every digit of fp32."""
    q, k, v, log_decay, beta = inputs(256, dtype=torch.float32)
    args = (q, k[:1].expand_as(k), v, torch.zeros_like(log_decay), torch.ones_like(beta))
    want = gated_delta_recurrent(*(x.double() for x in args), cu_seqlens=[0, 256])
    out, final = gated_delta_chunked(*args, cu_seqlens=[0, 256], chunk_size=128)
    assert_close((out.double(), final.double()), want, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_strong_decay_stays_finite_and_right(dtype):
    """A decay of -50 a token sums to -6400 in a chunk of 128; every second token keeps nearly everything."""
    q, k, v, log_decay, beta = inputs(300, dtype=dtype)
    log_decay = torch.full_like(log_decay, -50.0)
    log_decay[::2] = -0.01
    args = (q, k, v, log_decay, beta)
    want = gated_delta_recurrent(*args, cu_seqlens=[0, 300], initial_state=states(1, dtype=dtype))
    got = gated_delta_chunked(
        *args, cu_seqlens=[0, 300], initial_state=states(1, dtype=dtype), chunk_size=128
    )
    # fp32 sums of log-decays of size 6400 have an absolute error of 6400 x 2^-24 = 4e-4, and so has a decay.
    assert_close(got, want, FLOAT64_BOUND if dtype == torch.float64 else 1e-3)


def test_a_hundred_thousand_tokens():
    """Finite, and independent of where the long sequence is cut; weak decay so that the far past counts."""
    tokens = 100_000
    args = inputs(tokens, key_heads=1, value_heads=2, d_k=8, d_v=8, dtype=torch.float32, decay=1e-3)
    out, final = gated_delta_chunked(*args, cu_seqlens=[0, tokens])
    cut = 33_333
    head, middle = gated_delta_chunked(*(x[:cut] for x in args), cu_seqlens=[0, cut])
    tail = gated_delta_chunked(*(x[cut:] for x in args), cu_seqlens=[0, tokens - cut], initial_state=middle)
    assert_close((out, final), (torch.cat((head, tail[0])), tail[1]), 1e-4)
    last = 500
    before = gated_delta_chunked(*(x[:-last] for x in args), cu_seqlens=[0, tokens - last])[1]
    want = gated_delta_recurrent(
        *(x[-last:].double() for x in args), cu_seqlens=[0, last], initial_state=before.double()
    )
    assert_close((out[-last:].double(), final.double()), want, 1e-4)


@pytest.mark.parametrize("repeat", [1, 3])
@pytest.mark.parametrize("slot_gap", [0, 7])
@pytest.mark.parametrize("as_list", [False, True])
def test_step_equals_recurrent(repeat, slot_gap, as_list):
    """Step by step for several rows; with a gap, the rows are slots of an arena that lie apart."""
    rows, steps, heads = 3, 4, 2 * repeat
    args = inputs(rows * steps, value_heads=heads)
    by_row = [x.unflatten(0, (rows, steps)) for x in args]
    initial = states(rows, heads)
    arena = torch.full((rows, initial[0].numel() + slot_gap), torch.nan, dtype=torch.float64)
    state = arena[:, : initial[0].numel()].unflatten(1, initial.shape[1:])
    state.copy_(initial)
    given = list(state) if as_list else state
    outs = [gated_delta_step(*(x[:, t] for x in by_row), given) for t in range(steps)]
    cu = offsets([steps] * rows)
    want = gated_delta_recurrent(*args, cu_seqlens=cu, initial_state=initial)
    assert_close((torch.stack(outs, 1).flatten(0, 1), state), want, FLOAT64_BOUND)
    assert arena[:, initial[0].numel() :].isnan().all(), "wrote beside the state"


def test_lower_precision_inputs_and_states():
    """bf16 q, k, v with fp32 gates: arithmetic and states are fp32, a bf16 state is widened for a step."""
    q, k, v, log_decay, beta = inputs(70, dtype=torch.float32)
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    exact = gated_delta_recurrent(q.double(), k.double(), v.double(), log_decay, beta, cu_seqlens=[0, 70])
    for form in (gated_delta_recurrent, gated_delta_chunked):
        out, final = form(q, k, v, log_decay, beta, cu_seqlens=[0, 70])
        assert out.dtype == torch.bfloat16 and final.dtype == torch.float32
        torch.testing.assert_close(final.double(), exact[1], atol=FLOAT32_BOUND, rtol=0)
        torch.testing.assert_close(out.double(), exact[0], atol=1e-6, rtol=2**-8)  # one rounding to bf16
    want = gated_delta_recurrent(q[:2], k[:2], v[:2], log_decay[:2], beta[:2], cu_seqlens=[0, 1, 2])[1]
    state = torch.zeros(2, 4, 12, 8, dtype=torch.bfloat16)
    for given in (state.clone(), list(state.clone())):
        gated_delta_step(q[:2], k[:2], v[:2], log_decay[:2], beta[:2], given)
        for row, row_want in zip(given, want, strict=True):
            torch.testing.assert_close(row, row_want.bfloat16(), atol=1e-6, rtol=2**-7)


@pytest.mark.parametrize("value_heads", [2, 6])
@pytest.mark.parametrize("tokens", [1, 64, 130])
def test_against_transformers(value_heads, tokens):
    peer = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    args = inputs(tokens, value_heads=value_heads, dtype=torch.float32)
    initial = states(1, value_heads, dtype=torch.float32)
    got = gated_delta_chunked(*args, cu_seqlens=[0, tokens], initial_state=initial)
    for function in (peer.torch_chunk_gated_delta_rule, peer.torch_recurrent_gated_delta_rule):
        out, final = function(
            *(x[None] for x in args), initial_state=initial.transpose(2, 3), output_final_state=True
        )
        assert_close(got, (out[0], final.transpose(2, 3)), FLOAT32_BOUND)


@pytest.mark.parametrize("lengths", [[9], [5, 2, 0, 7], [8, 8]])
def test_gradients(lengths):
    """Against numeric differences, in every tensor argument; through padding, groups of heads and ends."""
    args = inputs(sum(lengths), key_heads=1, value_heads=2, d_k=3, d_v=2)
    initial = states(len(lengths), 2, 3, 2)
    leaves = [x.detach().requires_grad_() for x in (*args, initial)]

    def run(*tensors):
        return gated_delta_chunked(
            *tensors[:-1], cu_seqlens=offsets(lengths), initial_state=tensors[-1], chunk_size=4
        )

    assert torch.autograd.gradcheck(run, leaves)


def test_gradients_equal_those_of_the_recurrent_form():
    lengths = [70, 70, 3]
    grads = []
    for form in (gated_delta_recurrent, gated_delta_chunked):
        leaves = [x.requires_grad_() for x in inputs(sum(lengths))]
        out, final = form(*leaves, cu_seqlens=offsets(lengths))
        (out.sin().sum() + final.cos().sum()).backward()
        grads.append([x.grad for x in leaves])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def test_memory_for_the_backward_pass_is_linear():
    """Distinct bytes saved for the backward pass: twice the tokens, twice the bytes."""

    def saved(tokens):
        storages = {}

        def keep(x):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage()  # the reference keeps it unique
            return x

        args = [x.requires_grad_() for x in inputs(tokens, dtype=torch.float32)]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out, _ = gated_delta_chunked(*args, cu_seqlens=[0, tokens])
        assert out.requires_grad
        return sum(storage.nbytes() for storage in storages.values())

    small, large = saved(1024), saved(2048)
    assert math.isclose(large, 2 * small, rel_tol=0.02)


def test_offsets_must_fit():
    args = inputs(10)
    for cu in ([0, 9], [1, 10], [0, 7, 5, 10], []):
        with pytest.raises(ValueError, match="cu_seqlens"):
            gated_delta_chunked(*args, cu_seqlens=cu)
