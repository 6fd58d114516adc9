"""Lines of system messages that change with every request, left out of chats.

Owns the rule. Some clients put a checksum or a clock into the first lines of the system text, and then no two
prompts agree behind it: nothing of them can be reused, by any cache. Who runs the engine may name such lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from denim.cache.boundaries import SYSTEM_ROLES
from denim.errors import ConfigError

Messages = Sequence[Mapping[str, Any]]


class ChangingLines:
    """`patterns`: regular expressions; a line in which one is found is left out. Raises ConfigError for what
    is none."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._found = []
        for pattern in patterns:
            try:
                self._found.append(re.compile(pattern))
            except (re.error, TypeError) as error:
                raise ConfigError(
                    f"strip_lines has {pattern!r}, which is no regular expression: {error}; correct it"
                ) from None

    def without(self, messages: Messages) -> Messages:
        """`messages` as they go into the prompt; marks inside a message (`cache_control` as a list of places)
        move with its text."""
        if not self._found:
            return messages
        return [self._stripped(m) if m.get("role") in SYSTEM_ROLES else m for m in messages]

    def _stripped(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        if isinstance(content, list):  # parts, as some templates take them
            parts = [{**p, "text": self._kept(p["text"])[0]} if "text" in p else p for p in content]
            return {**message, "content": parts}
        if not isinstance(content, str):
            return message
        text, removed = self._kept(content)
        marks = message.get("cache_control")
        if isinstance(marks, list):
            marks = [mark - sum(max(0, min(mark, end) - begin) for begin, end in removed) for mark in marks]
            return {**message, "content": text, "cache_control": marks}
        return {**message, "content": text}

    def _kept(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """What is left of a text, and from where to where the rest was."""
        lines = text.splitlines(keepends=True)
        ends = list(accumulate(map(len, lines)))
        changing = [any(found.search(line) for found in self._found) for line in lines]
        removed = [(e - len(line), e) for line, e, gone in zip(lines, ends, changing, strict=True) if gone]
        kept = "".join(line for line, gone in zip(lines, changing, strict=True) if not gone)
        return kept, removed
