"""How much work the server takes on at once.

Owns the count of completions in work and the refusal beyond it. Knows nothing of what the work is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from denim.server.errors import ApiError
from denim.server.options import ServerOptions

SHORTEST_WAIT, LONGEST_WAIT = 1, 60  # seconds that Retry-After may say
SMOOTHING = 0.1  # weight of the newest gap between two ends in their mean


class Gate:
    """Counts completions in work, on one event loop. `waiting` are those of them without a token yet."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self.open = 0
        self.waiting = 0
        self.draining = False
        self._gap = float(SHORTEST_WAIT)  # mean seconds between two ends
        self._last_end: float | None = None

    def check(self, wanted: int) -> None:
        """Raises ApiError: 429 when there is no room for so many completions now, 400 when there never is,
        503 when the server is about to stop."""
        if self.draining:
            raise ApiError(503, "the server is stopping; ask another one", headers={"retry-after": "5"})
        options = self._options
        for now, what, limit, name in (
            (self.open, "are in work", options.max_streams, "max_streams"),
            (self.waiting, "wait for their first token", options.max_queue, "max_queue"),
        ):
            if wanted > limit:
                raise ApiError(
                    400,
                    f"the request asks for {wanted} completions, and the server's {name}={limit} allows no"
                    f" more; ask for fewer at once, or raise {name}",
                    param=name,
                )
            if now + wanted > limit:
                wait = self._retry_after(now + wanted - limit)
                raise ApiError(
                    429,
                    f"the server is full: {now} completions {what}, and its {name}={limit} has no room for"
                    f" {wanted} more; try again in {wait} s, or raise {name}",
                    param=name,
                    code="rate_limit_exceeded",
                    headers={"retry-after": str(wait)},
                )

    @contextmanager
    def enter(self, wanted: int) -> Iterator[list[Place]]:
        """Places for so many completions. Raises what `check` raises."""
        self.check(wanted)
        places = [Place(self) for _ in range(wanted)]
        try:
            yield places
        finally:
            for place in places:
                place.leave()

    def _retry_after(self, excess: int) -> int:
        return max(SHORTEST_WAIT, min(LONGEST_WAIT, math.ceil(excess * self._gap)))

    def note_end(self) -> None:
        now = time.monotonic()
        if self._last_end is not None:
            self._gap += SMOOTHING * (now - self._last_end - self._gap)
        self._last_end = now


class Place:
    """One completion in work: it waits until its first token."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._waits = True
        gate.open += 1
        gate.waiting += 1

    def note_token(self) -> None:
        if self._waits:
            self._waits = False
            self._gate.waiting -= 1

    def leave(self) -> None:
        self.note_token()
        self._gate.open -= 1
        self._gate.note_end()
