"""The text of calls as a grammar, in xgrammar's structural tags: what `formats` reads, demanded.

Owns how one call of one tool is written in each form, and how several are put together. Arguments follow the
tool's JSON schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from denim.engine.grammars import MOST_WHITE_SPACE
from denim.server.tool_calls import kimi_calls

Schema = Mapping[str, Any]
Grammar = dict[str, Any]  # a structural tag's format


@dataclass(frozen=True)
class Shape:
    """`call(name, schema)`: one call. `separator` stands between two, `section` around all of them."""

    call: Callable[[str, Schema], Grammar]
    separator: str
    section: tuple[str, str] | None = None

    def calls(self, tools: Mapping[str, Schema], *, single: bool) -> Grammar:
        """One call of one of `tools` (name -> schema) or more; `single`: exactly one."""
        calls = {
            "type": "tags_with_separator",
            "tags": self._tags(tools),
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": single,
        }
        return calls if self.section is None else tag(self.section[0], calls, self.section[1])

    def calls_in_text(self, tools: Mapping[str, Schema], open: str, *, single: bool) -> Grammar:
        """Any text, in which calls follow wherever `open` begins one; `single`: the first one is the end."""
        section = self.section is not None
        return {
            "type": "triggered_tags",
            "triggers": [open],
            "tags": [self.calls(tools, single=single)] if section else self._tags(tools),
            "stop_after_first": single,
        }

    def _tags(self, tools: Mapping[str, Schema]) -> list[Grammar]:
        return [self.call(name, schema) for name, schema in tools.items()]


def tag(begin: str, content: Grammar, end: str) -> Grammar:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def json_call(before: str = "", behind: str = "") -> Callable[[str, Schema], Grammar]:
    """{"name": …, "arguments": {…}} between two texts."""

    def call(name: str, schema: Schema) -> Grammar:
        begin = f'{before}{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        return tag(begin, _value(schema), "}" + behind)

    return call


def kimi_call(name: str, schema: Schema) -> Grammar:
    number = {"type": "regex", "pattern": "[0-9]{1,3}"}
    begin = f"{kimi_calls.CALL}{kimi_calls.PREFIX}{name}:"
    return tag(begin, _sequence(number, _text(kimi_calls.ARGUMENTS), _value(schema)), kimi_calls.END)


def qwen_call(name: str, schema: Schema) -> Grammar:
    content = _value(schema) | {"style": "qwen_xml"}
    return tag(f"<tool_call>\n<function={name}>\n", content, "\n</function>\n</tool_call>")


def ling_call(name: str, schema: Schema) -> Grammar:
    return tag(f"<tool_call>{name}", _value(schema) | {"style": "glm_xml"}, "</tool_call>")


def python_call(name: str, schema: Schema) -> Grammar:
    """name(key=value, …), the required arguments first, values as JSON."""
    properties = schema.get("properties", {})
    required = [key for key in schema.get("required", ()) if key in properties]
    optional = [key for key in properties if key not in required]
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}

    def argument(key: str, comma: bool) -> Grammar:
        below = properties[key]
        below = below | definitions if isinstance(below, dict) else below
        return _sequence(_text(f"{', ' if comma else ''}{key}="), _value(below))

    def rest(keys: Sequence[str]) -> list[Grammar]:
        return [{"type": "optional", "content": argument(key, comma=True)} for key in keys]

    if required:
        parts = [argument(key, comma=at > 0) for at, key in enumerate(required)] + rest(optional)
    elif optional:
        firsts = [
            _sequence(argument(key, comma=False), *rest(optional[at + 1 :]))
            for at, key in enumerate(optional)
        ]
        parts = [{"type": "optional", "content": {"type": "or", "elements": firsts}}]
    else:
        parts = []
    return tag(f"{name}(", _sequence(*parts) if parts else _text(""), ")")


def _value(schema: Any) -> Grammar:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MOST_WHITE_SPACE}


def _text(value: str) -> Grammar:
    return {"type": "const_string", "value": value}


def _sequence(*parts: Grammar) -> Grammar:
    return {"type": "sequence", "elements": list(parts)}
