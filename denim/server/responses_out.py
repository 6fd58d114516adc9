"""Output items of the Responses API, as they grow, and the events that say so.

Owns the items of one reply: each opens when its first part comes and closes when another kind does. Knows
parts of replies; nothing of requests.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from denim.server.logprobs import ChatLogprobs, Report
from denim.server.reply_parts import AnswerText, ReasoningText, ReplyPart, ToolCallArguments, ToolCallStart

Item = dict[str, Any]
Event = dict[str, Any]

# Of an item with text: its type, the prefix of its id, the type of its part, and the name of its events.
TEXT_ITEMS = {
    AnswerText: ("message", "msg", "output_text", "output_text"),
    ReasoningText: ("reasoning", "rs", "reasoning_text", "reasoning_text"),
}


class OutputItems:
    """`items` so far. `logprobs`: of reports in the API's form; None: there are none."""

    def __init__(self, logprobs: Callable[[Sequence[Report]], ChatLogprobs] | None) -> None:
        self.items: list[Item] = []
        self._logprobs = logprobs
        self._open: type[ReplyPart] | None = None
        self._reports: list[Report] = []  # of tokens whose text has not come

    def take(self, parts: Sequence[ReplyPart], reports: Sequence[Report]) -> list[Event]:
        """Add parts; the events that tell of it. `reports` are those of the tokens behind them."""
        events: list[Event] = []
        self._reports += reports if self._logprobs is not None else ()
        for part in parts:
            if isinstance(part, AnswerText | ReasoningText):
                if self._open is not type(part):
                    events += [*self._close_item(), *self._open_text(type(part))]
                events.append(self._add_text(type(part), part.text))
            elif isinstance(part, ToolCallStart):
                events += [*self._close_item(), *self._open_call(part)]
            else:
                assert isinstance(part, ToolCallArguments)
                self.items[-1]["arguments"] += part.json_piece
                events.append(self._event("function_call_arguments.delta", delta=part.json_piece))
        return events

    def close(self, status: str = "completed") -> list[Event]:
        """The reply is over, and with it the last item."""
        if self._open is AnswerText:
            # Behind the last text come tokens without one, the end token above all. Whether they came with
            # that text or behind it is a matter of how fast the reader was.
            self.items[-1]["content"][0]["logprobs"] += self._shown()
        return self._close_item(status)

    def _close_item(self, status: str = "completed") -> list[Event]:
        if self._open is None:
            return []
        kind, self._open, item = self._open, None, self.items[-1]
        item["status"] = status
        events = []
        if kind is ToolCallStart:
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._event("function_call_arguments.done", **done))
        else:
            name = TEXT_ITEMS[kind][3]
            part = item["content"][0]
            extra = {"logprobs": part["logprobs"]} if kind is AnswerText else {}
            events.append(self._event(f"{name}.done", content_index=0, text=part["text"], **extra))
            events.append(self._event("content_part.done", content_index=0, part=part))
        return [*events, self._item_event("output_item.done")]

    def _open_text(self, kind: type[AnswerText] | type[ReasoningText]) -> list[Event]:
        item_type, prefix, part_type, _ = TEXT_ITEMS[kind]
        item: Item = {"id": _new_id(prefix), "type": item_type, "status": "in_progress", "content": []}
        part: Item = {"type": part_type, "text": ""}
        if kind is AnswerText:
            item["role"] = "assistant"
            part |= {"annotations": [], "logprobs": []}
        else:
            item["summary"] = []
        self.items.append(item)
        self._open = kind
        added = self._item_event("output_item.added")
        item["content"].append(part)
        empty = deepcopy(part)  # the part grows before the event is written
        return [added, self._event("content_part.added", content_index=0, part=empty)]

    def _add_text(self, kind: type[AnswerText] | type[ReasoningText], text: str) -> Event:
        part = self.items[-1]["content"][0]
        part["text"] += text
        fields: dict[str, Any] = {"content_index": 0, "delta": text}
        if kind is AnswerText:
            shown = self._shown()
            fields["logprobs"] = shown
            part["logprobs"] += shown
        else:
            self._reports.clear()
        return self._event(f"{TEXT_ITEMS[kind][3]}.delta", **fields)

    def _shown(self) -> list[Any]:
        """The reports of tokens that are not told yet, which they are now."""
        reports, self._reports = self._reports, []
        return self._logprobs(reports).model_dump()["content"] if self._logprobs is not None else []

    def _open_call(self, start: ToolCallStart) -> list[Event]:
        self.items.append(
            {
                "id": _new_id("fc"),
                "type": "function_call",
                "status": "in_progress",
                "call_id": start.id,
                "name": start.name,
                "arguments": "",
            }
        )
        self._open = ToolCallStart
        return [self._item_event("output_item.added")]

    def _event(self, kind: str, /, **fields: Any) -> Event:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{kind}"} | place | fields

    def _item_event(self, name: str) -> Event:
        item = self.items[-1]
        copy = item | {"content": list(item["content"])} if "content" in item else dict(item)
        return {"type": f"response.{name}", "output_index": len(self.items) - 1, "item": copy}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
