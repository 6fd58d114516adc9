"""Events in every form that the standard allows, whatever the pieces of the network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from denim.commands.bench.event_lines import event_data

TEXT = ': hello\n\ndata: {"a": "é\u2028b"}\n\nevent: x\ndata:one\ndata: two\n\nid: 3\n\ndata: [DONE]\n\n'
STREAM = TEXT.encode()


def read(stream: bytes, piece: int) -> list[str]:
    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(stream), piece):
            yield stream[at : at + piece]

    async def collect() -> list[str]:
        return [data async for data in event_data(pieces())]

    return asyncio.run(collect())


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_the_same_events_however_they_arrive(piece: int, line_end: bytes) -> None:
    stream = STREAM.replace(b"\n", line_end)
    assert read(stream, piece) == ['{"a": "é\u2028b"}', "one\ntwo", "[DONE]"]


@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n"])
def test_a_last_event_without_its_empty_line(end: bytes) -> None:
    assert read(b"data: 1\n\ndata: 2" + end, 4) == ["1", "2"]


def test_nothing() -> None:
    assert read(b"", 1) == [] and read(b"\n\n: x\n\n", 1) == []
