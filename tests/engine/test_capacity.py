"""What fits: sizes, limits, the start-up line, and every size of memory from one request upward."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from denim import LLM, CapacityError, RequestError, SamplingParams
from denim.ledger.budget import working_bytes
from denim.memory.fit import requests_that_fit
from denim.memory.layout import ArenaLayout
from tests.exactness.harness import tokens_of
from tests.exactness.judge import Judge
from tests.tiny import VOCAB


def layout_of(folder: Path) -> ArenaLayout:
    return LLM(folder, memory="1MiB").core.layout


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_every_size_from_one_request_upward(mute: tuple[Path, Judge], page_size: int) -> None:
    """ME-14: works up to its stated limits, or is refused at the start. No slot or page is reserved."""
    folder, judge = mute
    slab = LLM(folder, memory="1MiB", page_size=page_size).core.layout.slab_bytes
    started = []
    for slabs in range(8):
        try:
            llm = LLM(
                folder, memory=slabs * slab + slab // 2, page_size=page_size, debug=True, max_num_seqs=20
            )
        except CapacityError as error:
            assert not started
            assert re.search("too little for one request.*raise memory", str(error))
            continue
        started.append(slabs)
        limits = llm.core.capacity
        longest = limits.max_model_len
        whole = llm.generate(
            [tokens_of(longest - 1, 0, VOCAB)], SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0)
        )[0]
        assert whole.outputs[0].finish_reason == "length"
        assert len(whole.outputs[0].token_ids) == 1
        prompts = [tokens_of(3, seed, VOCAB) for seed in range(limits.max_num_seqs)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=3))
        for prompt, output in zip(prompts, outputs, strict=True):
            judge.greedy(prompt, output.outputs[0].token_ids)
        with pytest.raises(RequestError, match=f"max_model_len={longest} allows {longest - 1}"):
            llm.generate([tokens_of(longest, 0, VOCAB)])
    assert started == list(range(started[0], 8))
    assert started[0] == 2


def test_one_request_may_use_all_of_the_arena(mute: tuple[Path, Judge]) -> None:
    folder, judge = mute
    slab = layout_of(folder).slab_bytes
    llm = LLM(folder, memory=2 * slab, debug=True)
    prompt = tokens_of(llm.core.capacity.max_model_len - 20, 0, VOCAB)
    output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=None))[0].outputs[0]
    assert len(output.token_ids) == 20
    assert output.finish_reason == "length"
    judge.greedy(prompt, output.token_ids)


def test_defaults_that_do_not_fit_are_clamped(
    mute: tuple[Path, Judge], caplog: pytest.LogCaptureFixture
) -> None:
    """ME-01: the start goes on with the numbers in force, and says so."""
    folder = mute[0]
    with caplog.at_level(logging.INFO, logger="denim"):
        llm = LLM(folder, memory="400KiB", max_num_seqs=200, max_model_len=3000)
    limits = llm.core.capacity
    assert limits.max_num_seqs < 200
    assert limits.max_model_len < 3000
    assert f"max_num_seqs clamped to {limits.max_num_seqs}" in caplog.text
    assert f"max_model_len clamped to {limits.max_model_len}" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="denim"):
        assert LLM(folder, memory="64MiB", max_model_len=10**6).core.capacity.max_model_len == 4096
    assert "beyond the model's 4096 positions" in caplog.text


def test_slots_are_taken_as_they_are_needed(mute: tuple[Path, Judge]) -> None:
    """ME-03: no slots are set aside; a limit of many requests leaves all memory to a long one."""
    folder = mute[0]
    limits = [LLM(folder, memory="600KiB", max_num_seqs=n).core.capacity.max_model_len for n in (1, 10, 256)]
    assert len(set(limits)) == 1
    stats = LLM(folder, memory="600KiB").stats()
    assert [stats[kind]["used"] for kind in ("slabs", "pages", "slots")] == [0, 0, 0]


def test_the_start_up_line(mute: tuple[Path, Judge], caplog: pytest.LogCaptureFixture) -> None:
    """What the model and one request cost, and how many of which length fit; the numbers hold."""
    with caplog.at_level(logging.INFO, logger="denim"):
        llm = LLM(mute[0], memory="4MiB", max_model_len=1024, max_num_seqs=100)
    line = next(r.getMessage() for r in caplog.records if "fits" in r.getMessage())
    assert "on cpu" in line
    assert "float32 weights and KV, float32 states" in line
    assert "a request costs a slot of 18.3 KiB + 6 KiB per 16 tokens" in line
    assert "at most 100 run at once" in line
    fits = {int(n.replace(",", "")): int(count) for count, n in re.findall(r"(\d+) of ([\d,]+) tokens", line)}
    assert list(fits) == [512, 1024]
    layout, slabs = llm.core.layout, llm.core.capacity.num_slabs
    for tokens, count in fits.items():
        need = layout.need(tokens)
        assert layout.slabs_for({name: n * count for name, n in need.items()}) <= slabs
        assert layout.slabs_for({name: n * (count + 1) for name, n in need.items()}) > slabs


def test_half_the_kv_brings_what_it_should(mute: tuple[Path, Judge]) -> None:
    """ME-12: the gain in requests is (state + n kv32) / (state + n kv16), not less."""
    layouts = {
        dtype: LLM(mute[0], memory="1MiB", kv_dtype=dtype).core.layout for dtype in ("float32", "bfloat16")
    }
    arena = 2**30
    for tokens in (1024, 2048, 4096):
        fitting = {d: requests_that_fit(x, arena // x.slab_bytes, tokens) for d, x in layouts.items()}
        state = layouts["float32"].size_class("slot").entry_bytes
        kv = layouts["float32"].size_class("page").entry_bytes * tokens // 16
        expected = (state + kv) / (state + kv / 2)
        assert fitting["bfloat16"] / fitting["float32"] == pytest.approx(expected, rel=0.03)


def test_memory_beyond_the_machine_is_refused(mute: tuple[Path, Judge]) -> None:
    with pytest.raises(CapacityError, match="memory=.*more than the .* free on cpu; lower memory"):
        LLM(mute[0], memory=2**52)


def test_without_a_size_the_arena_is_what_the_requests_could_use(mute: tuple[Path, Judge]) -> None:
    llm = LLM(mute[0], max_num_seqs=3, max_model_len=100)
    layout = llm.core.layout
    need = {name: 3 * n for name, n in layout.need(100).items()}
    assert llm.core.capacity.num_slabs == layout.slabs_for(need)


def test_a_fraction_counts_what_is_in_use_and_the_working_memory(
    mute: tuple[Path, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=100 * 2**20))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=2**30, available=2**30))
    monkeypatch.setattr("psutil.Process", lambda: used)
    llm = LLM(mute[0], memory=0.25, max_num_seqs=4, max_num_batched_tokens=64)
    working = working_bytes(llm.core.spec, 64, 4, 64)
    assert working > llm.core.layout.slab_bytes
    expected = (2**28 - 100 * 2**20 - working) // llm.core.layout.slab_bytes
    assert llm.core.capacity.num_slabs == expected
    with pytest.raises(CapacityError, match="memory=0.05 of the 1 GiB of cpu leaves nothing"):
        LLM(mute[0], memory=0.05)


def test_a_fraction_of_the_machine(mute: tuple[Path, Judge]) -> None:
    import psutil

    llm = LLM(mute[0], memory=0.2, max_num_seqs=4, max_num_batched_tokens=64)
    size = llm.core.capacity.num_slabs * llm.core.layout.slab_bytes
    assert size <= 0.2 * psutil.virtual_memory().total
