"""Which form runs where: what the device, the wish and the call say."""

import pytest
import torch

from denim.errors import ConfigError
from denim.recurrence import backend
from denim.recurrence.backend import (
    AUTO,
    FLA,
    FLASHINFER,
    FLASHQLA,
    MEASURED,
    PEERS,
    TORCH,
    TRITON,
    DeltaPrefill,
    can,
    check_wish,
    delta_prefill_backend,
    rule_backend,
)

HOPPER = (9, 0)
CALL = DeltaPrefill(16, 128, 128, torch.bfloat16, 32768, 16, saves=False, captured=False, capability=HOPPER)


@pytest.fixture
def all_installed(monkeypatch):
    monkeypatch.setattr(backend, "installed", lambda name: True)
    monkeypatch.setattr(backend, "usable", lambda name: True)


@pytest.fixture
def none_installed(monkeypatch):
    monkeypatch.setattr(backend, "installed", lambda name: name == TORCH)
    monkeypatch.setattr(backend, "usable", lambda name: False)


def test_a_cpu_has_torch_alone(all_installed):
    assert rule_backend("cpu") == TORCH


def test_cuda_has_triton_where_it_is_installed(all_installed):
    assert rule_backend("cuda") == TRITON
    assert rule_backend("cuda", TORCH) == TORCH


def test_cuda_without_triton_runs_torch(none_installed):
    assert rule_backend("cuda") == TORCH


@pytest.mark.parametrize("wish", PEERS)
def test_a_peer_that_is_wished_for_takes_prefill_alone(all_installed, wish):
    assert delta_prefill_backend(wish, CALL) == wish
    assert rule_backend("cuda", wish) == TRITON  # decode, and rules that no peer has


@pytest.mark.parametrize(
    "change",
    [
        {"saves": True},
        {"dtype": torch.float32},
        {"captured": True},
        {"key_dim": 64},
        {"value_dim": 256},
    ],
)
@pytest.mark.parametrize("peer", [FLASHINFER, FLASHQLA])
def test_what_a_peer_cannot_do_goes_to_triton(all_installed, peer, change):
    call = CALL._replace(**change)
    assert not can(peer, call)
    assert delta_prefill_backend(peer, call) == TRITON


def test_fla_takes_other_heads_too(all_installed):
    assert can(FLA, CALL._replace(key_dim=64, value_dim=256))
    assert not can(FLA, CALL._replace(key_dim=512))


def test_triton_is_triton_whatever_is_faster(all_installed):
    assert delta_prefill_backend(TRITON, CALL) == TRITON


def test_auto_takes_what_was_measured_faster(all_installed):
    (measured,) = MEASURED
    assert delta_prefill_backend(AUTO, CALL) == measured.peer
    for heads in (16, 32):
        least = CALL._replace(value_heads=heads, tokens=measured.work // heads)
        assert delta_prefill_backend(AUTO, least) == measured.peer
        assert delta_prefill_backend(AUTO, least._replace(tokens=least.tokens - 1)) == TRITON


@pytest.mark.parametrize(
    "change", [{"capability": (10, 0)}, {"saves": True}, {"captured": True}, {"sequences": 1}]
)
def test_auto_stays_with_the_own_kernel(all_installed, change):
    assert delta_prefill_backend(AUTO, CALL._replace(**change)) == TRITON


def test_auto_without_peers(none_installed):
    assert delta_prefill_backend(AUTO, CALL) == TRITON


def test_a_wish_that_cannot_be_met_is_refused(none_installed):
    for wish in (TRITON, *PEERS):
        with pytest.raises(ConfigError, match=f"recurrence_backend='{wish}'.*not installed"):
            check_wish(wish, "cuda")
        with pytest.raises(ConfigError, match="needs a CUDA device"):
            check_wish(wish, "cpu")
    for wish in (AUTO, TORCH):
        check_wish(wish, "cpu")
        check_wish(wish, "cuda")


def test_a_peer_without_its_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(backend, "installed", lambda name: True)
    monkeypatch.setattr(backend, "usable", lambda name: False)
    with pytest.raises(ConfigError, match="lacks the kernels.*nvidia-cutlass-dsl"):
        check_wish(FLASHINFER, "cuda")
    assert delta_prefill_backend(AUTO, CALL) == TRITON


def test_a_peer_is_not_imported_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(backend, "installed", lambda name: False)
    backend.usable.cache_clear()
    assert not backend.usable(FLASHINFER)
    backend.usable.cache_clear()
