"""The forms in which the served families write tool calls, and which of them a chat template asks for.

Owns the table of forms. A template shows its form, since it renders the calls of earlier turns in it; the
sign looked for is what no other form has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from denim.server.incoming import Incoming, Reader
from denim.server.tool_calls import kimi_calls
from denim.server.tool_calls.calls import Calls
from denim.server.tool_calls.json_calls import read_json_calls
from denim.server.tool_calls.kimi_calls import read_kimi_calls
from denim.server.tool_calls.python_calls import read_python_calls
from denim.server.tool_calls.shapes import Shape, json_call, kimi_call, ling_call, python_call, qwen_call
from denim.server.tool_calls.xml_calls import read_ling_calls, read_qwen_calls


@dataclass(frozen=True)
class ToolFormat:
    """`open` begins one call or several; `read` reads what follows, up to and with `close`. `shape`: the text
    of calls as a grammar."""

    name: str
    families: str
    sign: str
    open: str
    close: str
    read: Callable[[Incoming, Calls], Reader[None]]
    shape: Shape

    @property
    def markers(self) -> tuple[str, ...]:
        """What a detokeniser must not leave out, though it may be special tokens."""
        return tuple(marker for marker in (self.open, self.close) if marker)


def _json_list(name: str, families: str, open: str, close: str, sign: str | None = None) -> ToolFormat:
    shape = Shape(json_call(), ", ", (f"{open}[", f"]{close}"))
    read = partial(read_json_calls, close=close)
    return ToolFormat(name, families, sign or open, open, close, read, shape)


# In the order in which signs are looked for: one that is part of another form's markup comes after it.
FORMATS = (
    ToolFormat(
        "kimi",
        "Kimi Linear",
        kimi_calls.OPEN,
        kimi_calls.OPEN,
        kimi_calls.CLOSE,
        read_kimi_calls,
        Shape(kimi_call, "", (kimi_calls.OPEN, kimi_calls.CLOSE)),
    ),
    ToolFormat(
        "qwen-xml",
        "Qwen3.5, Nemotron 3",
        "<function=",
        "<tool_call>",
        "</tool_call>",
        read_qwen_calls,
        Shape(qwen_call, "\n"),
    ),
    ToolFormat(
        "ling",
        "Ling 3.0",
        "<arg_key>",
        "<tool_call>",
        "</tool_call>",
        read_ling_calls,
        Shape(ling_call, "\n"),
    ),
    _json_list("nemotron", "Nemotron-H", "<TOOLCALL>", "</TOOLCALL>"),
    ToolFormat(
        "lfm2",
        "LFM2, LFM2-MoE",
        "<|tool_call_start|>",
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        partial(read_python_calls, close="<|tool_call_end|>"),
        Shape(python_call, ", ", ("<|tool_call_start|>[", "]<|tool_call_end|>")),
    ),
    ToolFormat(
        "olmo",
        "OLMo-hybrid",
        "<function_calls>",
        "<function_calls>",
        "</function_calls>",
        partial(read_python_calls, close="</function_calls>"),
        Shape(python_call, "\n", ("<function_calls>\n", "\n</function_calls>")),
    ),
    _json_list("jamba", "Jamba", "<tool_calls>", "</tool_calls>", sign="<tool_calls>["),
    ToolFormat(
        "minimax",
        "MiniMax-M1",
        "<tool_calls>",
        "<tool_calls>",
        "</tool_calls>",
        partial(read_json_calls, close="</tool_calls>"),
        Shape(json_call(), "\n", ("<tool_calls>\n", "\n</tool_calls>")),
    ),
    _json_list("granite", "Granite 4 previews", "<|tool_call|>", ""),
    ToolFormat(
        "hermes",
        "Qwen3-Next, Granite 4, Falcon-H1",
        "<tool_call>",
        "<tool_call>",
        "</tool_call>",
        partial(read_json_calls, close="</tool_call>"),
        Shape(json_call("<tool_call>\n", "\n</tool_call>"), "\n"),
    ),
)


def format_of(chat_template: str) -> ToolFormat | None:
    """The form that a chat template shows; None for one that knows no calls."""
    return next((form for form in FORMATS if form.sign in chat_template), None)
