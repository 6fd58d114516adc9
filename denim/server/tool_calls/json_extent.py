"""Where a JSON value ends in a text that comes in pieces.

Looks at brackets and quotes only; what stands between them is not checked.
"""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[\s,}\]]")


class JsonExtent:
    """Of one value. `done`: its end was met."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._scalar = False  # a number or a word, which ends before what cannot belong to it

    def scan(self, text: str) -> int:
        """How many characters of `text`, which follows what was scanned before, belong to the value."""
        at = 0
        if text and not (self._depth or self._in_string or self._scalar):
            self._scalar = text[0] not in '{["'
        if self._scalar:
            end = _SCALAR_END.search(text)
            self.done = end is not None
            return end.start() if end else len(text)
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                return len(text)
            at = found.end()
            match found.group():
                case "\\":
                    self._escaped = True
                case '"':
                    self._in_string = not self._in_string
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
            if not self._depth and not self._in_string and not self._escaped:
                self.done = True
                return at
        return len(text)
