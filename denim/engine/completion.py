"""One completion while it runs: from sampled tokens to text, and where it ends.

Owns the completion's output record, its detokeniser and its stop rules. Knows the tokens of one sequence;
nothing of memory, schedules or other requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from denim.engine.detokenizer import Detokenizer
from denim.engine.outputs import CompletionOutput, StreamDelta, logprobs_by_token
from denim.engine.stop import StopStrings
from denim.engine.tokenizer import Tokenizer
from denim.runner.logprobs import TokenLogprobs
from denim.runner.sampler import SamplingState
from denim.sampling_params import SamplingParams


class Completion:
    """Completion `index` of request `request_id`. `max_tokens` is what params and context allow."""

    def __init__(
        self,
        request_id: str,
        index: int,
        params: SamplingParams,
        sampling: SamplingState,
        max_tokens: int,
        end_token_ids: Sequence[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.output = CompletionOutput(index)
        if params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
        self._ends = frozenset(() if params.ignore_eos else end_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._tokenizer = tokenizer if params.detokenize else None
        self._stops = StopStrings(tuple(params.stop or ()), params.include_stop_str_in_output)
        if self._tokenizer is not None:
            skip = params.skip_special_tokens
            self._detokenizer = Detokenizer(partial(self._tokenizer.decode, skip_special_tokens=skip))

    def accept(self, token: int, report: TokenLogprobs | None) -> StreamDelta:
        """Take the next token; the delta carries the finish reason when it is the last one."""
        output = self.output
        output.token_ids.append(token)
        self.sampling.append(token)
        logprobs = None
        if report is not None and output.logprobs is not None:
            decode = None if self._tokenizer is None else self._tokenizer.decode_one
            logprobs = [logprobs_by_token(report, decode)]
            output.logprobs += logprobs
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + report.logprob

        drawn = len(output.token_ids)
        if drawn >= self.params.min_tokens and (token in self._ends or token in self._stop_ids):
            output.finish_reason = "stop"
            output.stop_reason = token if token in self._stop_ids else None
            text = self._push(token) if self.params.include_stop_str_in_output else ""
        else:
            text = self._push(token)
            if output.finish_reason is None and drawn >= self.max_tokens:
                output.finish_reason = "length"
        return self._delta(text, [token], logprobs)

    def end(self, reason: str) -> StreamDelta:
        """End without a further token ("abort", "error"); text that was held back is given out."""
        self.output.finish_reason = reason
        return self._delta("", [], None)

    def _push(self, token: int) -> str:
        """The text that may be shown after `token`. A stop string ends the completion.

        Text before `min_tokens` is given out as it comes, so that no stop can be found in it.
        """
        if self._tokenizer is None:
            return ""
        piece = self._detokenizer.push(token)
        if len(self.output.token_ids) < self.params.min_tokens:
            return piece
        return self._check(piece)

    def _check(self, piece: str) -> str:
        checked = self._stops.push(piece)
        if checked.stop is not None:
            self.output.finish_reason = "stop"
            self.output.stop_reason = checked.stop
        return checked.text

    def _delta(self, text: str, tokens: list[int], logprobs: list | None) -> StreamDelta:
        output = self.output
        if output.finished and self._tokenizer is not None and not isinstance(output.stop_reason, str):
            text += self._check(self._detokenizer.flush())
            if not isinstance(output.stop_reason, str):
                text += self._stops.flush()
        output.text += text
        return StreamDelta(
            self.request_id,
            output.index,
            text,
            tokens,
            logprobs,
            output.finish_reason,
            output.stop_reason,
        )
