"""One completion as it grows: tokens in, text out, until something ends it.

Owns the rules of the end: the model's end tokens, stop tokens, stop strings, min_tokens, the length;
and which text belongs to the completion. Knows parameters and a tokenizer; knows nothing of models,
schedules or how tokens are drawn.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from denim.engine.detokenizer import Detokenizer
from denim.engine.stop import StopStrings
from denim.engine.tokenizer import Tokenizer, need_tokenizer
from denim.sampling_params import SamplingParams


class Piece(NamedTuple):
    """Text that one token settles, and why the completion ends with it (None: it goes on).

    `finish_reason` is "stop" or "length". `stop_reason` is the stop string or the stop token; None for
    the model's own end tokens and for "length", as in vLLM.
    """

    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


_NOTHING = Piece("")


class TextStream:
    """Text and end of one completion.

    The end, in order of precedence: a token that ends it, a stop string, `max_tokens` tokens. Neither
    of the first two counts within the first min_tokens tokens; stop strings are looked for in the text
    after those. A token that ends the text has no text of its own, nor has a stop string, unless
    include_stop_str_in_output. The texts of all pieces joined are the completion's text.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        end_token_ids: Collection[int],
        max_tokens: int,
    ) -> None:
        """`max_tokens`: the most tokens there is room for, at most params.max_tokens.

        Raises RequestError if stop strings are wanted and there is no tokenizer.
        """
        if params.stop:
            need_tokenizer(tokenizer, "A stop string")
        self._params = params
        self._ends = frozenset() if params.ignore_eos else frozenset(end_token_ids)
        self._max_tokens = max_tokens
        self._count = 0
        self._detokenizer: Detokenizer | None = None
        if params.detokenize and tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._ending = self._ends.union(params.stop_token_ids)

    def push(self, token: int) -> Piece:
        """What the next token adds. To be called no more after a piece with a finish_reason."""
        self._count += 1
        last = self._count >= self._max_tokens
        if not (last or self._params.stop or token in self._ending):  # so for nearly every token
            text = self._detokenizer.push(token) if self._detokenizer else ""
            return Piece(text) if text else _NOTHING
        may_stop = self._count > self._params.min_tokens
        ended = may_stop and token in self._ending
        shown = not ended or self._params.include_stop_str_in_output
        text = self._detokenizer.push(token) if self._detokenizer and shown else ""
        last = last or ended
        if last and self._detokenizer:
            text += self._detokenizer.flush()
        if may_stop:
            text, stop = self._stops.push(text)
            if stop is not None and not ended:
                return Piece(text, "stop", stop)
            if last and stop is None:
                text += self._stops.flush()
        if ended:
            return Piece(text, "stop", None if token in self._ends else token)
        return Piece(text, "length" if last else None)

    def flush(self) -> str:
        """The text held back, when something else ends the completion (an abort, an error)."""
        text, _ = self._stops.push(self._detokenizer.flush() if self._detokenizer else "")
        return text + self._stops.flush()  # which is nothing where a stop string was met
