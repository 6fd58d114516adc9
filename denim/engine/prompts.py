"""A prompt on its way in: from text, token ids or messages to checked token ids.

Owns what a prompt may be. Knows the tokenizer, the vocabulary and the context; nothing of requests. Needs no
engine: a server reads prompts in a process of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from denim.cache.boundaries import ChatText, chat_boundaries, marked_positions
from denim.cache.node import Tokens, as_tokens
from denim.engine.changing_lines import ChangingLines
from denim.engine.facts import EngineFacts
from denim.engine.tokenizer import Message, Tokenizer, need_tokenizer
from denim.errors import RequestError

Prompt = str | Sequence[int]

LARGEST = 2**31 - 1  # id that is packed


class PromptTooLongError(RequestError):
    """The prompt leaves no room for one token of output."""


class ReadPrompt(NamedTuple):
    """A prompt that was checked. `text` is None where it came as token ids. `ids`: its tokens in the form of
    the scheduler and the cache. `boundaries`: positions that the chat template names for the prefix cache;
    `marks`: those that messages ask for themselves."""

    text: str | None
    ids: Tokens
    boundaries: Sequence[int] = ()
    marks: Sequence[int] = ()

    @property
    def tokens(self) -> list[int]:
        """A copy of the ids."""
        return self.ids.tolist()


class PromptReader:
    """Reads prompts for one engine. Safe to call from several threads."""

    def __init__(self, tokenizer: Tokenizer | None, facts: EngineFacts) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = facts.vocab_size
        self._longest = facts.max_model_len
        self._chat_positions = facts.checkpoint_policy == "auto"  # no other one looks at them
        self._changing = ChangingLines(facts.strip_lines)

    def read(self, prompt: Prompt) -> ReadPrompt:
        """Raises RequestError for what is no prompt, is empty, or leaves no room for one token of output."""
        if isinstance(prompt, str):
            tokenizer = need_tokenizer(self._tokenizer, "A text prompt")
            self._refuse_hopeless(prompt, tokenizer)
            read = ReadPrompt(prompt, as_tokens(tokenizer.encode(prompt)))
        else:
            read = ReadPrompt(None, self._checked_ids(prompt))
        if not read.ids:
            raise RequestError("the prompt is empty; give at least one token")
        return self.fitting(read)

    def fitting(self, read: ReadPrompt) -> ReadPrompt:
        """`read` itself. Raises RequestError where it leaves no room for one token of output: it may have
        been read before the engine slept and woke with less memory."""
        if len(read.ids) >= self._longest:
            raise self._too_long(f"{len(read.ids):,} tokens")
        return read

    def read_chat(self, messages: Sequence[Message], **template_options: Any) -> ReadPrompt:
        """The prompt of a conversation, with the positions that its next turn will share. `template_options`
        go to the chat template. Raises RequestError."""
        tokenizer = need_tokenizer(self._tokenizer, "A chat")
        messages = self._changing.without(messages)
        text = tokenizer.render_chat(messages, **template_options)
        self._refuse_hopeless(text, tokenizer)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        read = self.read(tokens)._replace(text=text)
        if not self._chat_positions:
            return read
        specials = tokenizer.special_ids.intersection(tokens)
        chat = ChatText(
            text,
            tokens,
            render=lambda later: tokenizer.render_chat(later, False, **template_options),
            encode=lambda part: tokenizer.encode(part, add_special_tokens=False),
            specials=[tokenizer.decode_one(token) for token in specials],
            has_tools=bool(template_options.get("tools")),
        )
        return read._replace(
            boundaries=chat_boundaries(chat, messages), marks=marked_positions(chat, messages)
        )

    def _refuse_hopeless(self, text: str, tokenizer: Tokenizer) -> None:
        """Refuse a text that no tokenisation makes short enough, before time is spent on it."""
        least = len(text) // tokenizer.longest_token
        if least >= self._longest:
            raise self._too_long(f"{len(text):,} characters, which are at least {least:,} tokens")

    def _too_long(self, what: str) -> PromptTooLongError:
        return PromptTooLongError(
            f"the prompt has {what}; with one token of output max_model_len={self._longest} allows"
            f" {self._longest - 1} tokens; shorten it or raise max_model_len"
        )

    def _checked_ids(self, prompt: Sequence[int]) -> Tokens:
        tokens = prompt if isinstance(prompt, list) else _listed(prompt)
        if tokens is None or (ids := _packed(tokens)) is None:
            raise RequestError(f"a prompt is a string or a list of token ids, not {short(prompt)}")
        # Read as unsigned, a negative id is larger than every vocabulary.
        if ids and np.frombuffer(ids, dtype=np.uint32).max() >= self._vocab_size:
            place = next(i for i, token in enumerate(ids) if not 0 <= token < self._vocab_size)
            raise RequestError(
                f"token id {int(tokens[place])} at position {place} is outside the vocabulary of"
                f" {self._vocab_size} tokens; ids are below that, from 0 on"
            )
        return ids


def _listed(prompt: Any) -> list[Any] | None:
    if isinstance(prompt, bytes | bytearray | memoryview | Mapping | Set):
        return None
    try:
        return list(prompt)
    except TypeError:
        return None


def _packed(tokens: list[Any]) -> Tokens | None:
    """Token ids packed, those that are too large for it as -1; None if there is something else among them."""
    ids = Tokens("i")
    try:
        ids.fromlist(tokens)  # one pass: a look at each of 32k ids in Python would take 10 ms
        # True and False are packed as 1 and 0.
        if not ids or np.frombuffer(ids, dtype=np.uint32).min() > 1 or set(map(type, tokens)) <= {int}:
            return ids
    except (TypeError, OverflowError):
        pass
    try:
        whole = [int(token) for token in tokens]
        kinds = {getattr(token, "dtype", type(token)) for token in tokens}
        exact = not any(map(_is_bool, kinds)) and all(a == b for a, b in zip(whole, tokens, strict=True))
    except (TypeError, ValueError, OverflowError):
        return None
    return Tokens("i", [token if 0 <= token <= LARGEST else -1 for token in whole]) if exact else None


def _is_bool(kind: object) -> bool:
    """Of a type, or of the dtype of an array's or a tensor's element."""
    return kind is bool or str(kind).endswith("bool")


def short(value: object) -> str:
    """What was given, for an error."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
