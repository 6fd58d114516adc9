"""The online interface: many clients, and clients that leave at any moment."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from denim import AsyncEngine, RequestError, SamplingParams
from denim.engine import EngineAsleepError, EngineClosedError
from denim.engine.core import EngineCore
from denim.engine.outputs import StreamDelta
from tests.exactness.harness import tokens_of
from tests.exactness.judge import Judge
from tests.in_use import in_use
from tests.tiny import VOCAB

GREEDY = SamplingParams(temperature=0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0, max_tokens=200)

Scene = Callable[[AsyncEngine], Coroutine[Any, Any, Any]]


def play(folder: Path, scene: Scene, **options: Any) -> Any:
    """Run a scene with an engine that must be idle and sound at its end."""

    async def run() -> Any:
        given = {"memory": "1MiB", "max_model_len": 256, "debug": True, **options}
        async with AsyncEngine(folder, **given) as engine:
            result = await scene(engine)
            await idle(engine)
            await engine.check()
        return result

    return asyncio.run(asyncio.wait_for(run(), 60))


async def idle(engine: AsyncEngine) -> None:
    """Nothing runs and nothing is held, at the latest when it was asked a hundred times (AB-03)."""
    for _ in range(100):
        stats = await engine.stats()
        if not in_use(stats):
            break
        await asyncio.sleep(0.01)
    else:
        raise AssertionError(f"still busy: {stats}")
    assert engine._waiting.idle


def core_of(engine: AsyncEngine) -> EngineCore:
    core = engine._loop.core
    assert core is not None
    return core


async def tokens(deltas: AsyncIterator[StreamDelta]) -> list[int]:
    return [token async for delta in deltas for token in delta.token_ids]


def test_many_clients(mute: tuple[Path, Judge]) -> None:
    folder, judge = mute
    prompts = [tokens_of(1 + 5 * i, i, VOCAB) for i in range(12)]

    async def scene(engine: AsyncEngine) -> list[list[int]]:
        return await asyncio.gather(*(tokens(engine.generate(prompt, GREEDY)) for prompt in prompts))

    for prompt, output in zip(prompts, play(folder, scene), strict=True):
        assert len(output) == 12
        judge.greedy(prompt, output)


def test_every_completion_ends(mute: tuple[Path, Judge]) -> None:
    """AP-03: n streams in one."""

    async def scene(engine: AsyncEngine) -> list[StreamDelta]:
        params = SamplingParams(n=3, seed=1, temperature=1.0, max_tokens=9)
        return [delta async for delta in engine.generate(tokens_of(20, 0, VOCAB), params)]

    deltas = play(mute[0], scene)
    assert sorted(d.index for d in deltas if d.finish_reason == "length") == [0, 1, 2]
    assert [sum(len(d.token_ids) for d in deltas if d.index == i) for i in range(3)] == [9, 9, 9]


@pytest.mark.parametrize("taken", [1, 3, 10])
def test_break(mute: tuple[Path, Judge], taken: int) -> None:
    """AB-03: twenty clients leave after some tokens; no step runs for them afterwards."""

    async def scene(engine: AsyncEngine) -> int:
        async def leave() -> None:
            stream = engine.generate(tokens_of(9, 0, VOCAB), ENDLESS)
            async for number, _ in counted(stream):
                if number == taken:
                    break
            await stream.aclose()

        await asyncio.gather(*(leave() for _ in range(20)))
        await idle(engine)
        steps = (await engine.stats())["steps"]
        await asyncio.sleep(0.05)
        return (await engine.stats())["steps"] - steps

    assert play(mute[0], scene) == 0


async def counted(stream: AsyncIterator[StreamDelta]) -> AsyncIterator[tuple[int, StreamDelta]]:
    number = 0
    async for delta in stream:
        number += 1
        yield number, delta


@pytest.mark.parametrize("delay", [None, 0, 0.001, 0.02, 0.1])
def test_cancellation(mute: tuple[Path, Judge], delay: float | None) -> None:
    """Before the task has run, before the request has begun, in its prompt, in mid-stream."""
    folder, judge = mute
    prompt = tokens_of(30, 1, VOCAB)

    async def scene(engine: AsyncEngine) -> list[int]:
        tasks = [
            asyncio.create_task(tokens(engine.generate(tokens_of(90, i, VOCAB), ENDLESS))) for i in range(9)
        ]
        beside = asyncio.create_task(tokens(engine.generate(prompt, GREEDY)))
        if delay is not None:
            await asyncio.sleep(delay)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        return await beside

    judge.greedy(prompt, play(folder, scene, max_num_batched_tokens=32))


def test_a_client_that_retries_after_its_time_out(mute: tuple[Path, Judge]) -> None:
    """AB-04: ten whole answers are awaited in vain; at any time one request at most is the engine's."""

    async def scene(engine: AsyncEngine) -> None:
        prompt, long = tokens_of(30, 1, VOCAB), SamplingParams(temperature=0, max_tokens=4000)
        for attempt in range(10):
            before = (await engine.stats())["tokens"]
            answer = asyncio.create_task(tokens(engine.generate(prompt, long, f"attempt {attempt}")))
            while (stats := await engine.stats())["tokens"] == before:
                assert stats["running"] + stats["waiting"] <= 1
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(answer, 0.01)
        await idle(engine)
        assert (await engine.stats())["tokens"] < 4000  # none of ten ran to its end

    play(mute[0], scene, memory="8MiB", max_model_len=4096)


