"""Grammars for the vocabulary of a model: what each kind allows, what is refused, and when."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from denim import RequestError, StructuredOutput
from denim.engine import grammars
from denim.engine.grammars import Grammars
from denim.engine.tokenizer import Tokenizer
from denim.runner.constraint import Constraint, DeadEndError
from tests.engine.conftest import TEXT_VOCAB


@pytest.fixture(scope="module")
def made(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, TEXT_VOCAB, end_of(tokenizer))


def end_of(tokenizer: Tokenizer) -> list[int]:
    assert tokenizer.eos_token_id is not None
    return [tokenizer.eos_token_id]


def constraint(made: Grammars, tokenizer: Tokenizer, **form: Any) -> Constraint:
    return made.constraint(StructuredOutput(**form), end_of(tokenizer))


def allowed(one: Constraint) -> set[int]:
    return set(one.allowed().tolist())


def follow(one: Constraint, tokenizer: Tokenizer, text: str) -> None:
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert token in allowed(one), tokenizer.decode_one(token)
        one.accept(token)


FITS = [
    ({"regex": "[0-9]{2}-é+"}, ["12-é", "00-éé"], ["1-é", "12-", "x"]),
    ({"choice": ["yes", "no", "yes, 中"]}, ["yes", "no", "yes, 中"], ["ye", "maybe"]),
    ({"json_object": True}, ["{}", '{"a": [1, null, "x"], "b": {}}'], ["[]", "1", '{"a"}']),
    (
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        ['{"a": 3}', '{\n  "a": -12\n}'],
        ["{}", '{"a": 1.5}', '{"b": 1}'],
    ),
    (  # lengths, and no raw control characters
        {"json": {"type": "string", "minLength": 2, "maxLength": 3}},
        ['"ab"', '"a中c"'],
        ['"a"', '"abcd"', '"a\x05"', '"a\tb"', '"a\nb"'],
    ),
    ({"json": {"type": ["integer", "string"], "maxLength": 1}}, ["1234", '"a"'], ['"ab"', "null"]),
    ({"grammar": 'root ::= "(" root ")" | "x"'}, ["x", "((x))"], ["((x)", ""]),
    ({"structural_tag": {"type": "const_string", "value": "abc"}}, ["abc"], ["ab", "abd"]),
    (
        {
            "structural_tag": {
                "type": "structural_tag",
                "format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"},
            }
        },
        ["<a>1</a>"],
        ["<b>"],
    ),
    (
        {"choice": ["ok"], "after": "</think>"},
        ["hm.</think>ok", "</think>\n\nok"],
        ["hm.ok", "</think>no", "</think>\n\n\nok"],
    ),
    (
        {"choice": ["ok"], "after": "</think>", "opening": "<think>"},
        ["ok", "<think>hm</think>\nok"],
        ["hm</think>ok", "<think>ok"],
    ),
]


@pytest.mark.parametrize(("form", "right", "wrong"), FITS)
def test_what_a_form_allows(
    made: Grammars, tokenizer: Tokenizer, form: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    (end,) = end_of(tokenizer)
    for text in right:
        one = constraint(made, tokenizer, **form)
        follow(one, tokenizer, text)
        assert one.may_end
        assert end in allowed(one)
        before = one.mask.clone()
        one.accept(end)  # which ends the completion, and is no part of the text
        assert one.mask.equal(before)
    for text in wrong:
        one = constraint(made, tokenizer, **form)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        for token in tokens:
            if token not in allowed(one):
                break
            one.accept(token)
        else:
            assert not one.may_end
            assert end not in allowed(one)


def test_it_is_exhausted_when_nothing_can_follow(made: Grammars, tokenizer: Tokenizer) -> None:
    one = constraint(made, tokenizer, choice=["a", "ab"])
    assert not one.exhausted
    follow(one, tokenizer, "a")
    assert not one.exhausted
    assert one.may_end
    follow(one, tokenizer, "b")
    assert one.exhausted
    assert allowed(one) == set(end_of(tokenizer))


def test_every_way_to_cut_a_character_is_allowed(made: Grammars, tokenizer: Tokenizer) -> None:
    """A vocabulary has tokens that begin and end inside characters."""
    text = "文中".encode()
    one = constraint(made, tokenizer, regex="文中")
    for token in text:  # the byte-level tokenizer has each byte as the token of that number
        assert token in allowed(one)
        one.accept(token)
    assert one.exhausted


def test_special_tokens_are_no_text(made: Grammars, tokenizer: Tokenizer) -> None:
    one = constraint(made, tokenizer, regex=".*")
    specials = tokenizer.special_ids - set(end_of(tokenizer))
    assert specials
    assert not specials & allowed(one)
    assert {token for token in range(256) if 32 <= token < 127} <= allowed(one)


def test_special_tokens_that_the_form_names_are_text(made: Grammars, tokenizer: Tokenizer) -> None:
    start = tokenizer.encode("<|im_start|>", add_special_tokens=False)
    one = constraint(made, tokenizer, regex="x", after="<|im_start|>")
    assert allowed(one) >= set(start)
    one.accept(*start)
    follow(one, tokenizer, "x")
    assert one.exhausted


def test_ids_beyond_the_tokenizer_are_never_drawn(made: Grammars, tokenizer: Tokenizer) -> None:
    one = constraint(made, tokenizer, regex="(.|\n)*")
    last = max(tokenizer.inner.get_vocab().values())
    assert max(allowed(one)) <= last < TEXT_VOCAB - 1


@pytest.mark.parametrize("vocab", [275, 287, 288, 289])
def test_a_vocabulary_of_any_size(tokenizer: Tokenizer, vocab: int) -> None:
    """A mask has whole words; its bits behind the vocabulary are no tokens."""
    made = Grammars(tokenizer, vocab, end_of(tokenizer))
    one = made.constraint(StructuredOutput(regex="ab"), [])
    for letter in b"ab":
        assert one.allowed().tolist() == [letter]
        one.accept(letter)
    assert one.exhausted
    assert one.allowed().tolist() == []


def test_what_ends_the_completion_is_its_own_affair(made: Grammars, tokenizer: Tokenizer) -> None:
    """Stop tokens end a text where the form lets it end; the model's end does not under ignore_eos."""
    (end,) = end_of(tokenizer)
    one = made.constraint(StructuredOutput(regex="a+"), [98])
    assert allowed(one) == {97}
    one.accept(97)
    assert allowed(one) == {97, 98}
    assert end not in allowed(one)
    assert not one.exhausted


