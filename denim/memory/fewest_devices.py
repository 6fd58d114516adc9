"""How many equal devices a model needs, where nobody says how many share it.

Owns the search. What fits on so many `denim.memory.capacity_plan` says. Pure Python: never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable

from denim.errors import CapacityError, ConfigError
from denim.memory.capacity_plan import CapacityPlan

NUMBERS = (1, 2, 4, 8, 16, 32)
"""Devices that are tried, in turn."""


def fewest_devices(of: Callable[..., CapacityPlan]) -> tuple[int, CapacityPlan]:
    """The fewest devices, by powers of two, that hold the model, and `of(devices=…)` of so many.

    Raises what `of` says of one device where no number does.
    """
    first: CapacityError | None = None
    for devices in NUMBERS:
        try:
            return devices, of(devices=devices)
        except CapacityError as error:
            first = first or error
        except ConfigError:  # heads that do not divide, or an option that is wrong for any number
            if first is None:
                raise
            break
    assert first is not None
    raise first
