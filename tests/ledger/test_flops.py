"""FLOPs against PyTorch's own counter, and their growth with length."""

from __future__ import annotations

import pytest

from denim.ledger import decode_flops, prefill_flops
from denim.ledger.flops import CHUNK
from denim.spec import read_spec
from denim.spec.illustrative import illustrative
from tests.spec.configs import qwen3_5_0_8b_text


def test_matrix_products_match_pytorchs_count() -> None:
    """A forward of transformers' model over T tokens: projections, attention over all T × T pairs (it
    masks where Denim's sum stops at the diagonal), the head for every token."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    tokens = 8
    small = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 500, "num_attention_heads": 4}
    layout = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "full_attention_interval": None}
    keys = qwen3_5_0_8b_text() | small | layout | {"dtype": "float32", "eos_token_id": 0}
    spec = read_spec(keys)
    config = transformers.Qwen3_5TextConfig(**keys, attn_implementation="eager")
    model = transformers.Qwen3_5ForCausalLM(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    masked = 2 * spec.layers[0].mixer.mixing_flops(tokens * tokens - tokens * (tokens + 1) // 2)
    heads = (tokens - 1) * 2 * spec.hidden_size * spec.vocab_size
    assert counter.get_total_flops() == prefill_flops(spec, tokens) + masked + heads


def test_prefill_of_attention_is_the_sum_over_its_tokens() -> None:
    spec = illustrative()
    mixer = spec.layers[3].mixer
    assert mixer.prefill_mixing_flops(100, CHUNK) == sum(mixer.mixing_flops(i + 1) for i in range(100))


def test_a_linear_layer_costs_the_same_at_every_context() -> None:
    mixer = illustrative().layers[0].mixer
    assert mixer.mixing_flops(1) == mixer.mixing_flops(10**6)
    assert mixer.prefill_mixing_flops(2048, CHUNK) == 32 * mixer.prefill_mixing_flops(64, CHUNK)
    assert mixer.prefill_mixing_flops(3, CHUNK) < 3 / 64 * mixer.prefill_mixing_flops(64, CHUNK)


def test_decode_grows_with_context_by_attention_only() -> None:
    spec = illustrative()
    growth = decode_flops(spec, 5000) - decode_flops(spec, 1000)
    assert growth == 12 * 4 * 4000 * 16 * 256


def test_decode_of_0_8b_is_about_two_flops_a_parameter() -> None:
    spec = read_spec(qwen3_5_0_8b_text())
    assert decode_flops(spec, 1) == pytest.approx(2 * 752e6, rel=0.05)
