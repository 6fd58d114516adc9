"""From an exception to what a client is told."""

from __future__ import annotations

from denim.engine.prompts import PromptTooLongError
from denim.engine.unavailable import EngineDiedError
from denim.errors import CapacityError, ConfigError, RequestError
from denim.server.errors import LONGEST_MESSAGE, ApiError, api_error


def test_a_status_and_a_code_for_every_kind() -> None:
    told = [
        api_error(error)
        for error in (
            RequestError("no", "top_p"),
            RequestError("no"),
            PromptTooLongError("long"),
            CapacityError("small"),
            EngineDiedError("gone"),
            ConfigError("wrong"),
            KeyError("a secret"),
        )
    ]
    assert [(error.status_code, error.param, error.code) for error in told] == [
        (400, "top_p", "invalid_value"),
        (400, None, None),
        (400, None, "context_length_exceeded"),
        (400, None, None),
        (503, None, None),
        (500, None, None),
        (500, None, None),
    ]
    assert "secret" not in told[-1].message


def test_long_messages_are_cut() -> None:
    assert len(ApiError(400, "x" * LONGEST_MESSAGE).message) == LONGEST_MESSAGE
    assert ApiError(400, "x" * 10_000).message == "x" * LONGEST_MESSAGE + "…"
