from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from denim.engine.detokenizer import Detokenizer
from denim.engine.tokenizer import Tokenizer
from tests.engine.byte_tokenizer import SPECIAL, build, token_of

VOCAB = 285  # some ids beyond the last token
MARK = "\ufffd"


def pieces(tokenizer: Tokenizer, ids: Sequence[int], skip: bool = True) -> list[str]:
    """One piece a token, and the flush."""
    stream = Detokenizer(tokenizer, skip)
    return [*(stream.push(token) for token in ids), stream.flush()]


def test_a_character_comes_whole_or_not_at_all(tokenizer: Tokenizer) -> None:
    """ST-02: characters of 2, 3 and 4 bytes, a token a byte."""
    for character in "é中😀":
        size = len(character.encode())
        shown = pieces(tokenizer, list(character.encode()))
        assert shown == [""] * (size - 1) + [character, ""]


def test_text_does_not_wait_for_an_unfinished_character(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, [*b"ab", 0xE4, 0xB8]) == ["a", "b", "", "", MARK]
    assert pieces(tokenizer, [*b"a", *"😀".encode()[:3], *b"b"]) == ["a", "", "", "", MARK + "b", ""]


def test_a_token_may_hold_the_end_of_one_character_and_the_beginning_of_the_next(
    tokenizer: Tokenizer,
) -> None:
    whole = "文中文".encode()
    ids = [*whole[:2], token_of(whole[2:5]), *whole[5:]]
    assert pieces(tokenizer, ids) == ["", "", "文", "中", "", "", "文", ""]


def test_a_prompt_that_ends_inside_a_character_leaks_nothing(tokenizer: Tokenizer) -> None:
    """ST-03: the prompt is not given to it; what was generated decodes to no more than a mark more."""
    for cut in (1, 2):
        generated = [*"中".encode()[cut:], *b" the"]
        assert "".join(pieces(tokenizer, generated)) == tokenizer.decode(generated)


def test_special_and_unknown_tokens(tokenizer: Tokenizer) -> None:
    end = tokenizer.eos_token_id
    assert pieces(tokenizer, [97, end, 98, 5000]) == ["a", "", "b", "", ""]
    assert pieces(tokenizer, [97, end, 98], skip=False) == ["a", "<|im_end|>", "b", ""]
    # Bytes join over what is skipped, as in a full decode.
    assert "".join(pieces(tokenizer, [0xE4, end, 0xB8, 5000, 0xAD])) == "中"


@settings(deadline=None, max_examples=300)
@given(
    ids=st.lists(
        st.one_of(
            st.integers(0, VOCAB - 1),
            st.integers(0x80, 0xFF),
            st.sampled_from(list("中文😀é\ufffd".encode())),
            st.sampled_from(list(b" \na")),
        ),
        max_size=60,
    ),
    skip=st.booleans(),
)
def test_the_joined_pieces_are_the_full_decode(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    """ST-02: no mark is shown that the full decode does not have."""
    assert "".join(pieces(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


def fuzz(tokenizer: Tokenizer, count: int, seed: int) -> None:
    """Random bytes with pieces of valid text among them, then a space: all marks as in the full decode."""
    chance = random.Random(seed)
    text = list("the 中文中 😀é \ufffd ing".encode())
    kinds = [range(VOCAB), range(0x80, 0x100), range(0xC0, 0x100), text, [0xFF], [0x80]]
    for _ in range(count):
        ids: list[int] = []
        for _ in range(chance.randrange(1, 4)):
            if chance.random() < 0.3:
                start = chance.randrange(len(text))
                ids += text[start : start + chance.randrange(1, 12)]
            else:
                ids += chance.choices(chance.choice(kinds), k=chance.randrange(1, 20))
        ids.append(0x20)
        shown = pieces(tokenizer, ids)
        assert "".join(shown) == tokenizer.decode(ids), ids
        assert shown[-1] == "", ids  # nothing is left after a space


def test_fuzz(tokenizer: Tokenizer) -> None:
    """ST-05, in short."""
    fuzz(tokenizer, 8_000, seed=0)


@pytest.mark.slow
def test_fuzz_at_length(tokenizer: Tokenizer) -> None:
    """ST-05: 10^5 sequences, valid or not, each with a space behind it."""
    fuzz(tokenizer, 100_000, seed=1)


class CountingTokenizer(Tokenizer):
    """Counts the tokens that are decoded."""

    decoded = 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens)


@pytest.mark.parametrize(
    "ids",
    [
        list(b"the cat "),
        [0xFF],
        [0x80],
        [0xE4, 0xB8],
        [97, build().token_to_id(SPECIAL[2]), 5000],
        list("😀".encode()),
        [0xF0, 0xF0, 0x9F],
    ],
)
def test_the_work_for_a_token_does_not_grow(ids: list[int]) -> None:
    counting = CountingTokenizer(PreTrainedTokenizerFast(tokenizer_object=build()))
    many = (ids * 4000)[:4000]
    assert "".join(pieces(counting, many)) == counting.decode(many)
    assert counting.decoded < 30 * len(many)


def test_a_token_of_whole_characters_is_decoded_once() -> None:
    counting = CountingTokenizer(PreTrainedTokenizerFast(tokenizer_object=build()))
    for _ in range(2):
        assert pieces(counting, list(b"abcabc"))[:6] == list("abcabc")
        assert counting.decoded == 3


def test_marks_that_will_not_change_are_shown_soon(tokenizer: Tokenizer) -> None:
    """Output that is all rubbish still streams, a few marks behind."""
    stream = Detokenizer(tokenizer)
    shown = len(stream.push(97)) - 1
    for count in range(1, 200):
        shown += len(stream.push(0xFF))
        assert count - shown <= 4


def sentencepiece_tokenizer() -> Tokenizer:
    """Words with a mark for their space, and a token a byte for all other characters, as Llama 2 has them."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "ing", "é", "中"]
    inner = Backend(
        models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner))


def test_byte_fallback_and_spaces_as_marks() -> None:
    tokenizer, chance = sentencepiece_tokenizer(), random.Random(0)
    byte = 1  # the token of byte 0
    assert pieces(tokenizer, [258, 259, 258]) == ["the", "ing", " the", ""]
    for _ in range(3000):
        ids: list[int] = []
        for _ in range(chance.randrange(1, 15)):
            if chance.random() < 0.4:
                ids += [byte + value for value in chance.choice("文文😀ñ").encode()]
            else:
                ids.append(chance.randrange(257, 262))
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids), ids
