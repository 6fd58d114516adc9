"""Work done for a client, as long as the client is there and the time-outs allow it.

Owns the watch over one request: the work is cancelled, and with it what runs in the engine, when the client
leaves or time is up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from denim.server.errors import ApiError, ClientGoneError, api_error
from denim.server.options import ServerOptions
from denim.server.record import RequestRecord

T = TypeVar("T")
WRITE_TICK = 5.0
"""Seconds between two looks at whether a client takes what is sent to it."""


async def attended(
    work: Coroutine[Any, Any, T], receive: Receive, record: RequestRecord, options: ServerOptions
) -> T:
    """The result of `work`. Raises ClientGoneError when the client leaves first, ApiError when a time-out
    passes (504) or the server stops (503)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_left(receive))
    try:
        while True:
            deadline = record.deadline(options)
            wait = None if deadline is None else max(0.0, deadline[0] - time.monotonic())
            if options.write_timeout is not None and record.streamed:
                wait = WRITE_TICK if wait is None else min(wait, WRITE_TICK)
            await asyncio.wait((task, gone), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if gone.done():
                raise ClientGoneError
            late = record.deadline(options)
            if late is not None and late[0] <= time.monotonic():
                what = f"the answer is not there within the server's {late[1]}; ask for less, or raise it"
                raise ApiError(504, what, param=late[1])
    except asyncio.CancelledError as stopped:
        raise api_error(stopped) from None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
