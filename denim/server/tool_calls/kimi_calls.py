"""Calls between special tokens, with an id that the model makes itself: Kimi's form.

<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>
<|tool_calls_section_end|>. The template shows results by this id, so it is kept.
"""

from __future__ import annotations

from denim.server.incoming import Incoming, Reader
from denim.server.tool_calls.calls import Calls

OPEN = "<|tool_calls_section_begin|>"
CLOSE = "<|tool_calls_section_end|>"
CALL, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
PREFIX = "functions."


def read_kimi_calls(source: Incoming, calls: Calls) -> Reader[None]:
    while True:
        yield from source.skip()
        if (yield from source.expect(CALL, CLOSE)) == CLOSE:
            return
        id_ = (yield from source.until(ARGUMENTS)).strip()
        name = id_.removeprefix(PREFIX).rpartition(":")[0] or id_.removeprefix(PREFIX)
        yield from source.skip()
        yield calls.start(name, id_)
        source.mark()
        yield from calls.json_arguments(source)
        yield from source.skip()
        yield from source.expect(END)
        source.mark()
