"""The engine in a process of its own: the same answers as in this one, and a life that survives its death."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from denim import LLM, CapacityError, ConfigError, RequestError, SamplingParams
from denim.engine import (
    EngineAsleepError,
    EngineClosedError,
    EngineDiedError,
    EngineUnavailableError,
    StreamDelta,
)
from denim.server import engine_client
from denim.server.engine_client import EngineClient
from denim.spec.config_file import embedded_model
from tests.in_use import in_use

OPTIONS: dict[str, Any] = {"device": "cpu", "memory": "48MiB", "max_model_len": 1024, "debug": True}
PROMPT = "Fellow citizens of the Senate"
GREEDY = SamplingParams(temperature=0, max_tokens=12)
ENDLESS = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
PATIENCE = 60.0  # seconds for one scene; a start takes two, more on a busy machine


class Stage:
    """One engine process and the event loop that it belongs to, for the scenes of this file."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.engine = EngineClient(**OPTIONS)
        self.runner.run(self.engine.__aenter__())

    def play(self, scene: Callable[[EngineClient], Awaitable[Any]]) -> Any:
        """Run a scene; the engine must be idle and sound at its end."""

        async def run() -> Any:
            result = await scene(self.engine)
            await idle(self.engine)
            await self.engine.check()
            return result

        return self.runner.run(asyncio.wait_for(run(), PATIENCE))

    def close(self) -> None:
        self.runner.run(self.engine.close())
        self.runner.close()


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(**OPTIONS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model whose files may be changed."""
    return Path(shutil.copytree(embedded_model(), tmp_path / "model"))


def alone(folder: Path | None, scene: Callable[[EngineClient], Awaitable[Any]]) -> Any:
    """Run a scene with an engine of its own."""

    async def run() -> Any:
        async with engine:
            return await asyncio.wait_for(scene(engine), PATIENCE)

    engine = EngineClient(folder, **OPTIONS)
    result = asyncio.run(run())
    assert not psutil.pid_exists(engine.pid)
    return result


async def idle(engine: EngineClient) -> None:
    """Everything is free at once, in the answer to the next question."""
    assert in_use(await engine.stats()) == 0
    assert engine._waiting.idle


async def tokens(deltas: AsyncIterator[StreamDelta]) -> list[int]:
    return [token async for delta in deltas for token in delta.token_ids]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=9, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=40, stop=["the", "."], include_stop_str_in_output=True),
        SamplingParams(temperature=0, max_tokens=40, stop=" of the", logprobs=0),
        SamplingParams(temperature=2.0, seed=1, max_tokens=60, min_tokens=50, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=9, detokenize=False, logprobs=1),
    ],
    ids=["greedy", "several", "stop shown", "stop hidden", "wild", "no text"],
)
def test_the_same_answer_as_in_this_process(stage: Stage, llm: LLM, params: SamplingParams) -> None:
    """Text is made on this side, from tokens; the engine makes it too where a stop string is looked for."""
    (expected,) = llm.generate(PROMPT, params)

    async def scene(engine: EngineClient) -> list[StreamDelta]:
        return [delta async for delta in engine.generate(PROMPT, params)]

    deltas = stage.play(scene)
    for output in expected.outputs:
        mine = [delta for delta in deltas if delta.index == output.index]
        assert "".join(delta.text for delta in mine) == output.text
        assert [token for delta in mine for token in delta.token_ids] == output.token_ids
        assert (mine[-1].finish_reason, mine[-1].stop_reason) == (output.finish_reason, output.stop_reason)
        reports = [report for delta in mine for report in delta.logprobs or ()]
        assert reports == (output.logprobs or [])
    scores = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    assert scores == ([expected.prompt_logprobs] if expected.prompt_logprobs else [])


def test_bad_requests_are_refused_before_anything_streams(stage: Stage) -> None:
    async def scene(engine: EngineClient) -> None:
        for prompt, options, message in (
            ([], {}, "empty"),
            ([6144], {}, "vocabulary"),
            ([1] * 1024, {}, "1023"),
            ("x", {"request_id": 5}, "must be a string"),
            ("x", {"priority": "high"}, "priority"),
            ("x", {"params": SamplingParams(stop_token_ids=[6144])}, "6144"),
            ("x", {"params": {"temperature": 0}}, "SamplingParams"),
        ):
            with pytest.raises(RequestError, match=message):
                await engine.submit(prompt, **options)
        first = await engine.submit(PROMPT, ENDLESS, "mine")
        with pytest.raises(RequestError, match="'mine' is in use"):
            await engine.submit(PROMPT, GREEDY, "mine")
        await first.aclose()
        async with await engine.submit(PROMPT, GREEDY, "mine") as again:  # free as soon as it was left
            assert len(await tokens(again)) == 12

    stage.play(scene)


def test_what_leaves_is_gone_within_one_step(stage: Stage) -> None:
    """Running, waiting for its first token, or not accepted yet: the question behind it sees none."""

    async def scene(engine: EngineClient) -> None:
        running = await engine.submit(PROMPT, ENDLESS)
        await anext(running)
        accepted = await engine.submit(PROMPT, ENDLESS)
        waiting = asyncio.create_task(engine.submit(PROMPT, ENDLESS))
        await asyncio.sleep(0)  # it is on its way
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await running.aclose()
        await accepted.aclose()
        stats = await engine.stats()
        assert in_use(stats) == 0
        await asyncio.sleep(0.05)
        assert (await engine.stats())["steps"] == stats["steps"]
        assert [delta async for delta in running] == []

    stage.play(scene)


def test_abort_by_id_gives_a_last_delta(stage: Stage) -> None:
    async def scene(engine: EngineClient) -> None:
        stream = await engine.submit(PROMPT, ENDLESS, "mine")
        await anext(stream)
        await engine.abort("mine")
        await engine.abort("nobody")
        assert in_use(await engine.stats()) == 0
        assert [delta.finish_reason async for delta in stream][-1] == "abort"

    stage.play(scene)


def test_a_slow_reader_gets_it_all_at_once_and_holds_up_nobody(stage: Stage, llm: LLM) -> None:
    """What waits is joined: one delta a completion, however long nobody reads."""
    params = SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=80, ignore_eos=True, logprobs=1)
    (expected,) = llm.generate(PROMPT, params)

    async def scene(engine: EngineClient) -> list[StreamDelta]:
        slow = await engine.submit(PROMPT, params)
        fast = [delta async for delta in engine.generate(PROMPT, params)]
        assert sum(len(delta.token_ids) for delta in fast) == 160
        await until(lambda: no_streams(engine))
        return [delta async for delta in slow]

    async def no_streams(engine: EngineClient) -> bool:
        return not len(engine._waiting)

    deltas = sorted(stage.play(scene), key=lambda delta: delta.index)
    assert [delta.index for delta in deltas] == [0, 1]
    for delta, output in zip(deltas, expected.outputs, strict=True):
        assert (delta.text, delta.token_ids, delta.logprobs) == (
            output.text,
            output.token_ids,
            output.logprobs,
        )


def test_signals_that_stop_a_server_do_not_stop_its_engine(stage: Stage) -> None:
    async def scene(engine: EngineClient) -> None:
        stream = await engine.submit(PROMPT, ENDLESS)
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(engine.pid, number)
        await anext(stream)
        await stream.aclose()
        assert len(await tokens(engine.generate(PROMPT, GREEDY))) == 12
        assert engine.crashes == 0

    stage.play(scene)


def test_kill_9_in_mid_stream(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """Everybody who waits gets one clear error; within seconds the next client is served."""

    async def scene(engine: EngineClient) -> None:
        before = await tokens(engine.generate(PROMPT, GREEDY))
        crashes, pid = engine.crashes, engine.pid
        streams = [await engine.submit(PROMPT, ENDLESS) for _ in range(8)]
        for stream in streams:
            await anext(stream)
        os.kill(pid, signal.SIGKILL)
        question = asyncio.create_task(engine.stats())
        for waiting in [*map(tokens, streams), question]:
            with pytest.raises(EngineDiedError, match="SIGKILL.*started again"):
                await waiting
        with pytest.raises(EngineDiedError):  # not back yet
            await engine.submit(PROMPT, GREEDY)
        await until(lambda: serves(engine))
        assert engine.crashes == crashes + 1 and engine.pid != pid
        assert await tokens(engine.generate(PROMPT, GREEDY)) == before

    with caplog.at_level(logging.INFO, "denim"):
        stage.play(scene)
    assert "SIGKILL; 8 request(s) end with an error" in caplog.text


async def serves(engine: EngineClient) -> bool:
    try:
        await engine.stats()
    except EngineUnavailableError:
        return False
    return True


def test_what_cannot_be_sent_is_its_sender_s_error(stage: Stage) -> None:
    """What others send in the same turn of the event loop arrives."""

    async def scene(engine: EngineClient) -> None:
        bad: Any = lambda: None  # noqa: E731  # cannot be pickled
        questions = [asyncio.ensure_future(engine.stats())]
        await asyncio.sleep(0)
        with pytest.raises((pickle.PicklingError, AttributeError)):
            await engine.submit(PROMPT, GREEDY, priority=bad)
        questions.append(asyncio.ensure_future(engine.stats()))
        await asyncio.gather(*questions)

    stage.play(scene)


def test_a_new_process_that_cannot_be_connected_is_no_end(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is ended, and the next one is tried."""
    monkeypatch.setattr(engine_client, "FIRST_PAUSE", 0.1)
    connect, pids = EngineClient._connect, []

    async def fails_once(engine: EngineClient) -> None:
        pids.append(engine.pid)
        if len(pids) == 1:
            raise OSError("no file descriptor is left")
        await connect(engine)

    async def scene(engine: EngineClient) -> None:
        monkeypatch.setattr(EngineClient, "_connect", fails_once)
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: serves(engine))
        assert pids[1:] == [engine.pid] and not psutil.pid_exists(pids[0])

    stage.play(scene)
    assert "cannot be started again: no file descriptor is left" in caplog.text


