"""Why an engine answers nobody just now."""

from __future__ import annotations

from denim.errors import DenimError


class EngineUnavailableError(DenimError, RuntimeError):
    """The engine cannot serve; the request itself may be fine."""

    def again(self) -> EngineUnavailableError:
        """The same error for one more client: each raises its own."""
        return type(self)(*self.args)


class EngineClosedError(EngineUnavailableError):
    """The engine was closed, or takes no new requests because it will be."""


class EngineDiedError(EngineUnavailableError):
    """The engine's thread or process ended while the request waited, or is not back yet."""


class EngineAsleepError(EngineUnavailableError):
    """The engine sleeps, and has no model in memory."""

    def __init__(self, message: str = "the engine sleeps; wake it first") -> None:
        super().__init__(message)
