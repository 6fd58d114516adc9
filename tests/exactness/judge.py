"""When results are the same: the rules of design section 9, and transformers as the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from denim.engine.outputs import CompletionOutput, Logprob
from tests.exactness.harness import Case, Run

FP32_TIE = 1e-4  # of the spread of the logits; design, section 9
BF16_TIE = 0.05  # nats; cases.md, measure TOK
TIES_PER_TOKEN = 1e-4  # at most 1 in 10,000; design, section 9
FP32_LOGPROB = 1e-4  # nats; stricter than measure LP (1e-3) of cases.md


class Judge:
    """Whether outputs are right, by the rules of design section 9; counts tokens and ties.

    `tie` is the gap between the reference's two best tokens within which either may be drawn: in standard
    deviations of the logits with `relative`, in nats without.
    """

    def __init__(
        self,
        reference: nn.Module,
        tie: float = FP32_TIE,
        relative: bool = True,
        tolerance: float = FP32_LOGPROB,
    ) -> None:
        self.reference = reference
        self.tie = tie
        self.relative = relative
        self.tolerance = tolerance
        self.tokens = 0
        self.ties = 0
        self._logits: dict[tuple[int, ...], Tensor] = {}

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """The reference's logits [T, vocab], from one full forward."""
        key = tuple(tokens)
        if key not in self._logits:
            with torch.no_grad():
                self._logits[key] = self.reference(torch.tensor([key]), use_cache=False).logits[0].float()
        return self._logits[key]

    def greedy(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Every token is the likeliest one after what stands before it, or tied with it."""
        logits = self.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
        assert logits.isfinite().all()
        best = logits.topk(2)
        self.tokens += len(tokens)
        for place in (best.indices[:, 0] != torch.tensor(tokens)).nonzero().flatten().tolist():
            first, second = best.values[place].tolist()
            spread = logits[place].std().item() if self.relative else 1.0
            near = first - second <= self.tie * spread and best.indices[place, 1] == tokens[place]
            assert near, (
                f"token {place} is {tokens[place]}, the reference has {best.indices[place, 0]} "
                f"(logits {logits[place, tokens[place]]:.6f} and {first:.6f})"
            )
            self.ties += 1

    def logprobs(
        self, prompt: Sequence[int], tokens: Sequence[int], given: Sequence[Mapping[int, Logprob]]
    ) -> None:
        """Reported log-probabilities are the reference's, and there is one report a token."""
        logprobs = self.logits([*prompt, *tokens])[len(prompt) - 1 : -1].log_softmax(-1)
        assert len(given) == len(tokens)
        self._reports(tokens, given, logprobs)

    def prompt_logprobs(self, prompt: Sequence[int], given: Sequence[Mapping[int, Logprob] | None]) -> None:
        """One report for each token of the prompt but the first, and each is the reference's."""
        assert len(given) == len(prompt)
        assert given[0] is None
        reports = [report for report in given[1:] if report is not None]
        assert len(reports) == len(prompt) - 1, "a position has no report"
        self._reports(prompt[1:], reports, self.logits(prompt)[:-1].log_softmax(-1))

    def _reports(
        self, tokens: Sequence[int], given: Sequence[Mapping[int, Logprob]], expected: Tensor
    ) -> None:
        for place, (token, report) in enumerate(zip(tokens, given, strict=True)):
            assert next(iter(report)) == token
            for other, entry in report.items():
                difference = abs(entry.logprob - expected[place, other].item())
                assert difference <= self.tolerance, f"token {place}: {entry} is {difference} off for {other}"

    def check_ties(self) -> None:
        assert self.ties <= TIES_PER_TOKEN * self.tokens, f"{self.ties} ties in {self.tokens} tokens"


def judge_run(
    judge: Judge, cases: Sequence[Case], outcome: Run, cold: Mapping[tuple[int, int], list[int]] | None = None
) -> None:
    """Every completion of `outcome` is right. `cold` has the tokens of each random (case, fork)."""
    for place, (case, output) in enumerate(zip(cases, outcome.outputs, strict=True)):
        assert output.finished
        for fork, completion in enumerate(output.outputs):
            assert completion.finish_reason == "length", (place, fork, completion)
            if case.params.temperature == 0:
                judge.greedy(case.prompt, completion.token_ids)
            else:
                assert cold is not None and completion.token_ids == cold[place, fork], (place, fork)
            if case.params.logprobs is not None:
                judge.logprobs(case.prompt, completion.token_ids, completion.logprobs)
        if case.params.prompt_logprobs is not None:
            judge.prompt_logprobs(case.prompt, output.prompt_logprobs)


def agree_up_to_a_tie(cold: CompletionOutput, tokens: Sequence[int], tie: float = BF16_TIE) -> None:
    """The rule for bf16, where no other implementation is a reference: at the first difference the cold run's
    two best tokens lie within `tie` nats. `cold` was run with logprobs=2."""
    assert len(tokens) == len(cold.token_ids)
    for place, (ours, theirs) in enumerate(zip(tokens, cold.token_ids, strict=True)):
        if ours != theirs:
            best, second = sorted((entry.logprob for entry in cold.logprobs[place].values()), reverse=True)[
                :2
            ]
            assert best - second < tie, f"token {place} differs, and the gap is {best - second} nats"
            return
