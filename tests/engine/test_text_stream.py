from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from denim.engine.text_stream import Piece, TextStream
from denim.engine.tokenizer import Tokenizer
from denim.errors import RequestError
from denim.sampling_params import SamplingParams
from tests.engine.byte_tokenizer import SPECIAL, build, token_of

END = build().token_to_id(SPECIAL[2])
OTHER_END = build().token_to_id(SPECIAL[0])


def stream(
    tokenizer: Tokenizer | None, ids: Sequence[int], room: int = 1000, **params: object
) -> list[Piece]:
    """The pieces up to the end, or all of them."""
    text, pieces = TextStream(SamplingParams(**params).resolve(), tokenizer, (END, OTHER_END), room), []
    for token in ids:
        pieces.append(text.push(token))
        if pieces[-1].finish_reason:
            break
    return pieces


def outcome(pieces: list[Piece]) -> tuple[str, int, str | None, int | str | None]:
    """Text, number of tokens, and why it ended."""
    return "".join(p.text for p in pieces), len(pieces), pieces[-1].finish_reason, pieces[-1].stop_reason


def test_the_model_s_end_tokens(tokenizer: Tokenizer) -> None:
    for end in (END, OTHER_END):
        assert outcome(stream(tokenizer, [*b"ab", end, *b"c"])) == ("ab", 3, "stop", None)
    ids = [*b"ab", END, *b"c"]
    assert outcome(stream(tokenizer, ids, ignore_eos=True)) == ("abc", 4, None, None)
    shown = {"skip_special_tokens": False}
    assert outcome(stream(tokenizer, ids, **shown))[0] == "ab"
    assert outcome(stream(tokenizer, ids, **shown, include_stop_str_in_output=True))[0] == "ab<|im_end|>"
    assert outcome(stream(tokenizer, ids, **shown, ignore_eos=True))[0] == "ab<|im_end|>c"


def test_stop_tokens(tokenizer: Tokenizer) -> None:
    b = ord("b")
    assert outcome(stream(tokenizer, b"abc", stop_token_ids=[b])) == ("a", 2, "stop", b)
    included = {"stop_token_ids": [b], "include_stop_str_in_output": True}
    assert outcome(stream(tokenizer, b"abc", **included)) == ("ab", 2, "stop", b)
    both = {"stop_token_ids": [END]}
    assert outcome(stream(tokenizer, [97, END], **both)) == ("a", 2, "stop", None)
    assert outcome(stream(tokenizer, [97, END], **both, ignore_eos=True)) == ("a", 2, "stop", END)


def test_a_token_that_ends_goes_before_a_stop_string(tokenizer: Tokenizer) -> None:
    b = ord("b")
    shown = {"stop_token_ids": [b], "stop": "ab", "include_stop_str_in_output": True}
    assert outcome(stream(tokenizer, b"xabc", **shown)) == ("xab", 3, "stop", b)


def test_the_length(tokenizer: Tokenizer) -> None:
    assert outcome(stream(tokenizer, b"abcdef", room=3)) == ("abc", 3, "length", None)
    assert outcome(stream(tokenizer, [97, 98, END], room=3)) == ("ab", 3, "stop", None)
    assert outcome(stream(tokenizer, b"abX", room=3, stop="X")) == ("ab", 3, "stop", "X")


def test_the_end_lets_out_what_was_held_back(tokenizer: Tokenizer) -> None:
    half = [97, 0xE4, 0xB8]
    assert outcome(stream(tokenizer, half, room=3)) == ("a\ufffd", 3, "length", None)
    assert outcome(stream(tokenizer, [*half, END])) == ("a\ufffd", 4, "stop", None)
    assert outcome(stream(tokenizer, b"aEN", room=3, stop="END")) == ("aEN", 3, "length", None)
    assert outcome(stream(tokenizer, [*b"aEN", END], stop="END")) == ("aEN", 4, "stop", None)


def test_an_abort_lets_it_out_too(tokenizer: Tokenizer) -> None:
    for ids, stops, text in (
        (b"aEN", "END", "EN"),
        ([97, 0xE4], "", "\ufffd"),
        ([*b"E", 0xE4], "E\ufffd", ""),
    ):
        running = TextStream(SamplingParams(stop=stops or None).resolve(), tokenizer, (END,), 9)
        for token in ids:
            assert running.push(token).finish_reason is None
        assert running.flush() == text
    assert TextStream(SamplingParams(), None, (END,), 9).flush() == ""


def test_stop_strings_over_the_borders_of_tokens(tokenizer: Tokenizer) -> None:
    the = token_of(b" the")
    assert outcome(stream(tokenizer, [97, the, 98], stop="he")) == ("a t", 2, "stop", "he")
    assert outcome(stream(tokenizer, [97, the, 98], stop=["a ", "eb"])) == ("", 2, "stop", "a ")
    assert outcome(stream(tokenizer, [97, the, 98, 99], stop="eb")) == ("a th", 3, "stop", "eb")
    text = [*"a中文b".encode()]
    assert outcome(stream(tokenizer, text, stop="文")) == ("a中", 7, "stop", "文")
    assert outcome(stream(tokenizer, text, stop="文", include_stop_str_in_output=True))[0] == "a中文"


def test_nothing_stops_within_min_tokens(tokenizer: Tokenizer) -> None:
    for stop in ({"stop": "a"}, {"stop_token_ids": [97]}):
        assert outcome(stream(tokenizer, b"aaaaa", **stop, min_tokens=3))[:2] == ("aaa", 4)
    assert outcome(stream(tokenizer, [END, END, 97, END], min_tokens=2)) == ("a", 4, "stop", None)
    # A stop string that begins before is no stop string.
    assert outcome(stream(tokenizer, b"xabab", stop="ab", min_tokens=2)) == ("xab", 5, "stop", "ab")


def test_without_text(tokenizer: Tokenizer) -> None:
    for missing in (stream(None, [97, END]), stream(tokenizer, [97, END], detokenize=False)):
        assert outcome(missing) == ("", 2, "stop", None)
    assert outcome(stream(None, [97, 98], stop_token_ids=[98])) == ("", 2, "stop", 98)
    with pytest.raises(RequestError, match="A stop string needs a tokenizer"):
        stream(None, [97], stop="x")


@settings(deadline=None, max_examples=200)
@given(
    ids=st.lists(
        st.one_of(st.integers(0, 284), st.sampled_from(list("ab中文".encode()))), min_size=1, max_size=40
    ),
    stops=st.lists(st.text("ab中\ufffd", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    room=st.integers(1, 40),
)
def test_the_joined_pieces_are_the_text_of_the_tokens(
    tokenizer: Tokenizer, ids: list[int], stops: list[str], include: bool, room: int
) -> None:
    """Up to the first stop string, or all of it: streaming shows just what one look at the end would."""
    pieces = stream(tokenizer, ids, room, stop=stops, include_stop_str_in_output=include, ignore_eos=True)
    text, count, reason, stop = outcome(pieces)
    whole = tokenizer.decode(ids[:count])
    if reason is None:  # it goes on: a character or a stop may be coming
        assert whole.startswith(text)
    elif reason == "length":
        assert count == room
        assert text == whole
        assert not any(s in whole for s in stops)
    else:
        assert isinstance(stop, str)
        assert text.endswith(stop) if include else not any(s in text for s in stops)
        assert whole.startswith(text if include else text + stop)
