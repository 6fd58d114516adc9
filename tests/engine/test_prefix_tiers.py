"""Host memory and files below the prefix cache, as users see them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from denim import LLM, AsyncEngine, CapacityError, ConfigError, SamplingParams
from denim.engine import prefix_tiers
from tests.exactness.harness import tokens_of
from tests.exactness.judge import Judge
from tests.tiny import VOCAB

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(autouse=True)
def everything_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is so small that computing is always quicker."""
    monkeypatch.setattr(prefix_tiers, "reload_rule", lambda *_: lambda start, end, nbytes, tier: True)


def make(mute: tuple[Path, Judge], **options: Any) -> LLM:
    small = {
        "memory": "300KiB",
        "max_model_len": 200,
        "max_num_seqs": 4,
        "host_memory": "8MiB",
        "debug": True,
    }
    return LLM(mute[0], **(small | options))


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("files", [False, True])
def test_many_sessions_on_little_memory(
    mute: tuple[Path, Judge], tmp_path: Path, async_scheduling: bool, files: bool
) -> None:
    """ME-07: far more conversations than the arena holds; every turn hits all that was applied before."""
    judge = mute[1]
    where = {"disk_cache": tmp_path, "host_memory": "400KiB"} if files else {}
    with make(mute, async_scheduling=async_scheduling, **where) as llm:
        histories = [tokens_of(70, seed, VOCAB) for seed in range(12)]
        for turn in range(3):
            for place, prompt in enumerate(histories):
                (output,) = llm.generate([prompt], GREEDY)
                judge.greedy(prompt, output.outputs[0].token_ids)
                applied = len(prompt) - 10 if turn else 0  # all but the last token drawn, and the 9 new ones
                assert output.num_cached_tokens == applied
                histories[place] = [*prompt, *output.outputs[0].token_ids, *tokens_of(9, turn, VOCAB)]
                if files:
                    llm.core.scheduler.prefixes.write_out()
        tiers = llm.stats()["tiers"]
        assert tiers["host"]["loaded"] > 15
        assert not files or tiers["disk"]["loaded"] > 5
        assert tiers["host"]["used_bytes"] <= tiers["host"]["total_bytes"]
        llm.check()


def test_the_start_up_line_says_what_they_hold(
    mute: tuple[Path, Judge], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "denim")
    with make(mute, disk_cache=tmp_path, disk_space="1GiB", checkpoint_dtype="int8") as llm:
        llm.generate([tokens_of(90, 0, VOCAB)], GREEDY)
    with make(mute, disk_cache=tmp_path, disk_space="1GiB", checkpoint_dtype="int8"):
        line = next(record.getMessage() for record in caplog.records[::-1] if "arena" in record.getMessage())
    assert "8 MiB of host memory hold" in line and "more of 200 tokens, states in int8" in line
    assert "1 GiB of files" in line and "2 checkpoints in" in line


def test_the_files_of_an_engine_that_runs_are_its_own(mute: tuple[Path, Judge], tmp_path: Path) -> None:
    with make(mute, disk_cache=tmp_path), pytest.raises(ConfigError, match="is in use by another engine"):
        make(mute, disk_cache=tmp_path)
    make(mute, disk_cache=tmp_path).close()


