"""Which class serves which family.

Families are found, not listed: a new module in `denim.models.families` is enough.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from denim.errors import ConfigError
from denim.models import families
from denim.models.family import Family
from denim.spec.model import ModelSpec


def family_of(spec: ModelSpec) -> Family:
    """Raises ConfigError for a family that has a config reader but no model."""
    known = all_families()
    if spec.family not in known:
        raise ConfigError(f"no model for family {spec.family!r}; supported: {', '.join(sorted(known))}")
    return known[spec.family]


@cache
def all_families() -> dict[str, Family]:
    """A spec's `family` -> what serves it."""
    found: dict[str, Family] = {}
    for module in iter_modules(families.__path__):
        found.update(import_module(f"{families.__name__}.{module.name}").FAMILIES)
    return found
