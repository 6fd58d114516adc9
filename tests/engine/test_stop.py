from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from denim.engine.stop import StopStrings


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the first beginning of `text` that ends with a stop string, the longest of them."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            stop = max(met, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def stream(cuts: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    watch, shown = StopStrings(stops, include), []
    for piece in cuts:
        checked = watch.push(piece)
        shown.append(checked.text)
        if checked.stop is not None:
            return shown, checked.stop
    return [*shown, watch.flush()], None


def test_what_may_be_the_beginning_of_a_stop_is_held_back() -> None:
    assert stream(["a", "E", "N", "D", "b"], ["END"]) == (["a", "", "", ""], "END")
    assert stream(["a", "E", "N", "x"], ["END"]) == (["a", "", "", "ENx", ""], None)
    assert stream(["a", "E", "N"], ["END"]) == (["a", "", "", "EN"], None)
    assert stream(["aEEN", "D"], ["END"], include=True) == (["aE", "END"], "END")
    assert stream(["abab", "ac"], ["abac"]) == (["ab", ""], "abac")


def test_the_first_to_be_complete_wins_and_then_the_longest() -> None:
    assert stream(["xabcd"], ["abcd", "bc"]) == (["xa"], "bc")
    assert stream(["xabc"], ["bc", "abc", "c"]) == (["x"], "abc")
    assert stream(["x2", "1"], ["1", "2"]) == (["x"], "2")


def test_what_was_held_back_comes_once() -> None:
    text = StopStrings(["END"], include=False)
    assert (text.push("aE").text, text.flush(), text.flush()) == ("a", "E", "")


def test_without_stops_text_passes() -> None:
    assert stream(["a", "", "中"], []) == (["a", "", "中", ""], None)


@pytest.mark.parametrize("size", range(1, 9))
def test_characters_of_several_bytes_are_not_cut(size: int) -> None:
    """Case ST-04: a stop of any length in ASCII, a text of 3- and 4-byte characters."""
    pieces = list("中文😀中é文中")
    assert stream(pieces, ["Z" * size]) == ([*pieces, ""], None)


@settings(deadline=None, max_examples=300)
@given(
    text=st.text("ab中", max_size=30),
    stops=st.lists(st.text("ab中", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_cutting_gives_what_the_whole_text_gives(
    text: str, stops: list[str], include: bool, seed: int
) -> None:
    chance, pieces, at = random.Random(seed), [], 0
    while at < len(text):
        size = chance.randrange(0, 5)
        pieces.append(text[at : at + size])
        at += size
    shown, stop = stream(pieces, stops, include)
    assert ("".join(shown), stop) == reference(text, stops, include)
