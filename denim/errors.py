"""The errors that Denim raises on bad input or when something does not fit.

Every one is a `DenimError`, and also the built-in error that Python users expect, so that
`except ValueError` keeps working. A message names what was seen and says what to change.
"""

from __future__ import annotations


class DenimError(Exception):
    """Base of every error that Denim raises on purpose."""


class ConfigError(DenimError, ValueError):
    """A model folder or an engine option cannot be used: unknown family, missing tensor, bad value."""


class RequestError(DenimError, ValueError):
    """One request cannot be served as asked; others are not touched.

    `param` is the parameter at fault, where it is one.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class CapacityError(DenimError, RuntimeError):
    """Something does not fit into the memory that the engine was given."""


class CheckpointError(DenimError, RuntimeError):
    """A state was about to be read for another number of tokens than it stands for."""
