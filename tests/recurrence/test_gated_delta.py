"""The delta rule: its equation, hard cases, transformers' functions. Its forms meet in test_chunk_pass."""

import pytest
import torch

from denim.recurrence.gated_delta import gated_delta_chunked, gated_delta_recurrent, l2norm
from tests.recurrence.cases import (
    CHUNK_SIZES,
    DECAYS,
    DELTA,
    FLOAT32_BOUND,
    FLOAT64_BOUND,
    assert_close,
    in_double,
    inputs,
    states,
)


@pytest.mark.parametrize("decay", DECAYS)
def test_recurrent_is_the_equation(decay):
    """S_t = S_{t-1} diag(alpha) (I - beta k k^T) + beta v k^T; value head i uses key head i // 2."""
    q, k, v, log_decay, beta = inputs(DELTA, decay, 5, most_beta=2.0)
    initial = states(1)
    out, final = gated_delta_recurrent(q, k, v, log_decay, beta, cu_seqlens=[0, 5], initial_state=initial)
    alpha = {
        "none": lambda: torch.ones(5, 4, 8),
        "constant": lambda: log_decay.exp().view(1, 4, 1).expand(5, 4, 8),
        "scalar": lambda: log_decay.exp().unsqueeze(2).expand(5, 4, 8),
        "vector": lambda: log_decay.exp(),
    }[decay]().double()
    for head in range(4):
        s = initial[0, head]
        for t in range(5):
            key = k[t, head // 2]
            forget = torch.eye(8, dtype=torch.float64) - beta[t, head] * torch.outer(key, key)
            s = s @ alpha[t, head].diag() @ forget + beta[t, head] * torch.outer(v[t, head], key)
            torch.testing.assert_close(out[t, head], s @ q[t, head // 2] * 8**-0.5, atol=1e-12, rtol=0)
        torch.testing.assert_close(final[0, head], s, atol=1e-12, rtol=0)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_strong_writing(decay, chunk_size):
    """beta up to 2, where I - beta k k^T has a negative eigenvalue."""
    args = inputs(DELTA, decay, 150, most_beta=2.0)
    run = {"cu_seqlens": [0, 20, 150], "initial_state": states(2)}
    want = gated_delta_recurrent(*args, **run)
    assert_close(gated_delta_chunked(*args, **run, chunk_size=chunk_size), want, FLOAT64_BOUND)


@pytest.mark.parametrize("decay", ["scalar", "vector"])
@pytest.mark.parametrize("beta", [1.0, 1.99])
def test_equal_keys(decay, beta):
    """The worst system: one key again and again, no decay. Its powers grow like binomials, so a solver that
    sums powers would lose every digit of fp32."""
    q, k, v, log_decay, strength = inputs(DELTA, decay, 256, dtype=torch.float32)
    args = (
        q,
        k[:1].expand_as(k),
        v,
        torch.zeros_like(log_decay),
        torch.full_like(strength, beta),
    )
    want = gated_delta_recurrent(*in_double(args), cu_seqlens=[0, 256])
    out, final = gated_delta_chunked(*args, cu_seqlens=[0, 256], chunk_size=128)
    assert_close((out.double(), final.double()), want, 1e-4)


def test_full_writing_replaces():
    """beta 1 and a unit key: what was stored under it is gone, and the new value is read back."""
    _, k, v, _, beta = inputs(DELTA, "none", 3)
    args = (k, k, v, None, torch.ones_like(beta))
    out, _ = gated_delta_recurrent(*args, cu_seqlens=[0, 1, 2, 3], initial_state=states(3), scale=1.0)
    torch.testing.assert_close(out, v, atol=1e-5, rtol=0)  # l2norm's eps shortens the keys


def test_l2norm():
    x = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(l2norm(x, 0.0).norm(dim=-1), torch.ones(5).double())
    assert torch.equal(l2norm(torch.zeros(8)), torch.zeros(8))


def test_gradients_equal_those_of_the_recurrent_form():
    cu, grads = [0, 70, 140, 143], []
    for form in (gated_delta_recurrent, gated_delta_chunked):
        leaves = [x.requires_grad_() for x in inputs(DELTA, "scalar", 143)]
        out, final = form(*leaves, cu_seqlens=cu)
        (out.sin().sum() + final.cos().sum()).backward()
        grads.append([x.grad for x in leaves])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


@pytest.mark.parametrize("model, most_beta", [("qwen3_5", 1.0), ("qwen3_next", 1.0), ("olmo_hybrid", 2.0)])
@pytest.mark.parametrize("value_heads", [2, 6])
@pytest.mark.parametrize("tokens", [1, 64, 130])
def test_gated_deltanet_of_transformers(model, most_beta, value_heads, tokens):
    peer = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    args = inputs(DELTA, "scalar", tokens, value_heads=value_heads, dtype=torch.float32, most_beta=most_beta)
    initial = states(1, value_heads, dtype=torch.float32)
    got = gated_delta_chunked(*args, cu_seqlens=[0, tokens], initial_state=initial)
    group = value_heads // 2  # the peers take repeated heads
    q, k = (x.repeat_interleave(group, 1) for x in args[:2])
    for function in (peer.torch_chunk_gated_delta_rule, peer.torch_recurrent_gated_delta_rule):
        out, final = function(
            *(x[None] for x in (q, k, *args[2:])),
            initial_state=initial.transpose(2, 3),
            output_final_state=True,
        )
        assert_close(got, (out[0], final.transpose(2, 3)), FLOAT32_BOUND)


@pytest.mark.parametrize("model", ["kimi_linear", "bailing_hybrid"])
@pytest.mark.parametrize("tokens", [1, 64, 130])
def test_kda_of_transformers(model, tokens):
    peer = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    args = inputs(DELTA, "vector", tokens, key_heads=4, dtype=torch.float32)
    initial = states(1, dtype=torch.float32)
    got = gated_delta_chunked(*args, cu_seqlens=[0, tokens], initial_state=initial)
    for function in (peer.chunk_kimi_delta_attention, peer.recurrent_kimi_delta_attention):
        out, final = function(
            *(x[None] for x in args), initial_state=initial.transpose(2, 3), output_final_state=True
        )
        assert_close(got, (out[0], final.transpose(2, 3)), FLOAT32_BOUND)
