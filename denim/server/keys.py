"""Who may use the API.

Owns the check of API keys: as a bearer token (OpenAI's clients) or in x-api-key (Anthropic's).
"""

from __future__ import annotations

import secrets
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer

from denim.server.errors import ApiError
from denim.server.serving import serving_of

_bearer = HTTPBearer(auto_error=False, description="OpenAI's way; needed where the server was given keys.")
_header = APIKeyHeader(name="x-api-key", auto_error=False, description="Anthropic's way.")


async def check_key(
    request: Request,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    header: Annotated[str | None, Depends(_header)],
) -> None:
    """Raises ApiError (401)."""
    keys = serving_of(request).options.api_keys
    if not keys:
        return
    given = bearer.credentials if bearer else header
    if given is None:
        raise ApiError(
            401,
            "no API key; send the header Authorization: Bearer KEY (or x-api-key: KEY)",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
    # Every key is compared, in time that does not depend on where they differ.
    sent = given.encode("latin-1")  # headers are bytes, which were read as this
    if not sum(secrets.compare_digest(sent, key.encode()) for key in keys):
        raise ApiError(401, "wrong API key", code="invalid_api_key", headers={"www-authenticate": "Bearer"})