def test_death_while_the_model_is_loaded(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted as any other."""
    monkeypatch.setattr(engine_client, "FIRST_PAUSE", 0.1)

    async def scene(engine: EngineClient) -> None:
        crashes = engine.crashes
        for _ in range(2):  # one that serves, and the one that is started in its place
            pid = engine.pid
            os.kill(pid, signal.SIGKILL)
            while engine.pid == pid:
                await asyncio.sleep(0.01)
        await until(lambda: serves(engine))
        assert engine.crashes == crashes + 2
        assert len(await tokens(engine.generate(PROMPT, GREEDY))) == 12

    stage.play(scene)


@pytest.mark.slow  # six starts
def test_a_start_that_fails_is_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it succeeds; an engine that is told to drain meanwhile takes no new requests then."""
    monkeypatch.setattr(engine_client, "FIRST_PAUSE", 0.1)
    weights = folder / "model.safetensors"

    async def scene(engine: EngineClient) -> None:
        for drained in (False, True):
            weights.rename(folder / "away")
            os.kill(engine.pid, signal.SIGKILL)
            await until(lambda: refused(engine))
            pid = engine.pid
            while engine.pid == pid:  # a second try
                await asyncio.sleep(0.02)
            if drained:
                await engine.drain()
            (folder / "away").rename(weights)
            await until(lambda: serves(engine))
            if not drained:
                assert len(await tokens(engine.generate(PROMPT, GREEDY))) == 12
        with pytest.raises(EngineClosedError, match="no new requests"):
            await engine.submit(PROMPT, GREEDY)

    async def refused(engine: EngineClient) -> bool:
        return engine._refusal is not None and "SIGKILL" in str(engine._refusal)

    alone(folder, scene)


def test_drain_and_close() -> None:
    """Draining: who runs ends in peace, who comes is refused. Closing: who runs gets an error."""
    long = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)

    async def scene(engine: EngineClient) -> None:
        running = [asyncio.create_task(tokens(engine.generate(PROMPT, long))) for _ in range(3)]
        ends = await engine.submit(PROMPT, ENDLESS)
        while len(engine._waiting) < 4:
            await asyncio.sleep(0.01)
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(EngineClosedError, match="no new requests"):
            await engine.submit(PROMPT, GREEDY)
        assert [len(await task) for task in running] == [90] * 3
        assert not draining.done()
        await engine.close()
        await draining
        with pytest.raises(EngineClosedError, match="was closed"):
            await tokens(ends)
        for call in (engine.submit(PROMPT, GREEDY), engine.stats()):
            with pytest.raises(EngineClosedError, match="was closed"):
                await call
        await engine.close()
        await engine.drain()

    alone(None, scene)


