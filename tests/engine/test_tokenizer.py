from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from denim.engine.tokenizer import Tokenizer, load_tokenizer, need_tokenizer
from denim.errors import ConfigError, RequestError
from tests.engine.byte_tokenizer import OWN_SPLITTING, SPECIAL, TEMPLATE, build, save

TEXTS = ["the thing, 12345 times", "中文中 😀é", "", "  \n\n", "the<|im_end|>the", "don't"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    """Also where a character is spread over several tokens."""
    assert b"".join(map(tokenizer.bytes_of, tokenizer.encode(text))) == text.encode()


def test_bytes_of_a_byte_fallback() -> None:
    """SentencePiece's vocabularies have a token `<0xE4>` for a byte without one of its own."""
    inner = byte_fallback_tokenizer({"<0xE4>": 0, "<0xB8>": 1, "a": 2})
    assert [inner.bytes_of(token) for token in range(3)] == [b"\xe4", b"\xb8", b"a"]


def byte_fallback_tokenizer(vocab: dict[str, int]) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_special_tokens_are_skipped_when_asked(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>b<think>c")
    assert tokenizer.decode(ids) == "ab<think>c"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b<think>c"
    assert len(tokenizer.special_ids) == len(SPECIAL)
    assert tokenizer.decode_one(tokenizer.eos_token_id) == "<|im_end|>"


def test_ids_without_a_token_have_no_text(tokenizer: Tokenizer) -> None:
    """Models pad their vocabulary, so such ids can be drawn."""
    assert tokenizer.decode([97, 5000, 98]) == "ab"
    assert not tokenizer.has_text(5000)
    assert tokenizer.has_text(97)
    end = tokenizer.eos_token_id
    assert not tokenizer.has_text(end)
    assert tokenizer.has_text(end, skip_special_tokens=False)


def test_spaces_are_not_tidied(tmp_path: Path) -> None:
    loaded = load_tokenizer(save(tmp_path, clean_up_tokenization_spaces=True))
    assert loaded.decode(loaded.encode("a , b .")) == "a , b ."


def test_the_file_s_own_splitting_wins(tmp_path: Path) -> None:
    """AutoTokenizer replaces it by that of the class which the folder names: the trap of Qwen3.5."""
    folder = save(tmp_path, OWN_SPLITTING)
    text = "the 12 thing 12345"
    expected = build(OWN_SPLITTING).encode(text).ids
    assert load_tokenizer(folder).encode(text) == expected
    assert AutoTokenizer.from_pretrained(folder).encode(text) != expected


def test_a_chat_is_rendered_with_its_options(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "the 中"}]
    head = "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nthe 中<|im_end|>\n"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == head
    assert tokenizer.render_chat(messages) == head + "<|im_start|>assistant\n"
    ids = tokenizer.apply_chat_template(messages, enable_thinking=False)
    text = head + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids[0] in tokenizer.special_ids
    assert ids.count(tokenizer.eos_token_id) == 2


def test_the_template_may_lie_in_its_own_file(tmp_path: Path) -> None:
    folder = save(tmp_path, chat_template=None)
    assert not load_tokenizer(folder).has_chat_template
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    rendered = load_tokenizer(folder).render_chat([{"role": "user", "content": "x"}])
    assert rendered == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_no_start_token_is_put_before_a_rendered_chat(tmp_path: Path) -> None:
    folder = save(tmp_path)
    values = json.loads((folder / "tokenizer.json").read_text())
    values["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": SPECIAL[0], "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            SPECIAL[0]: {"id": SPECIAL[0], "ids": [build().token_to_id(SPECIAL[0])], "tokens": [SPECIAL[0]]}
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(values))
    loaded = load_tokenizer(folder)
    start = build().token_to_id(SPECIAL[0])
    assert loaded.encode("a") == [start, 97]
    assert start not in loaded.apply_chat_template([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "at least one message"),
        ("hello", "must be a list"),
        ({"role": "user", "content": "x"}, "must be a list"),
        ([{"content": "x"}], r"messages\[0\].*'role'"),
        ([{"role": "user", "content": "x"}, "y"], r"messages\[1\].*'role'"),
    ],
)
def test_bad_messages_are_refused(tokenizer: Tokenizer, messages: object, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        tokenizer.apply_chat_template(messages)


def test_what_the_template_refuses_is_a_bad_request(tmp_path: Path) -> None:
    refusing = "{{ raise_exception('roles must alternate') }}"
    loaded = load_tokenizer(save(tmp_path / "refusing", chat_template=refusing))
    with pytest.raises(RequestError, match="roles must alternate"):
        loaded.apply_chat_template([{"role": "user", "content": "x"}])
    silent = load_tokenizer(save(tmp_path / "silent", chat_template=None))
    with pytest.raises(RequestError, match="no chat template"):
        silent.apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("text", [b"x", None, 3, "a\ud800b"])
def test_what_is_no_text_is_refused(tokenizer: Tokenizer, text: object) -> None:
    with pytest.raises(RequestError, match="must be a string|not valid Unicode at character 1"):
        tokenizer.encode(text)


def test_a_folder_without_tokenizer_serves_token_ids_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None
    with pytest.raises(RequestError, match="A text prompt needs a tokenizer.*serves token ids only"):
        need_tokenizer(None, "A text prompt")


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": {"type": "BPE"}}'])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=f"tokenizer in {tmp_path} cannot be read"):
        load_tokenizer(tmp_path)


def test_a_long_text_does_not_hold_up_other_threads(tokenizer: Tokenizer) -> None:
    text = "the thing and the thing. " * 20_000
    turns = 0
    done = threading.Event()

    def turn() -> None:
        nonlocal turns
        while not done.wait(1e-4):
            turns += 1

    other = threading.Thread(target=turn)
    other.start()
    while not turns:
        time.sleep(1e-3)
    before = turns
    tokenizer.encode(text)
    during = turns - before
    done.set()
    other.join()
    assert during > 10