def test_a_long_prompt_that_nobody_waits_for(mute: tuple[Path, Judge]) -> None:
    """AB-05: of its fifty segments those before the hang-up run, and then the next client's prompt."""
    folder, judge = mute
    segment, seen = 16, 3  # segments that have begun when the client leaves
    short = tokens_of(5, 0, VOCAB)
    left = threading.Event()

    async def scene(engine: AsyncEngine) -> list[int]:
        step, begun = core_of(engine).step, threading.Semaphore(0)

        def gated_step() -> list[StreamDelta]:
            begun.release()
            if core_of(engine).steps == seen - 1:
                left.wait()
            return step()

        core_of(engine).step = gated_step
        long = asyncio.create_task(tokens(engine.generate(tokens_of(50 * segment, 0, VOCAB), GREEDY)))
        for _ in range(seen):
            await asyncio.to_thread(begun.acquire)
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        left.set()
        first = await anext(engine.generate(short, SamplingParams(temperature=0, max_tokens=1)))
        assert (await engine.stats())["steps"] == seen + 1
        return first.token_ids

    options = {"max_model_len": 1024, "max_num_batched_tokens": segment, "chunk_size": segment}
    judge.greedy(short, play(folder, scene, **options))


def test_abort_by_id(mute: tuple[Path, Judge]) -> None:
    """AB-06, AB-07: waiting or running; the iteration ends with a last delta. Slots come back."""

    async def scene(engine: AsyncEngine) -> list[list[StreamDelta]]:
        async def collect(name: str) -> list[StreamDelta]:
            return [d async for d in engine.generate(tokens_of(20, 0, VOCAB), longest, name)]

        longest = replace(ENDLESS, max_tokens=3900)  # the engine may run ahead by seconds
        names = [f"r{i}" for i in range(12)]
        tasks = [asyncio.create_task(collect(name)) for name in names]
        seen = await engine.stats()
        while not seen["tokens"] or seen["running"] + seen["waiting"] < len(names):
            seen = await engine.stats()
        for name in names:
            await engine.abort(name)
        await engine.abort("nobody")
        return await asyncio.gather(*tasks)

    for deltas in play(mute[0], scene, max_num_seqs=3, max_model_len=4000, memory="8MiB"):
        assert deltas[-1].finish_reason == "abort"
        assert all(delta.finish_reason is None for delta in deltas[:-1])


def test_abort_by_id_before_the_engine_has_accepted_it(mute: tuple[Path, Judge]) -> None:
    async def scene(engine: AsyncEngine) -> list[StreamDelta]:
        coming = asyncio.create_task(engine.submit([1, 2], ENDLESS, "mine"))
        while not len(engine._waiting):  # its prompt is read
            await asyncio.sleep(0)
        await engine.abort("mine")  # what the engine says of it comes to this event loop later
        async with await coming as reply:
            return [delta async for delta in reply]

    assert play(mute[0], scene)[-1].finish_reason == "abort"


def test_an_id_may_be_used_again_at_once(mute: tuple[Path, Judge]) -> None:
    """The first client's leaving does not end the second one's request."""
    prompt = tokens_of(5, 0, VOCAB)

    async def scene(engine: AsyncEngine) -> list[int]:
        first = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=1), "mine")
        await anext(first)
        while (await engine.stats())["running"]:
            await asyncio.sleep(0)
        second = asyncio.create_task(tokens(engine.generate(prompt, ENDLESS, "mine")))
        while not (await engine.stats())["running"]:
            await asyncio.sleep(0)
        await first.aclose()
        return await second

    assert len(play(mute[0], scene)) == 200