def test_closing_while_it_is_started_again() -> None:
    """Nothing of the start goes on."""

    async def scene(engine: EngineClient) -> None:
        pid = engine.pid
        os.kill(pid, signal.SIGKILL)
        while engine.pid == pid:
            await asyncio.sleep(0.01)
        await engine.close()
        assert engine._restart is not None and engine._restart.done()

    alone(None, scene)


def test_closing_while_it_waits_for_room_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair of sockets is full in both directions: what comes is read until the process has seen the end,
    else neither would go on."""
    monkeypatch.setattr(engine_client, "CLOSING", 10.0)  # then it is killed

    async def scene(engine: EngineClient) -> None:
        long = await engine.read([1] * 1000)
        process = psutil.Process(engine.pid)
        assert engine._transport is not None
        end = engine._transport.get_extra_info("socket").fileno()
        asked = [asyncio.ensure_future(engine.live_view()) for _ in range(4000)]
        for _ in range(2):
            await asyncio.sleep(0)  # they are on their way
        for _ in range(1000):  # this event loop stands still
            if unread(end) and process.status() == psutil.STATUS_SLEEPING:
                break
            time.sleep(0.01)
        asked += [asyncio.ensure_future(engine.submit(long, GREEDY)) for _ in range(500)]
        await asyncio.sleep(0)
        engine._flush()  # before anything is read
        await engine.close()
        await asyncio.gather(*asked, return_exceptions=True)
        assert engine._engine.process.returncode == 0

    alone(None, scene)


def unread(end: int) -> int:
    """Bytes that have come to a socket."""
    return int.from_bytes(fcntl.ioctl(end, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_sleep_and_wake_read_the_weights_again(folder: Path) -> None:
    """What lies on disk when it wakes is what it serves; no prefix of the old weights is reused."""

    async def scene(engine: EngineClient) -> tuple[list[int], list[StreamDelta]]:
        before = await tokens(engine.generate(PROMPT, GREEDY))
        running = await engine.submit(PROMPT, ENDLESS)
        await anext(running)
        await engine.sleep()
        assert [delta.finish_reason async for delta in running][-1] == "abort"
        assert engine.asleep
        with pytest.raises(EngineAsleepError):
            await engine.submit(PROMPT, GREEDY)
        with pytest.raises(EngineAsleepError):
            await engine.stats()
        weights = folder / "model.safetensors"
        weights.rename(folder / "away")
        with pytest.raises(ConfigError):
            await engine.wake()
        assert engine.asleep
        tensors = load_file(folder / "away")
        for name, tensor in tensors.items():
            if "layernorm" in name:
                tensors[name] = tensor + 0.5
        save_file(tensors, weights)
        await engine.wake()
        assert not engine.asleep
        return before, [delta async for delta in engine.generate(PROMPT, GREEDY)]

    before, after = alone(folder, scene)
    assert {delta.num_cached_tokens for delta in after} == {0}
    (expected,) = LLM(folder, **OPTIONS).generate(PROMPT, GREEDY)
    assert [token for delta in after for token in delta.token_ids] == expected.outputs[0].token_ids != before


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": "/no/such/folder"}, ConfigError, "not a folder"),
        ({"memory": "1KiB"}, CapacityError, "not fit|too small|needs"),
        ({"dtype": "float12"}, ConfigError, "float12"),
    ],
)
def test_a_start_that_cannot_work_is_refused(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """With the engine's own error, and no process left."""
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(error, match=message):
        EngineClient(**{"device": "cpu", **options})
    assert {child.pid for child in psutil.Process().children()} == before


@pytest.mark.slow  # two processes to import everything
def test_the_process_ends_with_its_server() -> None:
    """Even with one that had no time to close it."""
    code = (
        "import os; from denim.server.engine_client import EngineClient\n"
        f"print(EngineClient(**{OPTIONS!r}).pid, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    path = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == -signal.SIGKILL
    pid, patience = int(done.stdout), time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < patience
        time.sleep(0.05)
