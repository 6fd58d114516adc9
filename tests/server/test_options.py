"""Options of the server: bad ones are refused at the start, by name."""

from __future__ import annotations

from typing import Any

import pytest

from denim import ConfigError
from denim.server.options import ServerOptions


@pytest.mark.parametrize(
    "given",
    [
        {"port": -1},
        {"port": 65536},
        {"port": "80"},
        {"api_keys": ("",)},
        {"api_keys": ""},
        {"served_model_name": (3,)},
        {"cors_origins": ("",)},
        {"cors_origins": "chat.example.com"},
        {"cors_origins": ("*", "https://chat.example.com/")},
        {"max_body": "many"},
        {"max_body": 0},
        {"host": ""},  # every interface, to a socket
        {"host": None},
        {"max_prompt_tokens": 0},
        {"max_streams": 0},
        {"max_queue": True},
        {"max_queue": None},
        {"port": None},
        {"body_timeout": 0},
        {"request_timeout": float("nan")},
        {"first_token_timeout": "soon"},
        {"write_timeout": -1.0},
        {"drain_timeout": float("inf")},
        {"log_format": "xml"},
    ],
    ids=str,
)
def test_bad_options(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        ServerOptions(**given)


def test_one_string_is_a_list_of_one() -> None:
    options = ServerOptions(api_keys="key", served_model_name="name", max_body="1MiB")  # type: ignore[arg-type]
    assert (options.api_keys, options.served_model_name, options.max_body) == (("key",), ("name",), 2**20)


def test_no_limit_on_time() -> None:
    names = ("body", "first_token", "request", "write", "drain")
    options = ServerOptions(**{f"{name}_timeout": None for name in names})  # type: ignore[arg-type]
    assert options.body_timeout is None
