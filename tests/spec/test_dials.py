"""Dials: nothing turned is the model itself, what is turned shows in the spec, what cannot be is refused."""

from __future__ import annotations

import pytest

from denim.errors import ConfigError
from denim.ledger.cost import ledger_of
from denim.spec import ModelSpec, read_spec
from denim.spec.dials import FULL_SHARE, NAMES, dials_of, turned
from denim.spec.illustrative import illustrative
from denim.spec.linear import GatedDeltaNet
from denim.spec.published import published_configs


def published(name: str) -> ModelSpec:
    return read_spec(published_configs()[name])


@pytest.mark.parametrize("name", published_configs())
def test_at_its_own_values_a_model_is_itself(name: str) -> None:
    spec = published(name)
    assert turned(spec, {}) == spec
    assert turned(spec, {dial.name: dial.value for dial in dials_of(spec)}) == spec


@pytest.mark.parametrize("name", published_configs())
def test_every_end_of_every_dial_is_a_model_with_costs(name: str) -> None:
    spec = published(name)
    for dial in dials_of(spec):
        assert dial.name in NAMES and list(dial.values) == sorted(set(dial.values))
        assert dial.value in dial.values
        for value in (dial.values[0], dial.values[-1]):
            ledger = ledger_of(turned(spec, {dial.name: value}))
            assert ledger.hybrid_bytes(1000) > 0


def test_layers_repeat_the_models_own() -> None:
    assert turned(illustrative(), {"layers": 6}).pattern == "LLLFLL"
    assert turned(illustrative(), {"layers": 96}).pattern == "LLLF" * 24
    ledger, double = ledger_of(illustrative()), ledger_of(turned(illustrative(), {"layers": 96}))
    assert double.bytes_per_request == 2 * ledger.bytes_per_request
    assert double.crossover_tokens == ledger.crossover_tokens


def test_a_share_is_spread_evenly_and_networks_stay() -> None:
    assert turned(illustrative(), {"full_share": 50}).pattern == "LF" * 24
    assert set(turned(illustrative(), {"full_share": 0}).pattern) == {"L"}
    assert set(turned(illustrative(), {"full_share": 100}).pattern) == {"F"}
    nemotron = published("Nemotron-H-8B")
    half = turned(nemotron, {"full_share": 50})
    assert [layer.ffn for layer in half.layers] == [layer.ffn for layer in nemotron.layers]
    assert half.pattern.count("-") == nemotron.pattern.count("-")
    assert half.pattern.count("F") == half.pattern.count("L") == (52 - half.pattern.count("-")) // 2


def test_key_heads_follow_value_heads() -> None:
    spec = turned(published("Qwen3.5-35B-A3B"), {"linear_heads": 64})
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, GatedDeltaNet)
    assert (mixer.num_value_heads, mixer.num_key_heads) == (64, 32)
    heads = next(dial for dial in dials_of(published("Qwen3.5-35B-A3B")) if dial.name == "linear_heads")
    assert heads.values[0] == 2 and all(count % 2 == 0 for count in heads.values)


def test_the_mtp_head_follows_the_attention() -> None:
    spec = published("Qwen3.5-0.8B")
    wide = ledger_of(turned(spec, {"kv_heads": 4}))
    assert wide.mtp_kv_bytes_per_token == 2 * ledger_of(spec).mtp_kv_bytes_per_token


@pytest.mark.parametrize(
    ("name", "changes", "seen"),
    [
        ("Qwen3.5-0.8B", {"layers": 1000}, "layers is 1000; choose one of 1 to 128$"),
        ("Qwen3.5-0.8B", {"kv_heads": 3}, "kv_heads is 3; choose one of 1, 2, 4, 8"),
        ("Qwen3.5-0.8B", {"channels": 1024}, "channels is no dim of this model; it has layers"),
        ("Mamba-2.8B", {FULL_SHARE: 25}, "full_share is no dim of this model"),
        ("Falcon-H1-0.5B", {FULL_SHARE: 25}, "full_share is no dim of this model"),
    ],
)
def test_what_cannot_be_is_refused(name: str, changes: dict[str, float], seen: str) -> None:
    with pytest.raises(ConfigError, match=seen):
        turned(published(name), changes)