def test_bad_requests(mute: tuple[Path, Judge]) -> None:
    """Each gets its error before anything is streamed; others and later ones are served."""
    folder, judge = mute
    prompt = tokens_of(8, 0, VOCAB)

    async def scene(engine: AsyncEngine) -> list[int]:
        beside = asyncio.create_task(tokens(engine.generate(prompt, GREEDY, "beside")))
        while not (await engine.stats())["running"]:
            await asyncio.sleep(0)
        for bad, message in (([], "empty"), ([VOCAB], "vocabulary"), ([1] * 300, "256"), ("x", "tokenizer")):
            with pytest.raises(RequestError, match=message):
                await tokens(engine.generate(bad, GREEDY))
        return await beside

    judge.greedy(prompt, play(folder, scene))


def test_an_id_in_use_is_refused(mute: tuple[Path, Judge]) -> None:
    async def scene(engine: AsyncEngine) -> None:
        first = engine.generate([1, 2], ENDLESS, "mine")
        begun = (await anext(first)).token_ids
        with pytest.raises(RequestError, match="'mine' is in use"):
            await tokens(engine.generate([1, 2], GREEDY, "mine"))
        assert len(begun + await tokens(first)) == 200

    play(mute[0], scene)


def test_a_failing_step(mute: tuple[Path, Judge]) -> None:
    """Its requests end with an error; the engine serves the next."""
    folder, judge = mute
    prompt = tokens_of(8, 0, VOCAB)

    async def scene(engine: AsyncEngine) -> tuple[list[StreamDelta], list[int]]:
        model = core_of(engine).runner.forward.model
        forward = model.forward

        def fail(*args: Any) -> Any:
            model.forward = forward
            raise RuntimeError("a kernel failed")

        model.forward = fail
        failed = [delta async for delta in engine.generate(prompt, GREEDY)]
        return failed, await tokens(engine.generate(prompt, GREEDY))

    failed, served = play(folder, scene)
    assert [delta.finish_reason for delta in failed] == ["error"]
    judge.greedy(prompt, served)


def test_closing_ends_what_runs(mute: tuple[Path, Judge]) -> None:
    async def run() -> None:
        engine = AsyncEngine(mute[0], memory="1MiB", max_model_len=256, debug=True)
        task = asyncio.create_task(tokens(engine.generate([1, 2, 3], ENDLESS)))
        while not (await engine.stats())["running"]:
            await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineClosedError, match="closed"):
            await task
        with pytest.raises(EngineClosedError, match="closed"):
            await tokens(engine.generate([1], GREEDY))
        with pytest.raises(EngineClosedError):
            await engine.stats()
        assert not engine._thread.is_alive()
        assert core_of(engine).stats()["slots"]["used"] == 0
        await engine.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_closing_while_a_request_comes(mute: tuple[Path, Judge]) -> None:
    """A request sent during the last step gets an error too, and does not wait for ever."""

    async def run() -> None:
        engine = AsyncEngine(mute[0], memory="1MiB", max_model_len=256)
        step = core_of(engine).step
        stepping, go_on = threading.Event(), threading.Event()

        def slow_step() -> list[StreamDelta]:
            stepping.set()
            go_on.wait()
            return step()

        core_of(engine).step = slow_step
        held = asyncio.create_task(tokens(engine.generate([1, 2, 3], ENDLESS)))
        while not stepping.is_set():
            await asyncio.sleep(0.001)
        late = asyncio.create_task(tokens(engine.generate([1, 2, 3], ENDLESS)))
        await asyncio.sleep(0)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        go_on.set()
        await closing
        for task in (held, late):
            with pytest.raises(EngineClosedError):
                await asyncio.wait_for(task, 60)
        assert not core_of(engine).requests

    asyncio.run(run())


