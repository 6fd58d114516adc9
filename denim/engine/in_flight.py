"""The record of one request while it runs.

Owns the output that the caller gets and the completions that fill it, by the scheduler's id. Knows nothing of
memory or schedules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from denim.engine.completion import Completion
from denim.engine.outputs import RequestMetrics, RequestOutput, logprobs_by_token
from denim.engine.prompts import ReadPrompt
from denim.runner.logprobs import TokenLogprobs
from denim.sampling_params import SamplingParams


@dataclass
class InFlight:
    """`metrics` are the output's, which is there from the start."""

    output: RequestOutput
    metrics: RequestMetrics
    completions: dict[int, Completion] = field(default_factory=dict)

    @classmethod
    def of(cls, request_id: str, prompt: ReadPrompt, params: SamplingParams) -> InFlight:
        """A request that arrives now. Its completions are still to be added."""
        metrics = RequestMetrics(time.monotonic())
        output = RequestOutput(request_id, prompt.text, prompt.ids, [], metrics=metrics)
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        return cls(output, metrics)

    def add(self, id_: int, completion: Completion) -> None:
        self.completions[id_] = completion
        self.output.outputs.append(completion.output)

    def note_scheduled(self) -> None:
        if self.metrics.first_scheduled_time is None:
            self.metrics.first_scheduled_time = time.monotonic()

    def note_token(self) -> None:
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = time.monotonic()

    def note_scores(self, reports: Sequence[TokenLogprobs], decode: Callable[[int], str] | None) -> None:
        """Reports on the next tokens of the prompt."""
        assert self.output.prompt_logprobs is not None
        self.output.prompt_logprobs += [logprobs_by_token(report, decode) for report in reports]

    def unfinished(self) -> list[int]:
        return [id_ for id_, one in self.completions.items() if not one.output.finished]

    def close(self) -> bool:
        """Whether all completions have ended; then the output is marked so."""
        if self.unfinished():
            return False
        self.output.finished = True
        self.metrics.finished_time = time.monotonic()
        return True
