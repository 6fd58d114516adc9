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
    PEERS,
    TORCH,
    TRITON,
    DeltaPrefill,
    can,
    check_wish,
    decode_backend,
    delta_prefill_backend,
    prefill_backend,
)

CALL = DeltaPrefill(16, 32, 128, 128, torch.bfloat16, sequences=1, tokens=8192, saves=False)


@pytest.fixture
def all_installed(monkeypatch):
    monkeypatch.setattr(backend, "installed", lambda name: True)


@pytest.fixture
def none_installed(monkeypatch):
    monkeypatch.setattr(backend, "installed", lambda name: name == TORCH)


def test_a_cpu_has_torch_alone(all_installed):
    assert decode_backend("cpu") == prefill_backend("cpu") == TORCH


def test_cuda_has_triton_where_it_is_installed(all_installed):
    assert decode_backend("cuda") == prefill_backend("cuda") == TRITON
    assert decode_backend("cuda", TORCH) == prefill_backend("cuda", TORCH) == TORCH


def test_cuda_without_triton_runs_torch(none_installed):
    assert decode_backend("cuda") == prefill_backend("cuda") == TORCH


@pytest.mark.parametrize("wish", PEERS)
def test_a_peer_that_is_wished_for_takes_prefill_alone(all_installed, wish):
    assert delta_prefill_backend(wish, CALL) == wish
    assert prefill_backend("cuda", wish) == TRITON  # rules that no peer has
    assert decode_backend("cuda", wish) == TRITON


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


@pytest.mark.parametrize("wish", [AUTO, TRITON])
def test_without_a_wish_the_own_kernels_run(all_installed, wish):
    assert delta_prefill_backend(wish, CALL) == TRITON


def test_a_wish_that_cannot_be_met_is_refused(none_installed):
    for wish in (TRITON, *PEERS):
        with pytest.raises(ConfigError, match=f"recurrence_backend='{wish}'.*not installed"):
            check_wish(wish, "cuda")
        with pytest.raises(ConfigError, match="needs a CUDA device"):
            check_wish(wish, "cpu")
    for wish in (AUTO, TORCH):
        check_wish(wish, "cpu")
        check_wish(wish, "cuda")