def test_draining_while_a_request_comes_on_another_event_loop(
    mute: tuple[Path, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either it is waited for, or it is refused."""

    async def scene(engine: AsyncEngine) -> None:
        prompt = await engine.read([1, 2])

        def drained_meanwhile(params: SamplingParams, room: int) -> int:
            thread = threading.Thread(target=lambda: asyncio.run(engine.drain()))
            thread.start()
            thread.join()
            return room

        with monkeypatch.context() as patch:
            patch.setattr(SamplingParams, "most_tokens", drained_meanwhile)
            with pytest.raises(EngineClosedError, match="no new requests"):
                await engine.submit(prompt, ENDLESS)

    play(mute[0], scene)


def test_a_question_that_the_end_of_the_engine_overtakes(
    mute: tuple[Path, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is raised once, and no second one is left for nobody."""

    async def scene(engine: AsyncEngine) -> None:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

        def ends(command: Any) -> None:
            engine._lose(EngineClosedError("on the engine's thread"))
            raise EngineClosedError("on the client's")

        with monkeypatch.context() as patch:
            patch.setattr(engine, "_send", ends)
            with pytest.raises(EngineClosedError, match="client's"):
                await engine.stats()
        await asyncio.sleep(0)
        gc.collect()
        assert not told

    play(mute[0], scene)


def test_clients_of_two_event_loops(mute: tuple[Path, Judge]) -> None:
    """An engine outlives a client's event loop, even one that ended in mid-stream."""
    folder, judge = mute
    prompt = tokens_of(8, 0, VOCAB)
    engine = AsyncEngine(folder, memory="1MiB", max_model_len=256, debug=True)

    async def abandon() -> None:
        asyncio.create_task(tokens(engine.generate(prompt, ENDLESS)))  # noqa: RUF006
        while not (await engine.stats())["running"]:
            await asyncio.sleep(0)

    async def again() -> list[int]:
        served = await tokens(engine.generate(prompt, GREEDY))
        await idle(engine)
        await engine.close()
        return served

    asyncio.run(abandon())
    judge.greedy(prompt, asyncio.run(again()))


def test_sleep_lets_go_of_the_model_and_wake_starts_afresh(mute: tuple[Path, Judge]) -> None:
    folder, judge = mute
    prompt = tokens_of(90, 3, VOCAB)

    async def scene(engine: AsyncEngine) -> list[list[int]]:
        before = await tokens(engine.generate(prompt, GREEDY))
        running = engine.generate(tokens_of(9, 4, VOCAB), ENDLESS)
        await anext(running)
        model = weakref.ref(core_of(engine).loaded.model)
        await engine.sleep()
        await engine.sleep()
        assert [delta.finish_reason async for delta in running][-1] == "abort"
        assert engine.asleep and model() is None
        for question in (engine.stats, engine.check, engine.reset_prefix_cache):
            with pytest.raises(EngineAsleepError):
                await question()
        with pytest.raises(EngineAsleepError):
            await anext(engine.generate(prompt, GREEDY))
        await engine.wake()
        assert not engine.asleep
        cold = [delta async for delta in engine.generate(prompt, GREEDY)]
        assert cold[0].num_cached_tokens == 0
        warm = [delta async for delta in engine.generate(prompt, GREEDY)]
        assert warm[0].num_cached_tokens == len(prompt) - 1
        return [before, *([t for delta in run for t in delta.token_ids] for run in (cold, warm))]

    before, cold, warm = play(folder, scene)
    assert before == cold == warm
    judge.greedy(prompt, before)


def test_who_puts_it_to_sleep_or_wakes_it_may_leave(mute: tuple[Path, Judge]) -> None:
    """What the engine is does not depend on who waits for the answer."""

    async def scene(engine: AsyncEngine) -> None:
        for turn, asleep in ((engine.sleep, True), (engine.wake, False)):
            leaves = asyncio.create_task(turn())
            await asyncio.sleep(0)  # the question is on its way
            leaves.cancel()
            await asyncio.gather(leaves, return_exceptions=True)
            with suppress(EngineAsleepError):
                await engine.stats()  # answered behind it
            assert engine.asleep is asleep

    play(mute[0], scene)


def test_a_prompt_that_was_read_before_the_engine_woke_with_less(mute: tuple[Path, Judge]) -> None:
    async def scene(engine: AsyncEngine) -> None:
        prompt = await engine.read(tokens_of(64, 0, VOCAB))
        await engine.sleep()
        engine._loop.options = replace(engine._loop.options, max_model_len=64)
        await engine.wake()
        with pytest.raises(RequestError, match="has 64 tokens.*allows 63"):
            await engine.submit(prompt, GREEDY)

    play(mute[0], scene)


def test_the_prompt_s_scores_come_with_the_first_token(mute: tuple[Path, Judge]) -> None:
    prompt = tokens_of(21, 3, VOCAB)

    async def scene(engine: AsyncEngine) -> list[StreamDelta]:
        params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1, n=2)
        return [delta async for delta in engine.generate(prompt, params)]

    scored = [delta for delta in play(mute[0], scene) if delta.prompt_logprobs is not None]
    assert [(delta.index, len(delta.prompt_logprobs or ())) for delta in scored] == [(0, 21)]
