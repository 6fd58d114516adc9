"""A small byte-level BPE tokenizer in the form of published ones, made here.

Every byte is a token; a few merges make tokens of whole words, of half characters, and of the end of one
character with the beginning of the next, all of which real vocabularies have.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Splits off each digit's group and each letter, unlike Qwen2's, which is what AutoTokenizer would put here.
OWN_SPLITTING = r"\p{N}{1,3}|\p{L}|[^\p{L}\p{N}]+"
QWEN2_SPLITTING = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
MERGED = (
    b"th",
    b"the",
    b" the",
    b"ing",
    b" \xe4",
    "中".encode()[:2],
    "文中".encode()[2:5],
    b"\x80\xf0\x9f",
    b"12",
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level BPE (Radford et al. 2019)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def build(splitting: str = QWEN2_SPLITTING) -> Tokenizer:
    letters = byte_letters()
    vocab = {letter: byte for byte, letter in enumerate(letters)}
    merges = []
    for word in MERGED:
        left = letters[word[0]]
        for byte in word[1:]:
            if left + letters[byte] not in vocab:
                merges.append((left, letters[byte]))
                vocab[left + letters[byte]] = len(vocab)
            left += letters[byte]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(splitting), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return tokenizer


def token_of(word: bytes) -> int:
    """The token that is just these bytes."""
    letters = byte_letters()
    token = build().token_to_id("".join(letters[byte] for byte in word))
    assert token is not None, f"no token is {word!r}"
    return token


def save(folder: Path, splitting: str = QWEN2_SPLITTING, **config: object) -> Path:
    """Writes a tokenizer as Qwen3.5 folders have it, with a class that does not fit the file."""
    folder.mkdir(parents=True, exist_ok=True)
    build(splitting).save(str(folder / "tokenizer.json"))
    values = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder
