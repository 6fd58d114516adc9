"""The JSON files of a model folder, as they lie on disk.

Owns finding and parsing them. Knows nothing of what they mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from denim.errors import ConfigError

Source = Mapping[str, Any] | str | PathLike[str]


def load_config(source: Source) -> dict[str, Any]:
    """A config as a dict: `source` is that already, a model folder, or the path of a config.json.

    Raises ConfigError if there is no such file, if it may not be read, or if it is not a JSON object.
    """
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    try:
        return load_json(_file_of(path))
    except OSError as error:  # a folder on the way that may not be entered
        raise unreadable(path, error) from error


def config_name(source: Source) -> str:
    """The file's own name for messages; "config.json" where the config came without one."""
    if isinstance(source, Mapping) or Path(source).is_dir():
        return "config.json"
    return Path(source).name


def unreadable(path: Path, error: OSError) -> ConfigError:
    """What to raise for a file or folder that the system keeps from us."""
    reason = error.strerror or error
    return ConfigError(f"{path} cannot be read: {reason}; give a path that you may read")


def _file_of(path: Path) -> Path:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} has no config.json; give a folder in Hugging Face format")
        return path / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give a model folder or the path of a config.json")
    return path


def load_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`; ConfigError if it cannot be read as one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, nested or numbers too long
        raise ConfigError(
            f"{path} cannot be read as JSON: {error}; correct it, or download it again"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}; an object is needed")
    return value


def embedded_model() -> Path:
    """The folder of denim-tiny, the model that comes with the package."""
    return Path(__file__).parents[1] / "weights" / "denim-tiny"
