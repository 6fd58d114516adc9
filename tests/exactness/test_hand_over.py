"""A prompt that one engine has computed is continued by another one, through the files of a prefix cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from denim.engine.cache_wishes import CacheWishes
from denim.engine.core import EngineCore
from denim.memory.layout import SLOT
from denim.sampling_params import SamplingParams
from tests.exactness.conftest import Model
from tests.exactness.harness import tokens_of
from tests.exactness.test_prefixes import CHUNK, PARAMS, ask, judged, leave
from tests.exactness.test_tiers import core_of
from tests.tiny import VOCAB

ONE = SamplingParams(temperature=0, max_tokens=1)


@pytest.mark.parametrize("budget", [CHUNK, 4096])
@pytest.mark.parametrize("length", [1, 2, 5, CHUNK, CHUNK + 1, 2 * CHUNK + 1])
def test_the_last_token_is_applied_once(dense: Model, tmp_path: Path, length: int, budget: int) -> None:
    """OF-06, OF-16: one engine prefills, the other decodes, beside requests that run there already. What is
    left for it to compute is one token, whose shape is that of a decode row."""
    prompt = tokens_of(length, 0, VOCAB)
    first = core_of(dense, disk_cache=str(tmp_path), max_num_batched_tokens=budget)
    ask(first, prompt, ONE, cache=CacheWishes(cache_control=[length - 1] if length > 1 else []))
    first.close()
    second = core_of(dense, disk_cache=str(tmp_path), max_num_batched_tokens=budget)
    others = [second.requests[second.add(tokens_of(70 + i, 9, VOCAB), PARAMS)].output for i in range(3)]
    for _ in range(4):
        second.step()
    output = judged(dense, ask(second, prompt))
    assert output.num_cached_tokens == length - 1
    for other in others:
        judged(dense, other)
    second.close()


@pytest.mark.parametrize(("there", "here"), [("auto", "auto"), ("auto", "none"), ("ends", "auto")])
def test_idle_engines_of_different_sizes_hold_nothing_and_say_so(
    dense: Model, tmp_path: Path, there: str, here: str
) -> None:
    """OF-09: the check of invariants passes on both sides after a hundred requests, whatever their sizes, and
    an entry that nobody holds is reported."""

    def served(policy: str, slabs: int) -> EngineCore:
        files = {} if policy == "none" else {"disk_cache": str(tmp_path)}
        options = {"host_memory": 0} if policy == "none" else {}
        core = core_of(dense, 200, slabs=slabs, checkpoint_policy=policy, **files, **options)
        for number in range(50):
            ask(core, tokens_of(20 + number % 9, number % 12, VOCAB), ONE)
        assert core.stats()["slots"]["used"] == core.stats()["pages"]["used"] == 0
        core.check()
        return core

    first = served(there, slabs=40)
    leave(first, tokens_of(100, 0, VOCAB))
    first.close()
    second = served(here, slabs=90)
    judged(dense, ask(second, tokens_of(100, 0, VOCAB)))
    second.check()
    second.arena.alloc(SLOT)
    with pytest.raises(AssertionError):
        second.check()
