"""From what is typed to an engine's options."""

from __future__ import annotations

import pytest

from denim import ConfigError
from denim.commands.engine import memory_option
from denim.engine.options import EngineOptions


@pytest.mark.parametrize(
    ("typed", "option"), [("0.5", 0.5), ("1.0", 1.0), ("8GiB", "8GiB"), ("1", "1"), ("2.5e9", "2.5e9")]
)
def test_memory_is_a_fraction_or_bytes(typed: str, option: str | float) -> None:
    assert memory_option(typed) == option
    EngineOptions(memory=memory_option(typed))


@pytest.mark.parametrize("typed", ["1.5", "2.0", "0.0", "-0.5"])
def test_a_fraction_that_cannot_be_is_no_number_of_bytes(typed: str) -> None:
    with pytest.raises(
        ConfigError, match=r"a fraction of the device must lie above 0 and be at most 1; .*TiB"
    ):
        EngineOptions(memory=memory_option(typed))
