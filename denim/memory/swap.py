"""Host memory for preempted requests, under a byte limit.

Owns what a request left behind on the host: one payload per request and the bytes set aside for it. Does
not know what a payload is (the runner's saved slot and pages) nor when a request should move.

Two sides use it. The scheduler sets bytes aside when it plans a swap (`reserve`) and gives them up when
a swapped request ends (`drop`); the runner brings the payload (`put`) and takes it back (`take`).
"""

from __future__ import annotations

from typing import Any

from denim.errors import CapacityError


class SwapSpace:
    """At most `limit_bytes` of payloads, each under its request's id."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._reserved: dict[int, int] = {}
        self._payloads: dict[int, Any] = {}

    def reserve(self, request_id: int, nbytes: int) -> bool:
        """Set `nbytes` aside for a request that has none yet; False when that exceeds the limit."""
        if request_id in self._reserved:
            raise CapacityError(f"request {request_id} already has swap space")
        if self.used_bytes + nbytes > self.limit_bytes:
            return False
        self._reserved[request_id] = nbytes
        self.used_bytes += nbytes
        return True

    def put(self, request_id: int, payload: Any) -> None:
        """Store a payload in the space that was reserved for it. Raises CapacityError when none was."""
        if request_id not in self._reserved:
            raise CapacityError(f"request {request_id} has no swap space reserved")
        self._payloads[request_id] = payload

    def take(self, request_id: int) -> Any:
        """Give the payload back and free its space. Raises KeyError when there is none."""
        payload = self._payloads.pop(request_id)
        self.drop(request_id)
        return payload

    def drop(self, request_id: int) -> None:
        """Free the request's space, if it has any."""
        self._payloads.pop(request_id, None)
        self.used_bytes -= self._reserved.pop(request_id, 0)

    def holds(self, request_id: int) -> bool:
        """Whether space is set aside for this request."""
        return request_id in self._reserved

    def check(self) -> None:
        """Raises AssertionError when the books do not add up."""
        assert self.used_bytes == sum(self._reserved.values()) <= self.limit_bytes
        assert self._payloads.keys() <= self._reserved.keys(), "a payload without a reservation"
