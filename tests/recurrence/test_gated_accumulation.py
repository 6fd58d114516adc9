"""Gated accumulation: its equation, and transformers' functions. Its forms meet in test_chunk_pass."""

from inspect import signature

import pytest
import torch
from torch.nn import functional as F

from denim.recurrence.gated_accumulation import (
    gated_accumulation_chunked,
    gated_accumulation_recurrent,
    gated_accumulation_step,
)
from tests.recurrence.cases import ACCUMULATION, DECAYS, FLOAT32_BOUND, assert_close, inputs, states


@pytest.mark.parametrize("decay", DECAYS)
def test_recurrent_is_the_sum(decay):
    """o_t = sum over s <= t of v_s <k_s, decay from s to t, q_t>, and what is left of the first state."""
    tokens = 6
    q, k, v, log_decay = inputs(ACCUMULATION, decay, tokens)
    initial = states(1)
    out, final = gated_accumulation_recurrent(q, k, v, log_decay, cu_seqlens=[0, 6], initial_state=initial)
    for head in range(4):
        for t in range(tokens):

            def left(s, head=head, t=t):
                """The product of the decays of tokens s + 1 .. t, [8]."""
                if log_decay is None:
                    return torch.ones(8, dtype=torch.float64)
                each = log_decay if decay == "constant" else log_decay[:, head]
                one = (each[head] * (t - s)) if decay == "constant" else each[s + 1 : t + 1].sum(0)
                return one.exp().expand(8)

            state = initial[0, head] * left(-1)
            for s in range(t + 1):
                state = state + torch.outer(v[s, head], k[s, head // 2] * left(s))
            want = state @ q[t, head // 2] * 8**-0.5
            torch.testing.assert_close(out[t, head], want, atol=1e-12, rtol=0)
        torch.testing.assert_close(final[0, head], state, atol=1e-12, rtol=0)


@pytest.mark.parametrize("model", ["mamba2", "nemotron_h"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("tokens", [1, 64, 130])
def test_ssd_of_transformers(model, groups, tokens):
    """Heads share B and C by groups; d_k is the state size, d_v the head's dimension."""
    peer = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 4, 12, generator=rng)
    B, C = torch.randn(2, tokens, groups, 8, generator=rng) * 8**-0.5
    delta = F.softplus(torch.randn(tokens, 4, generator=rng))
    A, D = -4 * torch.rand(4, generator=rng), torch.randn(4, generator=rng)
    initial = states(1, dtype=torch.float32)

    args = (C, B, x * delta.unsqueeze(2), delta * A)
    out, final = gated_accumulation_chunked(*args, cu_seqlens=[0, tokens], initial_state=initial, scale=1.0)
    got = out + x * D.view(4, 1), final
    want, want_final = peer.mamba2_chunk_scan(
        *(t[None] for t in (x, delta)),
        A,
        *(t[None] for t in (B, C)),
        chunk_size=32,
        D=D,
        initial_states=initial,
        return_final_states=True,
    )
    assert_close(got, (want[0], want_final), FLOAT32_BOUND)

    theirs, ours = initial.clone(), initial.clone()
    for t in range(min(tokens, 20)):
        # It takes delta, A and D for each element of a head.
        want = peer.mamba2_selective_state_update(
            theirs,
            x[t : t + 1],
            delta[t : t + 1].unsqueeze(2).expand(1, 4, 12),
            A.view(4, 1, 1).expand(4, 12, 8),
            B[t : t + 1],
            C[t : t + 1],
            D=D.view(4, 1).expand(4, 12),
        )
        out = gated_accumulation_step(*(arg[t : t + 1] for arg in args), ours, scale=1.0)
        assert_close((out + x[t] * D.view(4, 1), ours), (want, theirs), FLOAT32_BOUND)


class OneState:
    """As much of a cache as the layer below asks for."""

    def __init__(self, state):
        self.state = state

    def get_linear_cache(self, layer):
        return self.state

    def set_linear_cache(self, layer, state):
        self.state = state


@pytest.mark.parametrize("tokens", [1, 16, 50])
def test_lightning_attention_of_transformers(tokens):
    """MiniMax's layer, between its projections and its norm: a constant decay for each head, scale 1."""
    peer = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    config = peer.MiniMaxConfig(
        hidden_size=32,
        num_attention_heads=4,
        head_dim=8,
        num_hidden_layers=2,
        block_size=16,
        layer_types=["linear_attention", "full_attention"],
    )
    torch.manual_seed(0)
    layer = peer.MiniMaxLightningAttention(config, 0)
    x = torch.randn(1, tokens + 5, 32)

    def ours(x, initial):
        heads = layer.act_fn(layer.qkv_proj(x))[0].view(-1, 4, 24).split(8, -1)
        constant = -layer.slope_rate.view(4)
        out, final = gated_accumulation_chunked(
            *heads, constant, cu_seqlens=[0, x.shape[1]], initial_state=initial, chunk_size=16, scale=1.0
        )
        out = layer.norm(out.flatten(1)) * torch.sigmoid(layer.output_gate(x[0]))
        return layer.out_proj(out), final

    with torch.no_grad():
        want, state = layer(x[:, :tokens], None, None)
        got = ours(x[:, :tokens], None)
        assert_close(got, (want[0], state.mT), FLOAT32_BOUND)
        # named past_key_values before transformers 5.24
        names = signature(layer.forward).parameters
        cache = {"cache" if "cache" in names else "past_key_values": OneState(state)}
        want, state = layer(x[:, tokens:], None, None, **cache)
        assert_close(ours(x[:, tokens:], got[1]), (want[0], state.mT), FLOAT32_BOUND)
