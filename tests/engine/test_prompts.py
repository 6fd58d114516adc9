"""What may be a prompt, and what is refused before time is spent on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from denim.engine.facts import EngineFacts
from denim.engine.prompts import PromptReader, PromptTooLongError
from denim.engine.tokenizer import Tokenizer, load_tokenizer
from denim.errors import RequestError
from tests.engine.byte_tokenizer import SPECIAL, save
from tests.engine.conftest import TEXT_VOCAB

TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def reader_of(tokenizer: Tokenizer, longest: int = 1000) -> PromptReader:
    text = dict.fromkeys(("model", "device", "dtype"), "")
    sizes = ("max_num_seqs", "max_num_batched_tokens", "page_size", "chunk_size", "weight_bytes")
    numbers = dict.fromkeys((*sizes, "arena_bytes", "slot_bytes", "page_bytes"), 1)
    facts = EngineFacts(
        **text,
        **numbers,
        vocab_size=TEXT_VOCAB,
        end_token_ids=(),
        max_model_len=longest,
        checkpoint_policy="auto",
        strip_lines=(),
    )
    return PromptReader(tokenizer, facts)


@pytest.mark.parametrize("prompt", [b"abc", bytearray(b"abc"), {97, 98}, {97: 1}, 97, None])
def test_what_is_no_list_of_tokens(tokenizer: Tokenizer, prompt: Any) -> None:
    with pytest.raises(RequestError, match="a prompt is a string or a list of token ids, not"):
        reader_of(tokenizer).read(prompt)


@pytest.mark.parametrize("token", [-1, TEXT_VOCAB, 2**31 - 1, 2**31, 2**63])
def test_ids_outside_the_vocabulary_are_named(tokenizer: Tokenizer, token: int) -> None:
    with pytest.raises(RequestError, match=f"token id {token} at position 1 is outside the vocabulary"):
        reader_of(tokenizer).read([1, token])


def test_the_longest_prompt_leaves_room_for_one_token(tokenizer: Tokenizer) -> None:
    reader = reader_of(tokenizer, longest=12)
    longest_texts = SPECIAL[0] * 11  # 13 characters a token
    assert len(reader.read(longest_texts).ids) == len(reader.read([7] * 11).ids) == 11
    for prompt in (SPECIAL[0] * 12, [7] * 12):
        with pytest.raises(PromptTooLongError, match="allows 11 tokens"):
            reader.read(prompt)


def test_a_text_without_hope_is_not_even_tokenised(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", None)
    with pytest.raises(PromptTooLongError, match="13,000 characters, which are at least 1,000 tokens"):
        reader_of(tokenizer, longest=1000).read("x" * 13_000)


def test_a_chat_has_the_start_token_of_its_template_alone(tmp_path: Path) -> None:
    """A tokenizer may put one before every text; templates write their own."""
    tokenizer = load_tokenizer(save(tmp_path))
    assert tokenizer is not None
    start = tokenizer.encode(SPECIAL[0])[0]
    tokenizer.inner.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], start)]
    )
    reader = reader_of(tokenizer)
    assert reader.read("a").tokens == [start, 97]
    read = reader.read_chat([{"role": "user", "content": "a"}])
    assert start not in read.tokens
    assert tokenizer.decode(read.tokens, skip_special_tokens=False) == read.text


def test_tools_are_a_part_that_other_chats_share(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, chat_template=TOOLS_TEMPLATE))
    assert tokenizer is not None
    messages = [{"role": "user", "content": "hello"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    read = reader_of(tokenizer).read_chat(messages, tools=tools)
    head, _, _ = read.text.partition("hello")
    assert read.boundaries[0] == len(tokenizer.encode(head, add_special_tokens=False))
