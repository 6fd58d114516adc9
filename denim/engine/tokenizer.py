"""Text to tokens and back, as the model's folder says.

Owns how a folder's tokenizer is found and loaded, and rendering of chats; all the work is done by
transformers, which is imported only when there is something to load. Knows nothing of requests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from denim.errors import ConfigError, RequestError

_FILE = "tokenizer.json"
# What transformers can make a tokenizer from where there is no tokenizer.json.
_OTHER_FILES = ("tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")

Message = Mapping[str, Any]
_MARK = "\ufffd"  # what a decoder shows for bytes that are no character


class Tokenizer:
    """A model's tokenizer.

    Decoding never tidies spaces: it is what the tokens say, so that it can be done piece by piece.
    """

    def __init__(self, inner: Any) -> None:
        """`inner`: a transformers tokenizer with a `tokenizers` backend."""
        from tokenizers.decoders import ByteLevel

        self._inner = inner
        self._backend = inner.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        # A byte-level decoder puts the bytes of all tokens together and reads them as UTF-8.
        self.joins_bytes = isinstance(self._backend.decoder, ByteLevel)
        self.whole_texts = WholeTexts(self)

    @property
    def inner(self) -> Any:
        """The transformers tokenizer itself, for libraries that take one."""
        return self._inner

    @property
    def eos_token_id(self) -> int | None:
        return self._inner.eos_token_id

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """Texts of the special tokens."""
        return frozenset(map(self.decode_one, self.special_ids))

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of n characters has at least n / longest_token tokens."""
        return max(map(len, self._backend.get_vocab()), default=1)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._inner.chat_template)

    @property
    def chat_template(self) -> str:
        """The chat template's text; of several the default one; "" where there is none."""
        template = self._inner.chat_template or ""
        return template if isinstance(template, str) else template.get("default", "")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with a start token where the tokenizer asks for one.

        As a batch of one: for that alone the backend lets other threads run, which a text of a megabyte would
        hold up for half a second.
        """
        batch = self._backend.encode_batch_fast([_checked(text)], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def render_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **template_options: Any
    ) -> str:
        """The text of a conversation by the model's chat template.

        `template_options` go to the template (`enable_thinking=False`, `tools=…`). RequestError if there
        is no template, or if it refuses the messages.
        """
        if not self.has_chat_template:
            raise RequestError("This model has no chat template; send a prompt instead of messages.")
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence) or not messages:
            raise RequestError(f"messages={messages!r}: messages must be a list of at least one message.")
        for place, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(
                    f"messages[{place}]={message!r}: a message needs a 'role' and a 'content'."
                )
        try:
            return self._inner.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **template_options,
            )
        except Exception as error:  # a template is the model author's program and may raise anything
            raise RequestError(f"The model's chat template refused the messages: {error}") from error

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **template_options: Any
    ) -> list[int]:
        """Token ids of `render_chat`; the template writes its own special tokens."""
        text = self.render_chat(messages, add_generation_prompt, **template_options)
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`. Bytes that are not UTF-8 become U+FFFD; ids without a token have no text."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def decode_one(self, token_id: int) -> str:
        """Text of one token by itself, special tokens too: how log-probability reports name it."""
        return self.decode([token_id], skip_special_tokens=False)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that one token stands for, also where they are only a part of a character."""
        text = self.decode_one(token_id)
        if _MARK not in text:
            return text.encode()
        name = self._backend.id_to_token(token_id)
        if (fallback := re.fullmatch(r"<0x([0-9A-F]{2})>", name)) is not None:  # SentencePiece
            return bytes.fromhex(fallback[1])
        letters = _byte_letters()
        return bytes(letters[letter] for letter in name) if set(name) <= letters.keys() else text.encode()

    def has_text(self, token_id: int, skip_special_tokens: bool = True) -> bool:
        """Whether a token takes part in decoding: it exists, and is not a special one to be skipped."""
        if skip_special_tokens and token_id in self.special_ids:
            return False
        return self._backend.id_to_token(token_id) is not None


class WholeTexts(dict[int, str | None]):
    """Token -> what it adds to any text that ends with a whole character, worked out when it is first asked
    for, so that most tokens are decoded once and for all. None where that depends on the text: for parts of
    characters, special tokens, and decoders that do more than join bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        text = None
        if self._tokenizer.joins_bytes and self._tokenizer.has_text(token_id):
            text = self._tokenizer.decode_one(token_id)
        self[token_id] = text = None if text is None or _MARK in text else text
        return text


@cache
def _byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for (Radford et al. 2019): printable ones
    are their own letters, the others have letters from 256 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + at): byte for at, byte in enumerate(hidden)}


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer of a model folder, from its files alone; None where there is none.

    tokenizer.json is taken as it stands. AutoTokenizer would rebuild it by `tokenizer_class`, and for
    Qwen3.5, whose folder says Qwen2Tokenizer, put Qwen2's splitting of words in place of the file's.
    Raises ConfigError if the files cannot be read.
    """
    folder = Path(folder)
    has_file = (folder / _FILE).is_file()
    if not has_file and not any((folder / name).is_file() for name in _OTHER_FILES):
        return None
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loader = PreTrainedTokenizerFast if has_file else AutoTokenizer
    try:
        return Tokenizer(loader.from_pretrained(str(folder), local_files_only=True))
    except Exception as error:  # tokenizers raises bare Exception on a broken file
        raise ConfigError(
            f"The tokenizer in {folder} cannot be read: {error}. Fetch its files again, or remove them to "
            "serve token ids only."
        ) from error


def need_tokenizer(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    """The tokenizer, or RequestError if there is none; `what` names what was asked for ("a text prompt")."""
    if tokenizer is None:
        raise RequestError(
            f"{what} needs a tokenizer, and the model folder has none. It serves token ids only: send "
            f"prompts as lists of token ids, or add {_FILE} to the folder."
        )
    return tokenizer


def _checked(text: str) -> str:
    if not isinstance(text, str):
        raise RequestError(f"A prompt must be a string or a list of token ids, not {type(text).__name__}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The text is not valid Unicode at character {error.start}: {error.reason}."
        ) from error
    return text
