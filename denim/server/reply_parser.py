"""From the text of a reply, as it comes, to its parts.

Owns the order: reasoning, then answer and tool calls, in any number and turn. The result does not depend on
how the text was cut into pieces. The rules:

* Reasoning ends with </think>. White space around it, and between it and the answer, belongs to neither.
* Where tools were offered, what reads as calls becomes calls, and white space around them vanishes. What
  does not read as one stays text, markers and all: nothing that a model wrote is lost. A call that the end of
  the reply breaks off has its beginning.
* A call inside reasoning counts if it names a tool that was offered. What follows it is reasoning again, up
  to </think>.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from denim.server import reasoning
from denim.server.incoming import SPACE, BrokenOff, Incoming, Unreadable
from denim.server.reply_parts import AnswerText, ReasoningText, ReplyPart, joined
from denim.server.tool_calls.calls import Calls, Tool
from denim.server.tool_calls.formats import ToolFormat, format_of

_Text = type[AnswerText] | type[ReasoningText]


class ReplyParser:
    """Feed it the pieces of one reply, then `finish`."""

    def __init__(
        self,
        form: ToolFormat | None,
        tools: Sequence[Tool] = (),
        *,
        inside: bool = False,
        reasons: bool = False,
    ) -> None:
        """`form`: of calls; None: there are none. `inside`: the reply begins inside reasoning. `reasons`: it
        may open reasoning itself."""
        self._form = form
        self._calls = Calls(tools)
        self._source = Incoming()
        self._inside = inside
        self._reasons = reasons
        self._space = ""  # white space that may turn out to stand before a call or at the end of reasoning
        self._leading = False  # nothing but white space has come of this text, which vanishes
        self._parts = self._read()

    @property
    def markers(self) -> tuple[str, ...]:
        """Strings that must reach the parser even where they are special tokens."""
        thinking = (reasoning.OPEN, reasoning.CLOSE) if self._inside or self._reasons else ()
        return (*thinking, *(self._form.markers if self._form else ()))

    @property
    def num_calls(self) -> int:
        """Tool calls so far."""
        return self._calls.count

    def feed(self, text: str) -> list[ReplyPart]:
        """What is certain now that `text` has come."""
        self._source.push(text)
        return self._advance()

    def finish(self) -> list[ReplyPart]:
        """What remains, when the reply is over."""
        self._source.end()
        return self._advance()

    def _advance(self) -> list[ReplyPart]:
        parts = []
        for part in self._parts:
            if part is None:
                break
            parts.append(part)
        return joined(parts)

    # Readers

    def _read(self) -> Generator[ReplyPart | None, None, None]:
        if self._reasons and not self._inside:
            self._inside = yield from self._opens_reasoning()
        if self._inside:
            yield from self._text(ReasoningText, reasoning.CLOSE)
        yield from self._text(AnswerText, None)

    def _opens_reasoning(self) -> Generator[ReplyPart | None, None, bool]:
        source = self._source
        while True:
            begin = source.rest.lstrip(SPACE)
            if begin.startswith(reasoning.OPEN):
                source.take(len(source.rest) - len(begin) + len(reasoning.OPEN))
                return True
            if source.ended or not reasoning.OPEN.startswith(begin):
                return False
            yield None

    def _text(self, kind: _Text, end: str | None) -> Generator[ReplyPart | None, None, None]:
        """Text up to and with `end` (None: to the end of the reply), and calls between."""
        source, form = self._source, self._form
        self._calls.strict = kind is ReasoningText
        self._leading = self._inside
        self._space = ""
        markers = [marker for marker in (end, form and form.open) if marker]
        while True:
            text, marker = source.cut(markers)
            if marker is None and source.ended:
                text += source.take(len(source.rest))
            yield from self._say(kind, text)
            if marker is None:
                if source.ended:
                    break
                yield None
            elif marker == end:
                self._space = ""
                return
            else:
                yield from self._call(kind, marker)
        if self._space and not self._leading:
            yield kind(self._space)

    def _say(self, kind: _Text, text: str) -> Generator[ReplyPart, None, None]:
        """Give out text, but for white space at its end while it may vanish."""
        text = self._space + text
        if self._leading:
            text = text.lstrip(SPACE)
        held = self._form is not None or kind is ReasoningText
        shown = text.rstrip(SPACE) if held else text
        self._space = text[len(shown) :]
        if shown:
            self._leading = False
            yield kind(shown)

    def _call(self, kind: _Text, marker: str) -> Generator[ReplyPart | None, None, None]:
        """Calls behind `marker`, or text from there on."""
        assert self._form is not None
        before = self._calls.count
        self._source.mark()
        try:
            yield from self._form.read(self._source, self._calls)
        except BrokenOff:
            if self._calls.count == before:
                self._source.rewind()
            else:  # what there is of the last call was given out
                self._source.take(len(self._source.rest))
        except Unreadable:
            self._source.rewind()
        if self._calls.count == before:
            yield from self._say(kind, marker)
        else:
            self._space, self._leading = "", True


def parser_for(chat_template: str, *, tools: Sequence[Tool] = (), thinking: bool = False) -> ReplyParser:
    """A parser for one reply of a model with this template. `tools`: those that the request offers, empty
    where calls are not to be looked for. `thinking`: whether the reply begins inside reasoning
    (`reasoning.begins_inside` of the rendered prompt)."""
    form = format_of(chat_template) if tools else None
    return ReplyParser(form, tools, inside=thinking, reasons=reasoning.knows_reasoning(chat_template))
