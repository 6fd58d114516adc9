"""Other engines' layout rules against figures that were read off those engines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from denim.ledger.lengths import Lengths
from denim.ledger.peers import SglangLayout, VllmLayout
from denim.spec import read_spec
from denim.spec.illustrative import illustrative
from denim.spec.published import FOLDER as CONFIGS
from tests.spec.configs import qwen3_5_0_8b

KIB, MIB = 1024, 2**20


def test_vllm_blocks_of_qwen3_5_0_8b() -> None:
    """544 to 576 tokens by the kernel's alignment, 1,088 with FP8 KV."""
    spec = read_spec(qwen3_5_0_8b())
    assert [VllmLayout.of(spec, alignment=n).block_tokens for n in (16, 32, 64)] == [544, 544, 576]
    assert VllmLayout.of(spec, "float8_e4m3fn").block_tokens == 1088


def test_vllm_requests_of_qwen3_5_0_8b() -> None:
    """One block of KV and one for each of three groups of linear layers: 27.0 MiB at 100 tokens. With three
    drafts four states for each group, and seven layers in a group with the MTP head's: 102.4 MiB."""
    spec = read_spec(qwen3_5_0_8b())
    assert VllmLayout.of(spec).request_bytes(100) == 27 * MIB
    assert VllmLayout.of(spec).request_bytes(576) == 27 * MIB
    assert VllmLayout.of(spec).request_bytes(577) == 33.75 * MIB
    assert round(VllmLayout.of(spec, drafts=3).request_bytes(100) / MIB, 1) == 102.4


def test_vllm_replays_the_drafts_of_mamba2_and_kda() -> None:
    for name, replayed in (("nemotron-h-8b", True), ("kimi_linear_48b_a3b", True), ("jamba-v0.1", False)):
        spec = read_spec(CONFIGS / f"{name}.json")
        plain, drafting = VllmLayout.of(spec), VllmLayout.of(spec, drafts=3)
        assert drafting.state_blocks == plain.state_blocks * (1 if replayed else 4)


def test_vllm_counts_whole_blocks_without_the_null_block() -> None:
    layout = VllmLayout.of(read_spec(qwen3_5_0_8b()))
    lengths = Lengths.fixed(100)
    assert layout.requests(9 * layout.block_bytes, lengths) == 2
    assert layout.requests(9 * layout.block_bytes - 1, lengths) == 1
    assert layout.requests(0, lengths) == 0


def test_vllm_pads_groups_where_the_kinds_are_nearly_even() -> None:
    """4 attention and 5 linear layers: groups of 5, not of 4, so that there are two groups, not three."""
    spec = illustrative()
    attention, linear = spec.layers[3], spec.layers[0]
    layout = VllmLayout.of(replace(spec, layers=(attention,) * 4 + (linear,) * 5))
    assert (layout.kv_groups, layout.state_blocks) == (1, 1)
    layout = VllmLayout.of(replace(spec, layers=(attention,) * 4 + (linear,) * 6))
    assert (layout.kv_groups, layout.state_blocks) == (1, 2)


def test_one_kind_of_layer_alone() -> None:
    spec = illustrative()
    attention = replace(spec, layers=(spec.layers[3],) * 2)
    assert VllmLayout.of(attention).request_bytes(17) == 2 * 16 * 4 * KIB
    linear = replace(spec, layers=(spec.layers[0],) * 2)
    state = SglangLayout.of(linear, "auto", 0, 4).state_bytes
    assert VllmLayout.of(linear).request_bytes(1) == VllmLayout.of(linear).request_bytes(9999) == state
    assert VllmLayout.of(linear, drafts=2).request_bytes(1) >= 3 * state
    assert SglangLayout.of(linear, "auto", 0, 4).requests(40 * state, Lengths.fixed(9)) == 10
    assert SglangLayout.of(attention, "auto", 0, 4).requests(90 * 4 * KIB, Lengths.fixed(9)) == 10


@pytest.mark.parametrize(("reserved", "drafts"), [(4, 0), (5, 0), (4, 3)])
def test_sglang_is_bound_by_the_pool_that_is_exhausted_first(reserved: int, drafts: int) -> None:
    spec = read_spec(qwen3_5_0_8b())
    layout = SglangLayout.of(spec, "auto", drafts, reserved)
    slots = (reserved + drafts) * layout.state_bytes
    kv = 12 * KIB + (2 * KIB if drafts else 0)
    assert layout.request_bytes(100) == slots + 100 * kv
    memory = 2**36
    assert layout.requests(memory, Lengths.fixed(100)) == int(memory * 0.9 / 1.9 / slots)
    assert layout.requests(memory, Lengths.fixed(100_000)) == int(memory / 1.9 / (100_000 * kv))


def test_vllm_s_windows_are_longer_by_the_drafts() -> None:
    """Three linear layers of Qwen3.5-0.8B: 1 MiB of state, and 3 columns of 12 KiB, with 2 drafts 5."""
    spec = read_spec(qwen3_5_0_8b())
    linear = replace(spec, layers=spec.layers[:3], mtp_layers=())
    assert VllmLayout.of(linear).block_bytes == 3 * (MIB + 3 * 12 * KIB)
    assert VllmLayout.of(linear, drafts=2).block_bytes == 3 * (MIB + 5 * 12 * KIB)
