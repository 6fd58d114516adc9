"""Validated access to one section of a config file.

Owns the wording of errors about single keys: every one names the key, where it stands, the value seen and
what is supported. Knows nothing of any model family. A key whose value is null counts as missing, as it
does for transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from denim.errors import ConfigError

MOST_LAYERS = 10_000  # some fifty times the deepest published model; a typing error, not a model, has more

# Keys of transformers' base config, of its training and of common tools that do not touch the arithmetic.
HARMLESS = frozenset(
    {
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "gradient_checkpointing",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "model_name",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)


class Fields:
    """The keys of one section, read once each; `finish` complains about those that nobody read.

    where: where the section stands, in words. raw: the section as it is, for readers to whom null means
    something.
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.where = where
        self.raw = raw
        self._values = {key: value for key, value in raw.items() if value is not None}
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def error(self, key: str, supported: str) -> ConfigError:
        """What is wrong with `key`, as an exception to raise."""
        seen = f"is {self._values[key]!r}" if key in self._values else "is missing"
        return ConfigError(f"{self.where}: {key!r} {seen}; supported: {supported}")

    def get(self, key: str) -> Any:
        """The value as it is, None if missing."""
        self._read.add(key)
        return self._values.get(key)

    def positive_int(self, key: str, default: int | None = None) -> int:
        """Raises ConfigError unless the value, or else `default`, is an integer of at least 1."""
        return self.integer(key, default, least=1)

    def layer_count(self) -> int:
        """`num_hidden_layers`. Raises ConfigError unless it is an integer from 1 to MOST_LAYERS."""
        count = self.positive_int("num_hidden_layers")
        if count > MOST_LAYERS:
            raise self.error("num_hidden_layers", f"at most {MOST_LAYERS:,}")
        return count

    def integer(self, key: str, default: int | None = None, *, least: int = 0) -> int:
        value = self.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(key, f"an integer of at least {least}")
        return value

    def number(self, key: str, default: float | None = None, *, most: float | None = None) -> float:
        """Raises ConfigError unless the value, or else `default`, is positive, finite and at most `most`."""
        value = self.get(key)
        if value is None:
            value = default
        if not is_number(value) or not 0 < value < inf or (most is not None and value > most):
            raise self.error(key, "a positive number" + ("" if most is None else f" of at most {most}"))
        return float(value)

    def optional_number(self, key: str, *, most: float | None = None) -> float | None:
        return self.number(key, most=most) if key in self else None

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def choice(self, key: str, supported: Sequence[str], default: str | None = None) -> str:
        value = self.get(key)
        if value is None:
            value = default
        if value not in supported:
            raise self.error(key, ", ".join(supported))
        return str(value)

    def section(self, key: str, default: Mapping[str, Any] | None = None) -> Fields:
        """The object under `key`, as a section of its own."""
        value = self.get(key)
        if value is None:
            value = default
        if not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return Fields(value, f"{self.where} > {key}")

    def demand(self, key: str, supported: Sequence[Any]) -> None:
        """Accept a key that Denim knows in some values only; missing is one of them."""
        if self.get(key) is not None and self._values[key] not in supported:
            raise self.error(key, " or ".join(repr(value) for value in supported) + ", or no such key")

    def ignore(self, *keys: str) -> None:
        """Accept keys that do not matter here, whatever their value."""
        self._read.update(keys)

    def finish(self) -> None:
        """Raises ConfigError for the first key that is neither read nor known to be harmless."""
        for key in self._values:
            if key not in self._read and key not in HARMLESS and not key.startswith("_"):
                raise ConfigError(
                    f"{self.where}: unknown key {key!r} with value {self._values[key]!r}; Denim cannot tell "
                    "whether it changes the model. If it does not, delete it; supported keys here: "
                    + ", ".join(sorted(self._read))
                )


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
