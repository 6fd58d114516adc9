"""One engine and what is asked of it, call by call.

Owns the engine; every answer is returned as the judge reads it. Decides nothing about right and wrong.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch

from denim.cache.positions import Sighting
from denim.cache.prefix_cache import PrefixCache
from denim.commands.verify.judge import Answer
from denim.engine.core import EngineCore
from denim.engine.loading import LoadedModel
from denim.engine.options import EngineOptions
from denim.engine.outputs import CompletionOutput, RequestOutput
from denim.engine.prompts import ReadPrompt
from denim.sampling_params import SamplingParams

TOKENS = 12  # of an answer
SHOWN = 8  # log-probabilities at each of its places
ANSWER = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=SHOWN, ignore_eos=True)
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

Prompt = list[int] | ReadPrompt


class Session:
    """An engine over a loaded model; freed memory is full of NaN and invariants are checked after each step.

    Raises ConfigError or CapacityError where the options cannot be served.
    """

    def __init__(self, loaded: LoadedModel, options: dict[str, Any]) -> None:
        self._loaded = loaded
        self._options = options
        self._open()

    def _open(self) -> None:
        self.core = EngineCore(EngineOptions.of(**self._options, debug=True), self._loaded)
        tiers = self.core.scheduler.prefixes.tiers
        if tiers is not None:  # short prefixes too, which are quicker to compute than to bring up
            tiers.pays = lambda start, end, nbytes, tier: True

    @property
    def cache(self) -> PrefixCache:
        cache = self.core.scheduler.prefixes.cache
        assert cache is not None
        return cache

    def answers(
        self, prompts: Sequence[Prompt], params: SamplingParams = ANSWER, **wishes: Any
    ) -> list[Answer]:
        """To prompts that arrive together; of several completions the first one's."""
        return [_answer(output, output.outputs[0]) for output in self._outputs(prompts, params, **wishes)]

    def answer(self, prompt: Prompt, **wishes: Any) -> Answer:
        return self.answers([prompt], **wishes)[0]

    def completions(self, prompt: Prompt, n: int) -> list[Answer]:
        """All of one request for `n`, which are alike: nothing is drawn at random."""
        params = SamplingParams(n=n, temperature=0, max_tokens=TOKENS, logprobs=SHOWN, ignore_eos=True)
        (output,) = self._outputs([prompt], params)
        return [_answer(output, completion) for completion in output.outputs]

    def start(self, prompt: Prompt, steps: int, priority: int = 0, **wishes: Any) -> RequestOutput:
        """Queue a request, and let the engine take so many steps."""
        output = self.core.requests[self.core.add(prompt, ANSWER, priority=priority, **wishes)].output
        for _ in range(steps):
            self.core.step()
        return output

    def finish(self) -> None:
        while self.core.has_work:
            self.core.step()
        self.core.settle()

    def leave(self, head: list[int]) -> int:
        """Leave a prefix in the cache; returns the deepest position that the policy saves for it."""
        self.answers([head], ONE_TOKEN)
        policy = self.cache.policy
        if policy.generation_end:
            return len(head)  # one token was drawn, and none but the prompt's applied
        wanted = policy.positions(Sighting(len(head)), self.cache.grid)
        return max((position for position, _ in wanted), default=0)

    def push_out(self) -> None:
        """Bring all checkpoints to host memory."""
        self.cache.evict_all()
        self.answers([[1, 2]], ONE_TOKEN)  # they leave at the head of a step

    def push_further(self) -> None:
        """Bring all that is in host memory to files, and out of host memory."""
        tiers = self.core.scheduler.prefixes.tiers
        assert tiers is not None
        tiers.push_down()

    def restart(self) -> None:
        """Another engine on the same files."""
        self.core.close()
        del self.core
        self._open()

    def close(self) -> None:
        """Give the memory back, for the next engine."""
        self.core.check()
        self.core.close()
        del self.core
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _outputs(
        self, prompts: Sequence[Prompt], params: SamplingParams, **wishes: Any
    ) -> list[RequestOutput]:
        outputs = [self.core.requests[self.core.add(p, params, **wishes)].output for p in prompts]
        self.finish()
        return outputs


def answer_of(output: RequestOutput) -> Answer:
    """Of a request that has ended."""
    return _answer(output, output.outputs[0])


def _answer(output: RequestOutput, completion: CompletionOutput) -> Answer:
    logprobs = [
        {token: entry.logprob for token, entry in report.items()} for report in completion.logprobs or []
    ]
    ended = completion.finish_reason == "length"
    return Answer(completion.token_ids, logprobs, output.num_cached_tokens, ended)