def test_a_start_that_fails_leaves_the_files_to_the_next_one(
    mute: tuple[Path, Judge], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though somebody still looks at the error, which knows all that was begun."""

    def none_left(*_: Any) -> None:
        raise CapacityError("no host memory is left")

    with monkeypatch.context() as patch:
        patch.setattr(prefix_tiers, "HostMemory", none_left)
        with pytest.raises(CapacityError, match="is left") as caught:
            make(mute, disk_cache=tmp_path)
    make(mute, disk_cache=tmp_path).close()
    assert caught.tb


def test_memory_that_never_holds_a_checkpoint_is_refused(mute: tuple[Path, Judge], tmp_path: Path) -> None:
    """Rather than a tier that is there and never hits."""
    with pytest.raises(CapacityError, match="host_memory=1 KiB holds no checkpoint.*smallest of which takes"):
        make(mute, host_memory="1KiB")
    with pytest.raises(CapacityError, match="disk_space=1 KiB holds no checkpoint"):
        make(mute, disk_cache=tmp_path, disk_space="1KiB")


def test_an_idle_engine_goes_on_writing(mute: tuple[Path, Judge], tmp_path: Path) -> None:
    """All that went to host memory is in files soon after the last request, without another one."""

    async def scene() -> dict[str, dict[str, int]]:
        options: dict[str, Any] = {"memory": "300KiB", "max_model_len": 200, "max_num_seqs": 4}
        async with AsyncEngine(mute[0], disk_cache=tmp_path, host_memory="8MiB", **options) as engine:
            for seed in range(8):
                async for _ in engine.generate(tokens_of(90, seed, VOCAB), GREEDY):
                    pass
            while True:
                tiers = (await engine.stats())["tiers"]
                if tiers["disk"]["checkpoints"] == tiers["host"]["checkpoints"]:
                    return tiers
                await asyncio.sleep(0.01)

    tiers = asyncio.run(asyncio.wait_for(scene(), 60))
    assert tiers["host"]["checkpoints"] > 5


@pytest.mark.parametrize("files", [True, False])
def test_pushed_down_to_the_lowest_tier(mute: tuple[Path, Judge], tmp_path: Path, files: bool) -> None:
    """Which is host memory itself where there are no files."""
    prompt = tokens_of(90, 0, VOCAB)
    with make(mute, **({"disk_cache": tmp_path} if files else {})) as llm:
        llm.generate([prompt], GREEDY)
        cache, tiers = llm.core.scheduler.prefixes.cache, llm.core.scheduler.prefixes.tiers
        cache.evict_all()
        llm.generate([[1, 2]], GREEDY, no_store=True)  # they leave at the head of a step
        before = tiers.stats()
        tiers.push_down()
        after = tiers.stats()
        assert before["host"]["checkpoints"] > 0
        assert after["host"]["checkpoints"] == (0 if files else before["host"]["checkpoints"])
        assert not files or after["disk"]["checkpoints"] == before["host"]["checkpoints"]
        assert llm.generate([prompt], GREEDY)[0].num_cached_tokens > 0
        llm.check()


def test_no_thread_is_left(mute: tuple[Path, Judge], tmp_path: Path) -> None:
    with make(mute, disk_cache=tmp_path) as llm:
        llm.generate([tokens_of(90, 0, VOCAB)], GREEDY)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("denim-disk")]


def test_an_interrupt_in_the_books_keeps_the_files(
    mute: tuple[Path, Judge], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They start afresh, and know what lies in files."""
    llm = make(mute, disk_cache=tmp_path)
    prompt = tokens_of(90, 0, VOCAB)
    llm.generate([prompt], GREEDY)
    cache = llm.core.scheduler.prefixes.cache
    cache.evict_all()
    llm.generate([[1, 2]], GREEDY, no_store=True)
    llm.core.scheduler.prefixes.write_out()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.core.scheduler, "schedule", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([prompt], GREEDY)
    (output,) = llm.generate([prompt], GREEDY)
    assert output.num_cached_tokens == 89
    llm.check()
    llm.reset_prefix_cache()
    memory = llm.core.parts.tiers.memory
    assert len(memory._free) == memory.num_blocks, "blocks of before belong to nobody"
    llm.close()


def test_a_step_that_fails_forgets_host_memory_and_keeps_files(
    mute: tuple[Path, Judge], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(mute, disk_cache=tmp_path)
    prompts = [tokens_of(90, seed, VOCAB) for seed in range(6)]
    llm.generate(prompts, GREEDY)
    llm.core.scheduler.prefixes.write_out()
    launch = llm.core.runner.launch

    def fail(plan: Any) -> Any:
        if not plan.spans:
            return launch(plan)
        monkeypatch.setattr(llm.core.runner, "launch", launch)
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(llm.core.runner, "launch", fail)
    (output,) = llm.generate([prompts[0]], GREEDY)
    assert output.outputs[0].finish_reason == "error"
    tiers = llm.stats()["tiers"]
    assert tiers["host"]["checkpoints"] == 0 < tiers["disk"]["checkpoints"]
    for prompt in prompts:
        (output,) = llm.generate([prompt], GREEDY)
        mute[1].greedy(prompt, output.outputs[0].token_ids)
    llm.check()
    llm.close()


def test_the_async_engine_leaves_its_prefixes(mute: tuple[Path, Judge], tmp_path: Path) -> None:
    """When it closes, and while it sleeps."""
    prompt = tokens_of(100, 0, VOCAB)
    options: dict[str, Any] = {"memory": "8MiB", "max_model_len": 1024, "host_memory": "8MiB"}

    async def ask(engine: AsyncEngine) -> None:
        async for _ in engine.generate(prompt, GREEDY):
            pass

    async def scene() -> list[int]:
        hits = []
        for _ in range(2):
            async with AsyncEngine(mute[0], disk_cache=tmp_path, **options) as engine:
                await ask(engine)
                hits.append((await engine.stats())["prefix"]["hit_tokens"])
                await engine.sleep()
                await engine.wake()
                await ask(engine)
                hits.append((await engine.stats())["prefix"]["hit_tokens"])
        return hits

    assert asyncio.run(scene()) == [0, 99, 99, 99]
