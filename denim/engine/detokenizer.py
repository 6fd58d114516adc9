"""From tokens to text, one token at a time, without ever showing half a character.

Owns the tail of tokens whose text is not settled; knows a tokenizer and nothing of stops or requests.
It is given the generated tokens only, never the prompt: a prompt that ends inside a character
has nothing to leak.

The joined pieces are exactly `decode(all tokens)`, for any tokens, with decoders that join bytes and
then read them as UTF-8 (byte-level BPE: Qwen, GPT, Llama 3). With SentencePiece's byte fallback they are
so if the bytes are valid: one bad byte turns the good ones before it into marks too, which may be shown.
"""

from __future__ import annotations

from denim.engine.tokenizer import Tokenizer

_MARK = "\ufffd"
# An unfinished character has at most 3 bytes, and a decoder shows at most one mark (U+FFFD) for each.
_MOST_OPEN = 3
# Tail of tokens without any boundary between characters after which a cut inside it is looked for.
_LONG_TAIL = 16


class Detokenizer:
    """Text of one growing sequence of tokens. Costs a look into a table for a token that is whole characters,
    else two short decodes, however long the text."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._whole_texts = tokenizer.whole_texts
        self._skip_special = skip_special_tokens
        self._tail: list[int] = []  # the last settled tokens, then the ones after them
        self._settled = 0  # how many tokens of the tail are settled
        self._given = 0  # how many characters of the tail's text were given

    def push(self, token: int) -> str:
        """The text that is settled by `token`; "" if none is."""
        if len(self._tail) == self._settled:  # no character is open
            whole = self._whole_texts[token]
            if whole is not None:  # then what comes next needs no context either
                if self._settled:
                    self._tail, self._settled, self._given = [], 0, 0
                return whole
        if not self._tokenizer.has_text(token, self._skip_special):
            return ""
        self._tail.append(token)
        text = self._decode(self._tail)
        # Byte fallback turns the settled bytes beside an unfinished character into marks with it.
        open_marks = min(len(text) - len(text.rstrip(_MARK)), _MOST_OPEN + self._settled)
        end = len(text) - open_marks
        piece = text[self._given : end]
        self._given = max(self._given, end)
        if not open_marks:
            self._tail = self._tail[self._settled :]
            self._settled = len(self._tail)
            self._given = len(self._decode(self._tail))
        elif len(self._tail) >= _LONG_TAIL:
            self._cut(text)
        return piece

    def flush(self) -> str:
        """The rest of the text, with U+FFFD for a character that never became whole."""
        text = self._decode(self._tail)
        piece = text[self._given :]
        self._given = len(text)
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special)

    def _cut(self, text: str) -> None:
        """Drops given tokens where both sides decode to the same apart as together.

        Then no character spans the cut, and as each token right of it has bytes of its own, nothing that
        comes later can join the sides. One of four neighbouring places is such a cut if bytes are tokens.
        """
        for place in range(len(self._tail) // 2, len(self._tail)):
            left = self._decode(self._tail[:place])
            if len(left) <= self._given and left + self._decode(self._tail[place:]) == text:
                self._tail = self._tail[place:]
                self._settled = 0
                self._given -= len(left)
                return
