"""Which tokens may come next in one completion that must have a form.

Owns how far the text has come in its grammar, and the mask that follows from it. Knows token ids and a
compiled grammar; knows nothing of requests, schedules or devices. xgrammar does the matching.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from denim.errors import RequestError

_BITS = 32  # of a word of a mask


class Constraint:
    """`mask` int32 [ceil(vocab / 32)]: bit t % 32 of word t // 32 is set if token t may be drawn next.

    The text may end where the grammar can: there, the completion's own ending tokens are allowed.
    `exhausted`: no other token can follow, so that nothing is left to draw.
    """

    def __init__(
        self, compiled: Any, vocab_size: int, model_ends: Sequence[int], ending_ids: Sequence[int]
    ) -> None:
        """`compiled`: an xgrammar.CompiledGrammar, for whose vocabulary `model_ends` are the ends.
        `ending_ids`: tokens that end this completion. Raises RequestError if no text has this form."""
        from xgrammar import GrammarMatcher

        self._matcher = GrammarMatcher(compiled)
        self._model_ends = _places(model_ends)
        self._endings = _places(ending_ids)
        self._ending_ids = frozenset(ending_ids)
        self.mask = torch.zeros(1, -(-vocab_size // _BITS), dtype=torch.int32)
        self._words = self.mask[0].numpy()
        used = vocab_size % _BITS  # bits of the last word; xgrammar sets those behind them
        self._last = np.int32((1 << used) - 1 if used else -1)
        self.exhausted = False
        try:
            self._fill()
        except DeadEndError:
            raise RequestError("the structured output allows no text at all") from None
        if self.exhausted:
            raise RequestError("the structured output allows no text but the empty one")

    def allowed(self) -> np.ndarray:
        """Tokens that may be drawn next, int64, in order."""
        return np.flatnonzero(np.unpackbits(self._words.view(np.uint8), bitorder="little"))

    def accept(self, token: int) -> None:
        """The next token is `token`. Raises DeadEndError if none can follow though the text is not whole."""
        if self.may_end and token in self._ending_ids:
            return  # it ends the completion and is no part of its text
        if not self._matcher.accept_token(token):
            raise DeadEndError(f"token {token} has no place in the structured output")
        self._fill()

    @property
    def may_end(self) -> bool:
        """Whether the text has its form already."""
        return self._matcher.is_completed()

    def _fill(self) -> None:
        self._matcher.fill_next_token_bitmask(self.mask)
        self._words[-1] &= self._last
        for word, bit in self._model_ends:
            self._words[word] &= ~bit
        self.exhausted = not self._words.any()
        if not self.may_end:
            if self.exhausted:
                raise DeadEndError("no token of the vocabulary continues the structured output")
            return
        for word, bit in self._endings:
            self._words[word] |= bit


class DeadEndError(Exception):
    """The text cannot go on in its form. A grammar may lead there; only its text can tell."""


def _places(tokens: Sequence[int]) -> list[tuple[int, np.int32]]:
    """(word, bit) of each token."""
    bits = (np.uint32(1) << np.arange(_BITS, dtype=np.uint32)).view(np.int32)
    return [(token // _BITS, bits[token % _BITS]) for token in tokens]
