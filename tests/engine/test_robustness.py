"""What must not stop the engine: odd arguments, interrupts between any two lines, finalisers, threads."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from denim import LLM, CapacityError, ConfigError, RequestError, SamplingParams
from denim.engine.core import EngineCore
from denim.engine.options import EngineOptions
from tests.exactness.judge import Judge

SHORT = SamplingParams(temperature=0, max_tokens=5)


def small(folder: Path, **options: Any) -> LLM:
    return LLM(folder, **{"memory": "1MiB", "max_model_len": 256, "debug": True, **options})


def assert_sound(llm: LLM, judge: Judge) -> None:
    """Nothing is held, and what comes next is exact."""
    llm.check()
    stats = llm.stats()
    assert [stats[kind]["used"] for kind in ("slabs", "pages", "slots")] == [0, 0, 0]
    assert [stats[name] for name in ("running", "waiting", "swapped")] == [0, 0, 0]
    (output,) = llm.generate([[7, 8, 9]], SHORT)
    judge.greedy([7, 8, 9], output.outputs[0].token_ids)


@pytest.mark.parametrize("priority", [float("nan"), "a", None, True, 1.5, [0, "a"], [float("nan"), 1]])
def test_bad_priorities(mute: tuple[Path, Judge], priority: Any) -> None:
    llm = small(mute[0])
    prompts = [[1, 2], [3]] if isinstance(priority, list) else [[1, 2]]
    if priority is None:
        pytest.skip("None means the default")
    with pytest.raises(RequestError, match="priority"):
        llm.generate(prompts, SHORT, priority=priority)
    assert_sound(llm, mute[1])


def test_numpy_numbers_are_numbers(mute: tuple[Path, Judge]) -> None:
    llm = small(mute[0])
    prompt = list(np.array([1, 2, 3]))
    (output,) = llm.generate(prompt, SHORT, priority=np.int64(3))
    mute[1].greedy([1, 2, 3], output.outputs[0].token_ids)


@pytest.mark.parametrize(
    "prompt",
    [bytearray(b"abc"), b"abc", {1: 2}, {1, 2}, [[float("inf")]], [["5"]], [[1.5]], [[None]], 5, None],
)
def test_what_is_no_prompt(mute: tuple[Path, Judge], prompt: Any) -> None:
    llm = small(mute[0])
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(prompt, SHORT)
    assert_sound(llm, mute[1])


@pytest.mark.parametrize("params", ["x", [5], 5, {"temperature": 0}])
def test_what_are_no_params(mute: tuple[Path, Judge], params: Any) -> None:
    llm = small(mute[0])
    with pytest.raises(RequestError, match="params"):
        llm.generate([[1, 2]], params)
    assert_sound(llm, mute[1])


def test_names_of_others_are_left_to_them(mute: tuple[Path, Judge]) -> None:
    """A client that takes the name which would come next blocks nobody."""
    core = EngineCore(EngineOptions.of(model=mute[0], memory="1MiB", max_model_len=256))
    core.add([1], SHORT, request_id="request-1")
    assert [core.add([2], SHORT) for _ in range(3)] == ["request-0", "request-2", "request-3"]
    with pytest.raises(RequestError, match="must be a string"):
        core.add([2], SHORT, request_id=["a"])  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [-1, -2, 0, 2**64 - 1, 2**70])
def test_every_seed_of_the_engine_serves(mute: tuple[Path, Judge], seed: int) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=4)
    first, second = (small(mute[0], seed=seed).generate([[1]] * 3, params) for _ in range(2))
    assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in second]


@pytest.mark.parametrize(
    "options",
    [
        {"memory": "1e400"},
        {"swap_space": "1e999"},
        {"page_size": 10**12},
        {"chunk_size": 10**6},
        {"debug": "yes"},
        {"enforce_eager": "no"},
        {"model": 5},
        {"model": ""},
        {"model": b"x"},
    ],
    ids=str,
)
def test_options_are_refused_at_once(mute: tuple[Path, Judge], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        EngineOptions.of(**{"model": mute[0], **options})


def test_a_fraction_that_leaves_nothing(mute: tuple[Path, Judge]) -> None:
    with pytest.raises(CapacityError, match=r"memory=1e-06 of the .* leaves nothing"):
        LLM(mute[0], memory=1e-6)


def test_an_engine_goes_when_its_user_lets_go(mute: tuple[Path, Judge]) -> None:
    """No cycle keeps the arena alive until some later collection."""
    llm = small(mute[0])
    llm.generate([[1, 2]], SHORT)
    core = weakref.ref(llm.core)
    gc.disable()
    try:
        del llm
        assert core() is None
    finally:
        gc.enable()


def test_threads_take_turns(mute: tuple[Path, Judge]) -> None:
    folder, judge = mute
    llm = small(folder)
    results: list[Any] = []

    def work(n: int) -> None:
        for i in range(3):
            prompt = [n, i, 5]
            results.append((prompt, llm.generate([prompt], SHORT)[0].outputs[0].token_ids))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 12
    for prompt, tokens in results:
        judge.greedy(prompt, tokens)
    assert_sound(llm, judge)


def test_a_stream_let_go_of_inside_a_step(mute: tuple[Path, Judge], monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle that holds a stream may be collected in the middle of a step."""
    folder, judge = mute
    llm = small(folder)
    streams = [llm.stream([1, 2, 3], SamplingParams(max_tokens=50))]
    launch = llm.core.runner.launch

    def collect(plan: Any) -> Any:
        streams.clear()
        return launch(plan)

    monkeypatch.setattr(llm.core.runner, "launch", collect)
    (output,) = llm.generate([[4, 5]], SHORT)
    judge.greedy([4, 5], output.outputs[0].token_ids)
    assert_sound(llm, judge)


def interrupt_after(lines: int) -> Any:
    """A trace function that raises KeyboardInterrupt at the so-manieth line of engine or scheduler."""
    left = lines

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        name = frame.f_code.co_filename
        if "denim/engine" not in name and "denim/scheduler" not in name and "denim/memory" not in name:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    return trace


@pytest.mark.parametrize("lines", [*range(25, 700, 45), *range(701, 4000, 331)])
def test_an_interrupt_at_any_line(mute: tuple[Path, Judge], lines: int) -> None:
    """What was running may end with an error; the engine goes on, exact and without a leak."""
    folder, judge = mute
    llm = small(folder, max_num_batched_tokens=20, max_num_seqs=3)
    prompts = [[n + 1] * (5 + 7 * n) for n in range(6)]
    before = sys.gettrace()
    try:
        sys.settrace(interrupt_after(lines))
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, n=2), priority=[3, 1, 2, 0, 0, 1])
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    for request_id in list(llm.core.requests):
        llm.core.abort(request_id)
    assert_sound(llm, judge)
