"""Messages on a stream of bytes: how the server and its engine process talk.

Owns the framing. A frame is a length and a pickled list of messages: parameters, deltas and errors need no
schema then. Pickle is safe here because both ends are Denim's own: a pair of sockets without a name, between
a process and its child, which nobody else can open.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable
from typing import Any

_LENGTH = struct.Struct("<Q")


def packed(messages: Iterable[Any]) -> bytes:
    """One frame."""
    content = pickle.dumps(list(messages), protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(content)) + content


class FrameReader:
    """Takes bytes in pieces of any size, and gives whole messages."""

    def __init__(self) -> None:
        self._waiting = bytearray()

    def feed(self, piece: bytes) -> list[Any]:
        """The messages of all frames that `piece` completes, in order."""
        self._waiting += piece
        messages: list[Any] = []
        at = 0
        while len(self._waiting) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._waiting, at)
            end = at + _LENGTH.size + length
            if len(self._waiting) < end:
                break
            with memoryview(self._waiting) as view:
                messages += pickle.loads(view[at + _LENGTH.size : end])
            at = end
        del self._waiting[:at]
        return messages
