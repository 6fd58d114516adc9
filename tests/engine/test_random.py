"""The whole engine under random use: adds, aborts, steps, leaving streams, on little memory.

After every step all invariants are checked and every token is judged when its request ends, so one state
machine covers what the matrix covers by design.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from denim import RequestError, SamplingParams
from denim.engine.core import EngineCore
from denim.engine.loading import load
from denim.engine.options import EngineOptions
from denim.engine.outputs import RequestOutput
from denim.memory.layout import ArenaLayout
from tests.exactness.harness import tokens_of
from tests.exactness.judge import Judge
from tests.tiny import VOCAB

PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0, 0, 1.0]),
        "max_tokens": st.integers(1, 40),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "seed": st.integers(0, 10),
        "logprobs": st.sampled_from([None, 0, 2]),
        "prompt_logprobs": st.sampled_from([None, None, 1]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "stop_token_ids": st.sampled_from([(), (1, 2, 3, 50, 51, 52, 53, 54)]),
    }
)


def machine_of(folder: Path, judge: Judge) -> type[RuleBasedStateMachine]:
    class Engine(RuleBasedStateMachine):
        core: EngineCore | None = None

        @rule(
            slabs=st.integers(2, 4),
            seqs=st.integers(1, 6),
            budget=st.integers(1, 70),
            page_size=st.sampled_from([1, 4, 16]),
            chunk_size=st.sampled_from([1, 16]),
            swap=st.sampled_from([0, 60_000, 10**8]),
            moves=st.booleans(),
            host=st.sampled_from([0, 200_000, 10**7]),
        )
        @precondition(lambda self: self.core is None)
        def start(
            self,
            slabs: int,
            seqs: int,
            budget: int,
            page_size: int,
            chunk_size: int,
            swap: int,
            moves: bool,
            host: int,
        ) -> None:
            options = {
                "model": folder,
                "page_size": page_size,
                "chunk_size": chunk_size,
                "max_num_seqs": seqs,
                "max_num_batched_tokens": budget,
                "swap_space": swap,
                "host_memory": host,
                "debug": True,
            }
            loaded = load(EngineOptions.of(**options))
            slab = ArenaLayout.of(loaded.spec, page_size).slab_bytes
            self.core = EngineCore(
                EngineOptions.of(**options, memory=slabs * slab, max_model_len=150), loaded
            )
            if moves:
                self.core.scheduler._recompute_cheaper = lambda tokens: False
            if host:
                self.core.scheduler.prefixes.tiers.pays = lambda start, end, nbytes, tier: True
            self.open: dict[str, tuple[RequestOutput, SamplingParams]] = {}

        @precondition(lambda self: self.core is not None)
        @rule(
            length=st.one_of(st.integers(1, 6), st.integers(7, 120)),
            seed=st.integers(0, 3),
            priority=st.sampled_from([0, 0, 0, 1, -1]),
            params=PARAMS,
        )
        def add(self, length: int, seed: int, priority: int, params: dict) -> None:
            asked = SamplingParams(**params)
            length = min(length, self.core.scheduler.config.max_model_len - 1)
            id_ = self.core.add(tokens_of(length, seed, VOCAB), asked, priority=priority)
            self.open[id_] = self.core.requests[id_].output, asked

        @precondition(lambda self: self.core is not None)
        @rule(bad=st.sampled_from([[], [VOCAB], [-1], [0] * 150, ["x"], "text", None]))
        def refuse(self, bad: object) -> None:
            before = self.core.stats()
            with pytest.raises(RequestError):
                self.core.add(bad)
            assert self.core.stats() == before

        @precondition(lambda self: self.core is not None and self.open)
        @rule(choice=st.randoms(use_true_random=False))
        def abort(self, choice: random.Random) -> None:
            self.core.abort(choice.choice(sorted(self.open)))
            self.judge_ended()

        @precondition(lambda self: self.core is not None)
        @rule(count=st.integers(1, 25))
        def steps(self, count: int) -> None:
            for _ in range(count):
                self.core.step()
            self.judge_ended()

        @invariant()
        def sound(self) -> None:
            if self.core is not None:
                self.core.check()
                assert set(self.open) == set(self.core.requests)

        def judge_ended(self) -> None:
            for id_ in [id_ for id_ in self.open if id_ not in self.core.requests]:
                output, asked = self.open.pop(id_)
                assert output.finished
                aborted = any(c.finish_reason == "abort" for c in output.outputs)
                for completion in output.outputs:
                    assert completion.finish_reason in ("stop", "length", "abort")
                    if asked.temperature == 0:
                        judge.greedy(output.prompt_token_ids, completion.token_ids)
                    if asked.logprobs is not None:
                        judge.logprobs(output.prompt_token_ids, completion.token_ids, completion.logprobs)
                if asked.prompt_logprobs is not None and not aborted:
                    judge.prompt_logprobs(output.prompt_token_ids, output.prompt_logprobs)

        def teardown(self) -> None:
            if self.core is None:
                return
            for _ in range(20_000):
                if not self.core.has_work:
                    break
                self.core.step()
            self.judge_ended()
            assert not self.open, "no progress"
            stats = self.core.stats()
            assert [stats[kind]["used"] for kind in ("slabs", "pages", "slots")] == [0, 0, 0]
            assert [stats[name] for name in ("running", "waiting", "swapped")] == [0, 0, 0]
            assert self.core.swap.used_bytes == 0
            self.core.check()

    return Engine


QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def explore(mute: tuple[Path, Judge], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine_of(*mute),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=QUIET,
        ),
    )


def test_random_use(mute: tuple[Path, Judge]) -> None:
    explore(mute, examples=12, steps=40)


@pytest.mark.slow
def test_random_use_at_length(mute: tuple[Path, Judge]) -> None:
    explore(mute, examples=200, steps=80)
