"""Exact byte counts of two known models, and of models that lack one kind of layer."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from denim.errors import ConfigError
from denim.ledger import LENGTHS, ledger_json, ledger_of
from denim.spec import read_spec
from denim.spec.illustrative import illustrative
from denim.spec.published import published_configs
from tests.spec.configs import qwen3_5_0_8b

KIB, MIB = 1024, 1024 * 1024


def test_qwen3_5_0_8b() -> None:
    ledger = ledger_of(read_spec(qwen3_5_0_8b()))
    assert ledger.kv_bytes_per_token == 12 * KIB
    assert ledger.all_full_kv_bytes_per_token == 48 * KIB
    assert ledger.mtp_kv_bytes_per_token == 2 * KIB
    assert ledger.state_bytes == 18 * MIB
    assert ledger.conv_bytes == 648 * KIB
    assert ledger.conv_bytes_stored_width == 864 * KIB
    assert ledger.bytes_per_request == 18 * MIB + 648 * KIB
    assert ledger.crossover_tokens == 530
    assert ledger.crossover_tokens_stored_width == 536


def test_illustrative_model() -> None:
    ledger = ledger_of(illustrative())
    lengths = (512, 1024, 4096, 32768, 262144)
    assert lengths == LENGTHS
    assert [ledger.hybrid_bytes(n) / MIB for n in lengths] == [84, 96, 168, 840, 6216]
    assert [ledger.all_full_bytes(n) for n in lengths] == [n * MIB for n in (48, 96, 384, 3072, 24576)]
    assert ledger.crossover_tokens == ledger.crossover_tokens_stored_width == 1024
    assert [round(ledger.checkpoint_ratio(n) or 0, 1) for n in (256, 1024, 4096)] == [12.0, 3.0, 0.8]


def test_crossover_is_where_the_hybrid_stops_being_larger() -> None:
    ledgers = [ledger_of(read_spec(path)) for path in published_configs().values()]
    hybrids = [ledger for ledger in ledgers if ledger.crossover_tokens]
    assert len(hybrids) > 10
    for ledger in hybrids:
        crossover = ledger.crossover_tokens or 0
        assert ledger.hybrid_bytes(crossover) <= (ledger.all_full_bytes(crossover) or 0)
        assert ledger.hybrid_bytes(crossover - 1) > (ledger.all_full_bytes(crossover - 1) or 0)
        tokens, kv = ledger.checkpoint_equals_kv_of_tokens or 0, ledger.kv_bytes_per_token
        assert (tokens - 1) * kv < ledger.bytes_per_request <= tokens * kv


def test_layers_without_a_mixer_would_not_be_attention() -> None:
    spec = read_spec(published_configs()["Nemotron-H-8B"])
    ledger = ledger_of(spec)
    attends, mixes = spec.pattern.count("F"), len(spec.layers) - spec.pattern.count("-")
    assert 0 < attends < mixes < len(spec.layers)
    assert ledger.all_full_kv_bytes_per_token == ledger.kv_bytes_per_token // attends * mixes


def test_dtypes_scale_what_they_cover() -> None:
    spec = read_spec(qwen3_5_0_8b(), state_dtype="bfloat16")
    ledger = ledger_of(spec, kv_dtype="float8_e4m3fn")
    assert (ledger.kv_bytes_per_token, ledger.state_bytes) == (6 * KIB, 9 * MIB)
    assert ledger.mtp_kv_bytes_per_token == KIB
    assert ledger.conv_bytes == 648 * KIB
    with pytest.raises(ConfigError, match="kv_dtype is 'fp8'"):
        ledger_of(spec, kv_dtype="fp8")


def test_without_attention_there_is_nothing_to_compare_with() -> None:
    spec = illustrative()
    ledger = ledger_of(replace(spec, layers=spec.layers[:3]))
    assert ledger.kv_bytes_per_token == 0
    assert ledger.all_full_bytes(1000) is ledger.crossover_tokens is ledger.checkpoint_ratio(1000) is None
    assert ledger.hybrid_bytes(1) == ledger.hybrid_bytes(100_000) == 6 * MIB


def test_without_linear_layers_there_is_no_crossover() -> None:
    spec = illustrative()
    ledger = ledger_of(replace(spec, layers=(spec.layers[3],) * 2))
    assert ledger.hybrid_bytes(7) == ledger.all_full_bytes(7) == 7 * 4 * KIB
    assert ledger.crossover_tokens is None


def test_json_has_the_promised_keys_and_is_plain() -> None:
    values = json.loads(json.dumps(ledger_json(read_spec(qwen3_5_0_8b()), lengths=(512, 1024))))
    promised = {
        "kv_bytes_per_token": 12288,
        "all_full_kv_bytes_per_token": 49152,
        "state_bytes": 18874368,
        "conv_bytes": 663552,
        "conv_bytes_stored_width": 884736,
        "bytes_per_request": 19537920,
        "crossover_tokens": 530,
        "crossover_tokens_stored_width": 536,
        "layers": "LLLF" * 6,
    }
    assert {key: values[key] for key in promised} == promised
    assert [row["tokens"] for row in values["lengths"]] == [512, 1024]
    assert values["lengths"][0]["hybrid_bytes"] == 19537920 + 512 * 12288
    assert values["lengths"][0]["all_full_bytes"] == 512 * 49152
