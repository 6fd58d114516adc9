"""What can be set about the server itself.

Owns names, defaults and validation; the engine's own options are `denim.engine.options`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite
from typing import Any

from denim.errors import ConfigError
from denim.ledger.units import parse_bytes

LOG_FORMATS = ("text", "json")
LARGEST_PORT = 65535
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
"""As browsers send it: one that is written otherwise would never be met."""


@dataclass(frozen=True)
class ServerOptions:
    """Times are in seconds; None means no limit.

    host, port: where the server listens; port 0: any free one.
    served_model_name: the names by which clients may call the model; (): its folder's name.
    api_keys: one of them must come with every request to the API; (): no key is asked for. Health and
        metrics are open.
    cors_origins: web pages of these origins may call the server; (): none, "*": all.
    max_body: bytes of a request's body, as a number or "32MiB".
    max_prompt_tokens: tokens of a prompt; None: what the engine's max_model_len leaves.
    max_streams: completions in work at once, running and waiting. max_queue: those of them that have no
        token yet. Beyond either a request gets 429 with Retry-After.
    body_timeout: for a body to arrive. first_token_timeout: until a request's first token.
    request_timeout: until its last. write_timeout: for a client to take what was sent to it.
    drain_timeout: for running requests after SIGTERM; then they end with an error.
    log_format: of the lines on stderr, "text" or "json". log_requests: a line for every request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body: int | str = "32MiB"
    max_prompt_tokens: int | None = None
    max_streams: int = 2048
    max_queue: int = 1024
    body_timeout: float | None = 30.0
    first_token_timeout: float | None = None
    request_timeout: float | None = None
    write_timeout: float | None = 60.0
    drain_timeout: float | None = 30.0
    log_format: str = "text"
    log_requests: bool = True

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        for name in ("served_model_name", "api_keys", "cors_origins"):
            given: Any = getattr(self, name)
            if isinstance(given, str):
                object.__setattr__(self, name, (given,))
            elif not all(isinstance(value, str) and value for value in given):
                raise ConfigError(f"{name}={given!r} must hold strings that are not empty")
            else:
                object.__setattr__(self, name, tuple(given))
        if "" in self.served_model_name + self.api_keys + self.cors_origins:
            raise ConfigError("served_model_name, api_keys and cors_origins must not be empty strings")
        for origin in self.cors_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origins has {origin!r}; an origin is a scheme and a host, such as"
                    " https://chat.example.com, without a path; '*': all"
                )
        if not isinstance(self.host, str) or not self.host:  # an empty one would be every interface
            raise ConfigError(f"host={self.host!r} must be a name or an address; 0.0.0.0: all interfaces")
        object.__setattr__(self, "max_body", parse_bytes("max_body", self.max_body))
        for name, least in (
            ("port", 0),
            ("max_body", 1),
            ("max_streams", 1),
            ("max_queue", 1),
            ("max_prompt_tokens", 1),
        ):
            value = getattr(self, name)
            if value is None and name == "max_prompt_tokens":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}")
        if self.port > LARGEST_PORT:
            raise ConfigError(f"port={self.port} must be at most {LARGEST_PORT}")
        for name in ("body", "first_token", "request", "write", "drain"):
            value = getattr(self, f"{name}_timeout")
            if value is None:
                continue
            if not isinstance(value, int | float) or not isfinite(value) or value <= 0:
                raise ConfigError(f"{name}_timeout={value!r} must be a number of seconds above 0, or None")
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(f"log_format={self.log_format!r}; supported: {', '.join(LOG_FORMATS)}")
