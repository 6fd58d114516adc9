"""A model cut across devices, what drafts cost, and the least time of a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from denim.errors import ConfigError
from denim.ledger import count_parameters, decode_flops, ledger_of, weight_bytes
from denim.ledger.devices import DEVICES, find_device
from denim.ledger.drafts import draft_cost, record_bytes
from denim.ledger.step_floor import decode_floor, prefill_floor, weights_read
from denim.ledger.tensor_parallel import share_of
from denim.spec import read_spec
from denim.spec.illustrative import illustrative
from denim.spec.published import FOLDER as CONFIGS
from denim.spec.published import published_configs
from tests.spec.configs import qwen3_5_0_8b

KIB = 1024


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_two_shares_make_the_whole(path: Path) -> None:
    """Every family can be cut: states halve, KV halves or is repeated, matrices halve nearly."""
    spec = read_spec(path)
    share = share_of(spec, 2)
    whole, half = ledger_of(spec), ledger_of(share)
    assert half.state_bytes * 2 == whole.state_bytes
    assert half.kv_bytes_per_token * 2 in (whole.kv_bytes_per_token, 2 * whole.kv_bytes_per_token)
    assert 0.5 <= count_parameters(share).total / count_parameters(spec).total < 0.56
    assert 0.5 <= decode_flops(share, 1000) / decode_flops(spec, 1000) < 0.58


def test_kv_heads_are_repeated_beyond_their_number() -> None:
    spec = read_spec(qwen3_5_0_8b())  # two KV heads
    per_token = [ledger_of(share_of(spec, n)).kv_bytes_per_token for n in (1, 2, 4, 8)]
    assert per_token == [12 * KIB, 6 * KIB, 6 * KIB, 6 * KIB]
    assert share_of(spec, 1) is spec


def test_a_vocabulary_that_does_not_divide_is_rounded_up() -> None:
    spec = replace(read_spec(qwen3_5_0_8b()), vocab_size=1001)
    assert [share_of(spec, n).vocab_size for n in (2, 4)] == [501, 251]


@pytest.mark.parametrize(("devices", "message"), [(0, "must be 1 or more"), (3, "not divide.*16 linear")])
def test_a_cut_that_cannot_be(devices: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--tensor-parallel is {devices}.*{message}"):
        share_of(read_spec(qwen3_5_0_8b()), devices)


def test_a_record_is_20_kib_a_layer_and_28_with_twice_the_value_heads() -> None:
    """Keys, values and the convolution's input in bf16; decay and β of each head in fp32 beside them."""
    spec = read_spec(qwen3_5_0_8b())
    assert record_bytes(spec) == 18 * (20 * KIB + 2 * 16 * 4)
    layer = spec.layers[0]
    wide = replace(layer, mixer=replace(layer.mixer, num_value_heads=32))
    assert record_bytes(replace(spec, layers=(wide,))) == 28 * KIB + 2 * 32 * 4


@pytest.mark.parametrize(
    ("name", "numbers", "gates"),
    [
        ("Kimi-Linear-48B-A3B", (3 + 2) * 32 * 128, 32 * (128 + 1)),  # a decay per key channel, and β
        ("MiniMax-Text-01", 2 * 64 * 128, 0),
        ("Mamba2-2.7B", (5120 + 2 * 128) + (5120 + 128), 80),
        ("Falcon-Mamba-7B", 8192 + (8192 + 16), 8192),
    ],
)
def test_records_of_other_rules(name: str, numbers: int, gates: int) -> None:
    """The convolution's input, keys and values in the model's dtype; gates in fp32."""
    spec = replace(read_spec(published_configs()[name]), dtype="bfloat16")
    layer = next(layer for layer in spec.layers if layer.mixer.letter == "L")
    assert record_bytes(replace(spec, layers=(layer,))) == 2 * numbers + 4 * gates


def test_drafts_cost_records_not_states() -> None:
    spec = read_spec(qwen3_5_0_8b())
    cost = draft_cost(spec, 15)
    assert round(cost.records_bytes / 2**20, 1) == 5.7
    assert cost.snapshots_bytes == 15 * ledger_of(spec).bytes_per_request
    assert cost.mtp_kv_bytes_per_token == 2 * KIB


def test_floor_of_qwen3_5_0_8b_on_an_h200() -> None:
    """1.50 GB of weights at copy bandwidth are 0.352 ms, a decode step at 1k tokens 0.364."""
    spec, h200 = read_spec(qwen3_5_0_8b()), find_device("h200")
    ledger = ledger_of(spec)
    assert weights_read(spec, 1, h200) / 1e9 == pytest.approx(1.505, abs=0.005)
    one = decode_floor(spec, ledger, h200, 1024, 1)
    assert one.seconds == pytest.approx(0.364e-3, rel=0.005)
    assert one.bound == "memory"
    many = decode_floor(spec, ledger, h200, 1024, 256)
    moved = weights_read(spec, 1, h200) + 256 * (2 * ledger.bytes_per_request + 1025 * 12 * KIB)
    assert many.moved_bytes == moved
    assert many.seconds == many.seconds_per_token * 256 == moved / 4.275e12
    prompt = prefill_floor(spec, ledger, h200, 8192)
    assert (prompt.bound, prompt.seconds) == ("compute", prompt.flops / 784e12)


def test_a_step_reads_the_experts_that_its_tokens_choose() -> None:
    spec = read_spec(CONFIGS / "qwen3_next_80b_a3b.json")
    h200 = find_device("h200")
    one, many = weights_read(spec, 1, h200), weights_read(spec, 10_000, h200)
    assert one / 2 == pytest.approx(3.6e9, rel=0.1)
    embedding_and_mtp = weight_bytes(spec) - count_parameters(spec).layers * 2 - 2 * 2048 * spec.vocab_size
    assert many == pytest.approx(weight_bytes(spec) - embedding_and_mtp, rel=1e-3)
    ffn = spec.layers[0].ffn
    two = weights_read(spec, 2, h200) - one
    expert = 3 * 2048 * ffn.intermediate * 2
    assert two == pytest.approx(48 * ffn.top_k * (1 - ffn.top_k / ffn.num_experts) * expert, rel=1e-2)


def test_every_device_names_its_sources() -> None:
    assert [device.name for device in DEVICES] == ["H200", "H100", "L40S", "RTX4090", "CPU"]
    assert find_device("rtx 4090") is find_device("RTX4090")
    for device in DEVICES:
        assert device.sources
        assert device.bandwidth <= device.vendor_bandwidth
        assert device.flops <= device.vendor_flops
    with pytest.raises(ConfigError, match="--device is 'B200'; known: H200"):
        find_device("B200")


def test_dtypes_reach_the_floor() -> None:
    spec = illustrative()
    fp8 = decode_floor(spec, ledger_of(spec, "float8_e4m3fn"), DEVICES[0], 1000, 1)
    assert fp8.moved_bytes < decode_floor(spec, ledger_of(spec), DEVICES[0], 1000, 1).moved_bytes