def test_a_token_out_of_place_is_an_error(made: Grammars, tokenizer: Tokenizer) -> None:
    with pytest.raises(DeadEndError, match="token 98"):
        constraint(made, tokenizer, regex="a+").accept(98)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json": {"enum": []}}, "json: enum array must not be empty"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "minimum greater than maximum"),
        ({"json": {"$ref": "#/$defs/none"}}, "json: "),
        ({"json": {"type": "nothing"}}, "Unsupported type"),
        ({"regex": "(a"}, "regex: .*parenthesis"),
        ({"regex": "(?=a)b"}, "Lookahead is not supported"),
        ({"regex": "(" * 5000 + "a" + ")" * 5000}, "Nest layer"),
        ({"grammar": "root ::= missing"}, 'grammar: .*Rule "missing" is not defined'),
        ({"grammar": "root ::= root"}, "grammar: .*allows no text at all"),
        ({"grammar": 'root ::= "a" root'}, None),
        ({"grammar": 'root ::= ""'}, "no text but the empty one"),
        ({"structural_tag": {"type": "no such"}}, "structural_tag: "),
    ],
)
def test_what_cannot_be_is_refused(
    made: Grammars, tokenizer: Tokenizer, form: dict[str, Any], message: str | None
) -> None:
    if message is None:
        constraint(made, tokenizer, **form)  # endless texts are the length's affair
        return
    for _ in range(2):  # also when it is asked again
        with pytest.raises(RequestError, match=message) as caught:
            constraint(made, tokenizer, **form)
        assert "/project/" not in str(caught.value)
        assert caught.value.param == StructuredOutput(**form).kind


def test_errors_may_call_a_form_otherwise(made: Grammars, tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"^response_format \(regex\): ") as caught:
        constraint(made, tokenizer, regex="(", named="response_format")
    assert caught.value.param == "response_format"
    assert StructuredOutput(regex="a", named="x") == StructuredOutput(regex="a")


