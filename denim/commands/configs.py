"""Which config a command was given: a folder, a file, the name of a published model, or none.

Owns the way from what people type to a file, and the name under which it is shown. Must not import torch.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from denim.errors import ConfigError
from denim.spec import embedded_model
from denim.spec.config_file import unreadable
from denim.spec.published import published_configs

ORG_NAME = re.compile(r"\w[\w.-]*/[^/]+")
"""An organisation and a model's name, as on the Hugging Face hub."""


class Config(NamedTuple):
    """`place` is a folder or a file that is there; `published`: it came with the package."""

    name: str
    place: Path
    published: bool = False


def find_config(asked: Path | None) -> Config:
    """What lies at `asked`, else the published model of that name in either case; None: the embedded model.

    The name may stand behind its organisation's: Qwen/Qwen3.5-0.8B. Raises ConfigError for what may not be
    read, and, with names that are near, where there is neither.
    """
    place = embedded_model() if asked is None else asked
    try:
        if (found := _lying_at(place)) is not None:
            return found
    except OSError as error:  # a folder on the way that may not be entered
        raise unreadable(place, error) from error
    known = published_configs()
    by_lower = {name.lower(): name for name in known}
    typed = (place.name if ORG_NAME.fullmatch(str(place)) else str(place)).lower()
    if (name := by_lower.get(typed)) is not None:
        return Config(name, known[name], published=True)
    near = [by_lower[name] for name in get_close_matches(typed, by_lower, n=3, cutoff=0.5)]
    raise ConfigError(
        f"{asked} does not exist; give a model folder, the path of a config.json, or the name of a published "
        f"model, such as {', '.join(near or list(known)[:3])}"
    )


def _lying_at(place: Path) -> Config | None:
    if place.is_dir() or place.name == "config.json":
        return Config((place if place.is_dir() else place.parent).resolve().name, place)
    return Config(place.stem, place) if place.exists() else None
