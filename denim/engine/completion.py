"""One completion while it runs: from sampled tokens to text, and where it ends.

Owns the completion's output record; its text and its end are `TextStream`'s. Knows the tokens of one
sequence; nothing of memory, schedules or other requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from denim.engine.outputs import CompletionOutput, RequestOutput, StreamDelta, logprobs_by_token
from denim.engine.text_stream import TextStream
from denim.engine.tokenizer import Tokenizer
from denim.runner.logprobs import TokenLogprobs
from denim.runner.sampler import SamplingState
from denim.sampling_params import SamplingParams


class Completion:
    """Completion `index` of the request whose output is `request`. `max_tokens` is what params and context
    allow."""

    def __init__(
        self,
        request: RequestOutput,
        index: int,
        params: SamplingParams,
        sampling: SamplingState,
        max_tokens: int,
        end_token_ids: Sequence[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request = request
        self.params = params
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.output = CompletionOutput(index)
        if params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
        self._text = TextStream(params, tokenizer, end_token_ids, max_tokens)
        self._decode = tokenizer.decode_one if tokenizer is not None and params.detokenize else None

    def accept(self, token: int, report: TokenLogprobs | None) -> StreamDelta:
        """Take the next token; the delta carries the finish reason when it is the last one. Where this
        raises, the token is no part of the output."""
        output, sampling = self.output, self.sampling
        sampling.append(token)
        text, output.finish_reason, output.stop_reason = self._text.push(token)
        output.token_ids.append(token)
        logprobs = None
        if report is not None and output.logprobs is not None:
            logprobs = [logprobs_by_token(report, self._decode)]
            output.logprobs += logprobs
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + report.logprob

        constraint = sampling.constraint
        if constraint is not None and constraint.exhausted and output.finish_reason in (None, "length"):
            text += self._text.flush()  # its form is whole, and nothing can follow
            output.finish_reason = "stop"
        return self._delta(text, [token], logprobs)

    def end(self, reason: str) -> StreamDelta:
        """End without a further token: by "abort", which gives out text that was held back, or by "error"."""
        self.output.finish_reason = reason
        return self._delta("" if reason == "error" else self._text.flush(), [], None)

    def _delta(self, text: str, tokens: list[int], logprobs: list | None) -> StreamDelta:
        output, request = self.output, self.request
        scores = request.prompt_logprobs  # come with the first token of the first completion
        if scores is not None and not (output.index == 0 and len(output.token_ids) == len(tokens) == 1):
            scores = None
        if text:
            output.pieces.append(text)
        return StreamDelta(
            request.request_id,
            output.index,
            text,
            tokens,
            logprobs,
            output.finish_reason,
            output.stop_reason,
            request.num_cached_tokens,
            scores,
        )