def test_a_model_without_a_tokenizer_has_no_structure() -> None:
    with pytest.raises(RequestError, match="Structured output needs a tokenizer"):
        Grammars(None, 10, []).compiled(StructuredOutput(regex="a"))


def test_what_takes_too_long_is_refused_and_others_go_on(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Grammars(tokenizer, TEXT_VOCAB, end_of(tokenizer))
    gate = threading.Event()
    compiler = made._compiler

    def slow(source: str) -> Any:
        if "slow" in source:
            gate.wait(60)
        return compiler(source)

    monkeypatch.setattr(made, "_compiler", slow)
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 0.05)
    with pytest.raises(RequestError, match="more than 0 s to compile"):
        made.compiled(StructuredOutput(regex="slow"))
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 30)
    assert made.compiled(StructuredOutput(regex="fast")) is made.compiled(StructuredOutput(regex="fast"))
    gate.set()
    assert made.compiled(StructuredOutput(regex="slow")) is not None


def test_what_is_compiled_is_found_while_a_vocabulary_is_read(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes seconds for a large one, for which no step can wait."""
    made = Grammars(tokenizer, TEXT_VOCAB, end_of(tokenizer))
    form = StructuredOutput(regex="a")
    compiled = made.compiled(form)
    make, reading, found = made._make_compiler, threading.Event(), threading.Event()

    def slow(*kind: Any) -> Any:
        reading.set()
        assert found.wait(60)
        return make(*kind)

    monkeypatch.setattr(made, "_make_compiler", slow)
    other = made.compile(StructuredOutput(json={"type": "string", "minLength": 1}))
    assert reading.wait(60)
    finding = ThreadPoolExecutor(1).submit(made.compiled, form)
    try:
        assert finding.result(10) is compiled
    finally:
        found.set()
    assert other.result(60) is not None


ENDS = """
import sys, threading
from denim.engine import grammars
from denim.engine.tokenizer import load_tokenizer
from denim.structured_output import StructuredOutput
grammars.ENDING_SECONDS = float(sys.argv[2])
made = grammars.Grammars(load_tokenizer(sys.argv[1]), 288, [])
begun, on = threading.Event(), threading.Event()
def build(form):
    begun.set()
    on.wait()
    sys.stdout.write("compiled")
made.build = build
made.compile(StructuredOutput(regex="a"))
begun.wait()
later = threading.Timer(0.2, on.set if sys.argv[3] == "soon" else int)
later.daemon = True
later.start()
"""


@pytest.mark.parametrize(("when", "patience", "said"), [("soon", 60.0, "compiled"), ("never", 0.1, "")])
def test_the_program_ends_while_a_form_is_compiled(
    speaking: Path, when: str, patience: float, said: str
) -> None:
    """It waits a little, as xgrammar would abort it, and not for ever."""
    command = [sys.executable, "-c", ENDS, str(speaking), str(patience), when]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, said)


def test_the_oldest_are_forgotten(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Grammars(tokenizer, TEXT_VOCAB, end_of(tokenizer))
    first = made.compiled(StructuredOutput(regex="a"))
    monkeypatch.setattr(grammars, "KEPT_BYTES", first.memory_size_bytes)
    for letter in "bcd":
        made.compiled(StructuredOutput(regex=letter))
    assert len(made._known) <= 2
    assert made.compiled(StructuredOutput(regex="a")) is not first


def test_a_form_whose_masks_take_too_long_is_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Grammars(tokenizer, TEXT_VOCAB, end_of(tokenizer))
    monkeypatch.setattr(grammars, "MOST_MASK_SECONDS", 0.0)
    with pytest.raises(RequestError, match="regex: this takes .* ms a token to check"):
        made.compiled(StructuredOutput(regex="[a-z]+"))


@pytest.mark.parametrize(
    ("pattern", "other"),
    [
        ("[a-z]+", "[a-z][a-z]*"),
        (r"\w+-.+\d+?", r"\w\w*-..*\d\d*?"),
        (r"[\]a+]+x+", r"[\]a+][\]a+]*x+"),
        (r"\[a+\.+\\w+", r"\[a+\.+\\w+"),
        ("(ab)+[^a]+", "(ab)+[^a][^a]*"),
    ],
)
def test_repeated_sets_are_rewritten(pattern: str, other: str) -> None:
    assert grammars._without_plus(pattern) == other
