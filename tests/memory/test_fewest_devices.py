"""The fewest devices that hold a model."""

from __future__ import annotations

from functools import partial

import pytest

from denim.errors import CapacityError, ConfigError
from denim.ledger.devices import find_device
from denim.memory.capacity_plan import CapacityPlan
from denim.memory.fewest_devices import fewest_devices
from denim.spec import read_spec
from denim.spec.published import published_configs


@pytest.mark.parametrize(
    ("name", "device", "devices"),
    [("Qwen3.5-0.8B", "RTX4090", 1), ("Qwen3-Next-80B-A3B", "H200", 2), ("MiniMax-Text-01", "H100", 16)],
)
def test_half_as_many_hold_it_not(name: str, device: str, devices: int) -> None:
    of = partial(CapacityPlan.of, read_spec(published_configs()[name]), find_device(device))
    found, plan = fewest_devices(of)
    assert found == devices and plan.num_slabs > 0
    if devices > 1:
        with pytest.raises(CapacityError):
            of(devices=devices // 2)


def test_what_no_number_holds_says_why_of_one() -> None:
    of = partial(CapacityPlan.of, read_spec(published_configs()["MiniMax-Text-01"]), find_device("RTX4090"))
    with pytest.raises(CapacityError, match="beside 850 GiB of weights"):
        fewest_devices(of)


def test_a_wrong_option_is_wrong_for_any_number() -> None:
    spec = read_spec(published_configs()["Qwen3.5-0.8B"])
    with pytest.raises(ConfigError, match="--drafts is -1"):
        fewest_devices(partial(CapacityPlan.of, spec, find_device("H200"), drafts=-1))
