"""Requests in their one order: by priority, then by arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from denim.scheduler.request import Request

_KEY = attrgetter("key")


class RequestQueue:
    """A sorted list. Places are found by bisection; a request keeps its place wherever it was meanwhile."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def insert(self, request: Request) -> None:
        insort(self._requests, request, key=_KEY)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, request.key, key=_KEY)
        assert self._requests[index] is request, f"request {request.id} is not in this queue"
        del self._requests[index]
