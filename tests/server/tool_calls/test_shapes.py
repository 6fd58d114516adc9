"""What grammars demand is what readers read: random texts of each grammar, parsed."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from denim import RequestError, StructuredOutput
from denim.engine.grammars import Grammars
from denim.engine.tokenizer import Tokenizer, load_tokenizer
from denim.server.reply_parser import ReplyParser
from denim.server.reply_parts import ReplyPart
from denim.server.tool_calls.formats import FORMATS, ToolFormat
from denim.structured_output import MAX_CHARACTERS
from tests.engine.byte_tokenizer import save
from tests.server.tool_calls.replies import answer, calls, parts_of

VOCAB = 275
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Z][a-z é]{0,6}$"},
        "days": {"type": "integer", "minimum": 1, "maximum": 400},
        "units": {"enum": ["C", "F"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
}
OPTIONAL = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"enum": ["u", "v"]}}}
NOTHING = {"type": "object", "properties": {}}
TOOLS = {"get_weather": SCHEMA, "set_mode": OPTIONAL, "now": NOTHING}
OFFERED = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    loaded = load_tokenizer(save(tmp_path_factory.mktemp("tokenizer")))
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    assert tokenizer.eos_token_id is not None
    return Grammars(tokenizer, VOCAB, [tokenizer.eos_token_id])


def texts(grammars: Grammars, tokenizer: Tokenizer, grammar: dict[str, Any], count: int) -> list[str]:
    """Random texts of a grammar, up to where it lets them end. White space is rarely drawn: little is to be
    learnt from it."""
    assert tokenizer.eos_token_id is not None
    end = tokenizer.eos_token_id
    form = StructuredOutput(structural_tag=grammar)
    chance = random.Random(0)
    found = []
    for _ in range(count):
        one = grammars.constraint(form, [end])
        tokens: list[int] = []
        for _ in range(3000):
            may = one.allowed().tolist()
            going = [token for token in may if token != end]
            if end in may and (not going or chance.random() < 0.6):
                break
            solid = [token for token in going if chr(token) not in " \t\r\n"]
            token = chance.choice(solid if solid and chance.random() < 0.9 else going)
            tokens.append(token)
            one.accept(token)
        else:
            raise AssertionError("the text has no end")
        found.append(tokenizer.decode(tokens, skip_special_tokens=False))
    return found


def read(form: ToolFormat, text: str) -> list[ReplyPart]:
    return parts_of(ReplyParser(form, OFFERED), [text])


def check_call(name: str, text: str) -> None:
    """The arguments fit the tool's schema."""
    arguments = json.loads(text)
    properties = TOOLS[name]["properties"]
    assert arguments.keys() <= properties.keys()
    assert arguments.keys() >= set(TOOLS[name].get("required", ()))  # type: ignore[call-overload]
    for key, value in arguments.items():
        match key:
            case "city":
                assert value.strip()[0].isupper()  # a form may allow white space around a value
            case "days":
                assert 1 <= value <= 400
            case "flags":
                assert all(isinstance(flag, bool) for flag in value)
            case "place":
                assert isinstance(value["x"], int)
            case _:
                assert value in properties[key]["enum"]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_demanded_calls_are_read(grammars: Grammars, tokenizer: Tokenizer, form: ToolFormat) -> None:
    names = set()
    counts = set()
    keys: set[str] = set()
    for text in texts(grammars, tokenizer, form.shape.calls(TOOLS, single=False), 12):
        parts = read(form, text)
        assert answer(parts) == ""
        counts.add(len(calls(parts)))
        for name, arguments in calls(parts):
            names.add(name)
            keys |= json.loads(arguments).keys()
            check_call(name, arguments)
    assert names == TOOLS.keys()
    assert keys - set(SCHEMA["required"]), "optional arguments come, too"
    assert 0 not in counts
    assert max(counts) > 1


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_one_call_only(grammars: Grammars, tokenizer: Tokenizer, form: ToolFormat) -> None:
    for text in texts(grammars, tokenizer, form.shape.calls({"set_mode": OPTIONAL}, single=True), 6):
        parts = read(form, text)
        assert answer(parts) == ""
        assert [name for name, _ in calls(parts)] == ["set_mode"]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_calls_in_text(grammars: Grammars, tokenizer: Tokenizer, form: ToolFormat) -> None:
    """Text is free until a call begins, which then must be one of the tools' and fit."""
    grammar = form.shape.calls_in_text(TOOLS, form.open, single=True)
    one = grammars.constraint(StructuredOutput(structural_tag=grammar), [])
    text = tokenizer.encode(f"See: {form.open}", add_special_tokens=False)
    for token in text:
        one.accept(token)
    assert len(one.allowed().tolist()) < 40
    (whole,) = texts(grammars, tokenizer, form.shape.calls({"now": NOTHING}, single=True), 1)
    for token in tokenizer.encode(whole.removeprefix(form.open), add_special_tokens=False):
        assert token in one.allowed().tolist(), whole
        one.accept(token)
    assert one.exhausted
    assert calls(read(form, f"See: {whole}")) == [("now", "{}")]


def test_limits_hold_for_tools_too() -> None:
    names = {f"tool_{place}": SCHEMA for place in range(MAX_CHARACTERS // 400)}
    with pytest.raises(RequestError, match="structural_tag: has"):
        StructuredOutput(structural_tag=FORMATS[0].shape.calls(names, single=False))
