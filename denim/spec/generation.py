"""What a model's authors recommend for sampling, and the tokens that end an answer.

Owns `generation_config.json` and the end tokens of `config.json`. Knows nothing of requests: the engine
fills what a request leaves open from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from denim.spec.config_file import Source, config_name, load_config, load_json
from denim.spec.fields import Fields, is_number


@dataclass(frozen=True)
class GenerationDefaults:
    """None: the authors say nothing. `end_token_ids` has no repeats; any of them ends an answer."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    end_token_ids: tuple[int, ...] = ()


def read_generation_defaults(source: Source) -> GenerationDefaults:
    """Defaults of the model `source`, a config as dict, a model folder, or the path of a config.json.

    A folder's generation_config.json is read if it is there. `do_sample: false` means temperature 0. End
    tokens are those of generation_config.json, then those that only config.json names (text_config before
    the root). Raises ConfigError naming the key of a value that cannot be used.
    """
    config = load_config(source)
    nested = config.get("text_config")
    name = config_name(source)
    sections = [Fields(config, name)]
    if isinstance(nested, dict):
        sections.insert(0, Fields(nested, f"{name} > text_config"))
    generation = Fields(_generation_config(source), "generation_config.json")

    end_token_ids: list[int] = []
    for section in [generation, *sections]:
        end_token_ids += [token for token in _token_ids(section) if token not in end_token_ids]
    return GenerationDefaults(
        temperature=_temperature(generation),
        top_p=generation.optional_number("top_p", most=1.0),
        top_k=generation.integer("top_k", least=-1) if "top_k" in generation else None,
        min_p=_bounded(generation, "min_p", 1.0),
        repetition_penalty=generation.optional_number("repetition_penalty"),
        end_token_ids=tuple(end_token_ids),
    )


def _generation_config(source: Source) -> dict[str, Any]:
    if not isinstance(source, str | PathLike):
        return {}
    path = Path(source)
    path = (path if path.is_dir() else path.parent) / "generation_config.json"
    return load_json(path) if path.is_file() else {}


def _temperature(generation: Fields) -> float | None:
    sampled = generation.flag("do_sample", default=True)
    stated = _bounded(generation, "temperature", float("inf"))
    return stated if sampled else 0.0


def _bounded(generation: Fields, key: str, most: float) -> float | None:
    value = generation.get(key)
    if value is None:
        return None
    if not is_number(value) or not 0 <= value <= most:
        raise generation.error(key, f"a number from 0 to {most}")
    return float(value)


def _token_ids(section: Fields) -> list[int]:
    value = section.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise section.error("eos_token_id", "a token id, or a list of them")
    return ids
