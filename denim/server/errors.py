"""Errors as clients get them: a status, and a body in the shape that their API documents.

Owns the way from every exception to one of those bodies; OpenAI's shape everywhere, Anthropic's under its own
path. What went wrong inside is logged, not sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from denim.engine.prompts import PromptTooLongError
from denim.engine.unavailable import EngineUnavailableError
from denim.errors import CapacityError, DenimError, RequestError
from denim.server.record import record_of

log = logging.getLogger("denim.server")

ANTHROPIC_PATH = "/v1/messages"
LONGEST_MESSAGE = 600  # characters; what a client sent may be part of the message
CLIENT_GONE = 499  # nginx's status for a client that left; nobody gets it, logs and metrics show it

# The type of an error by its status, in OpenAI's words and in Anthropic's.
OPENAI_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(HTTPException):
    """An answer that is an error. `param` names the field of the request at fault, or the server's limit that
    was reached, `code` the kind of fault in the API's words."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > LONGEST_MESSAGE:
            message = message[:LONGEST_MESSAGE] + "…"
        self.message = _utf8(message)
        super().__init__(status, self.message, dict(headers) if headers else None)
        self.param = None if param is None else _utf8(param)
        self.code = code


class ClientGoneError(ApiError):
    """The client left before its answer was there."""

    def __init__(self) -> None:
        super().__init__(CLIENT_GONE, "the client left")


def api_error(error: BaseException) -> ApiError:
    """What a client is told about `error`. That a request's task is cancelled means that the server stops and
    waits no longer."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, asyncio.CancelledError):
        what = "the server stopped before the answer was there; ask another one"
        return ApiError(503, what, headers={"retry-after": "5"})
    if isinstance(error, PromptTooLongError):
        return ApiError(400, str(error), param=error.param, code="context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param, code=error.param and "invalid_value")
    if isinstance(error, CapacityError):
        return ApiError(400, str(error))
    if isinstance(error, EngineUnavailableError):
        return ApiError(503, str(error), headers={"retry-after": "5"})
    if isinstance(error, DenimError):
        return ApiError(500, str(error))
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        return _refused(error)
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed on this request; its log says why")


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """The JSON body of an error on `path`."""
    status = error.status_code
    if path.startswith(ANTHROPIC_PATH):
        other = "invalid_request_error" if status < 500 else "api_error"
        kind = ANTHROPIC_TYPES.get(status, other)
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    kind = OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {
        "error": {"message": error.message, "type": kind, "param": error.param, "code": error.code},
    }


def install_error_handlers(app: FastAPI) -> None:
    """Of the errors that are expected; the access layer answers all others."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        told = api_error(error)
        record_of(request).error = told.message
        return JSONResponse(error_body(told, request.url.path), told.status_code, headers=told.headers)

    for kind in (HTTPException, RequestValidationError, DenimError):
        app.add_exception_handler(kind, answer)


def _refused(error: HTTPException) -> ApiError:
    """What the web framework itself refuses."""
    message = error.detail or HTTPStatus(error.status_code).phrase
    if error.status_code == 404:
        message = "there is nothing at this path; /docs lists what there is"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "GET, HEAD")  # which files do not say of themselves
        message = f"this path does not take this method; it takes {allowed}"
    return ApiError(error.status_code, message, headers=error.headers)


def _invalid(invalid: RequestValidationError) -> ApiError:
    """The complaint about the deepest field. Where a field may have several forms, pydantic complains about
    each of them, and the deepest one is about the form that was meant."""
    complaints = [(_field(error, invalid.body), error) for error in invalid.errors()]
    path, first = max(complaints, key=lambda complaint: len(complaint[0]))
    param = ".".join(map(str, path)) or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"Unknown parameter: {param!r}.", param=param, code="unknown_parameter")
    if first["type"] == "missing":
        what = "the request's body" if param is None else f"the parameter {param!r}"
        return ApiError(400, f"Missing: {what}.", param=param, code="missing_required_parameter")
    reasons = dict.fromkeys(error["msg"] for place, error in complaints if place == path)
    where = "" if param is None else f"{param!r}: "
    message = f"{where}{', or: '.join(reasons)}; got {_shown(first.get('input'))}."
    return ApiError(400, message, param=param, code="invalid_value")


def _field(error: Mapping[str, Any], body: Any) -> list[str | int]:
    """The path of the field that an error is about. pydantic's own has the names of the forms of a field
    between those of the fields; so only what leads further into the body counts."""
    path: list[str | int] = []
    inner = body
    for part in error["loc"]:
        in_list = isinstance(inner, list) and isinstance(part, int) and part < len(inner)
        if in_list or (isinstance(inner, dict) and part in inner):
            inner = inner[part]
            path.append(part)
    if error["type"] == "missing" and error["loc"][-1] != "body":
        path.append(error["loc"][-1])
    return path


def _utf8(text: str) -> str:
    """What a client sent may hold halves of surrogate pairs, which cannot be sent back."""
    return text.encode(errors="backslashreplace").decode()


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python refuses to print integers of thousands of digits
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}…"
