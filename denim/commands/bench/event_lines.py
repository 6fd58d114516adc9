"""Server-sent events as they come over the wire, from any server.

Owns the form: lines that end in LF or CRLF, comments, "data:" with or without a space, events of several
lines, pieces of the network that end anywhere.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator


async def event_data(pieces: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """The data of each event. A last event without an empty line behind it counts too."""
    waiting = bytearray()
    lines: list[str] = []
    async for piece in pieces:
        waiting += piece
        while (end := waiting.find(b"\n")) >= 0:
            line = bytes(waiting[:end]).removesuffix(b"\r").decode("utf-8")
            del waiting[: end + 1]
            if line.startswith("data:"):
                lines.append(line.removeprefix("data:").removeprefix(" "))
            elif not line and lines:
                yield "\n".join(lines)
                lines = []
    rest = waiting.decode("utf-8").strip()
    if rest.startswith("data:"):
        lines.append(rest.removeprefix("data:").strip())
    if lines:
        yield "\n".join(lines)
