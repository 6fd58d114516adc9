"""Prefix reuse as a user sees it: `num_cached_tokens`, stats, options, and the same answers as without."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from denim import LLM, AsyncEngine, RequestError, SamplingParams
from denim.engine.cache_wishes import CacheWishes
from tests.exactness.harness import tokens_of
from tests.exactness.judge import Judge
from tests.tiny import VOCAB

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
POLICIES = ["none", "align", "all", "ends", "auto"]


def make(mute: tuple[Path, Judge], **options: Any) -> LLM:
    return LLM(mute[0], **{"memory": "8MiB", "max_model_len": 1024, "debug": True, **options})


def cached(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY, **options: Any) -> int:
    (output,) = llm.generate([prompt], params, **options)
    return output.num_cached_tokens


@pytest.mark.parametrize("length", [65, 79, 80, 81, 128, 129, 200])
def test_the_same_prompt_again_computes_one_token(mute: tuple[Path, Judge], length: int) -> None:
    """PN-01, PN-07, PH-02: at any length, from the second time on."""
    llm = make(mute)
    prompt = tokens_of(length, 0, VOCAB)
    first, second, third = (llm.generate([prompt], GREEDY)[0] for _ in range(3))
    assert [out.num_cached_tokens for out in (first, second, third)] == [0, length - 1, length - 1]
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == third.outputs[0].token_ids


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_do_not_depend_on_the_policy(mute: tuple[Path, Judge], policy: str) -> None:
    """Eight conversations of four turns over one beginning, twice."""
    judge = mute[1]
    llm = make(mute, checkpoint_policy=policy, max_num_batched_tokens=100)
    shared = tokens_of(70, 0, VOCAB)
    for _ in range(2):
        histories = [shared + tokens_of(10, seed, VOCAB) for seed in range(8)]
        for turn in range(4):
            outputs = llm.generate(histories, GREEDY)
            for prompt, output in zip(histories, outputs, strict=True):
                judge.greedy(prompt, output.outputs[0].token_ids)
            histories = [
                [*prompt, *out.outputs[0].token_ids, *tokens_of(9, 100 * turn, VOCAB)]
                for prompt, out in zip(histories, outputs, strict=True)
            ]
    hits = llm.stats()["prefix"]["hit_tokens"]
    assert (hits > 0) == (policy != "none")


def test_the_next_turn_hits_all_that_was_applied(mute: tuple[Path, Judge]) -> None:
    """OF-10, PN-16: the answer's last token was drawn and never applied; everything before it is reused."""
    llm = make(mute)
    prompt, applied = tokens_of(100, 0, VOCAB), 0
    for turn in range(4):
        (output,) = llm.generate([prompt], GREEDY)
        assert output.num_cached_tokens == applied
        history = [*prompt, *output.outputs[0].token_ids]
        applied = len(history) - 1
        prompt = [*history, *tokens_of(20, turn, VOCAB)]


def test_steps_that_overlap_donate_what_they_applied(mute: tuple[Path, Judge]) -> None:
    """The host learns of the end one step late: the state is one token further, and says so."""
    llm = make(mute, async_scheduling=True)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    (output,) = llm.generate([tokens_of(80, 0, VOCAB)], params)
    answer = output.outputs[0].token_ids
    stop = answer[10]
    at = answer.index(stop)
    llm.reset_prefix_cache()
    stopping = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, stop_token_ids=[stop])
    (output,) = llm.generate([tokens_of(80, 0, VOCAB)], stopping)
    assert output.outputs[0].token_ids == answer[: at + 1]
    following = [*tokens_of(80, 0, VOCAB), *answer[: at + 1], 1, 2, 3]
    assert cached(llm, following) in (80 + at, 80 + at + 1)
    llm.check()


def test_many_at_once_over_a_new_prefix(mute: tuple[Path, Judge]) -> None:
    """PH-03, PN-10: one computes it, the others hit; all answers are right."""
    judge = mute[1]
    llm = make(mute, max_num_batched_tokens=128)
    shared = tokens_of(300, 0, VOCAB)
    prompts = [shared + tokens_of(20, seed, VOCAB) for seed in range(8)]
    outputs = llm.generate(prompts, GREEDY)
    assert [out.num_cached_tokens for out in outputs] == [0] + [300] * 7
    for prompt, output in zip(prompts, outputs, strict=True):
        judge.greedy(prompt, output.outputs[0].token_ids)
    assert llm.stats()["tokens"] < 300 + 8 * (20 + 8) + 10


def test_n_completions_and_the_cache(mute: tuple[Path, Judge]) -> None:
    llm = make(mute)
    prompt = tokens_of(100, 0, VOCAB)
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=8)
    cold, warm = (llm.generate([prompt], params)[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 99)
    assert [one.token_ids for one in cold.outputs] == [one.token_ids for one in warm.outputs]


def test_salts_marks_and_requests_that_leave_nothing(mute: tuple[Path, Judge]) -> None:
    llm = make(mute)
    prompt = tokens_of(100, 0, VOCAB)
    assert cached(llm, prompt, no_store=True) == 0
    assert cached(llm, prompt, cache_salt="a", cache_control=[7]) == 0
    assert cached(llm, prompt, cache_salt="b") == 0
    assert cached(llm, prompt, cache_salt="a", no_store=True) == 99
    assert cached(llm, prompt[:7] + tokens_of(30, 5, VOCAB), cache_salt="a") == 7


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"cache_salt": ""}, "cache_salt='' must be a string that is not empty"),
        ({"cache_salt": 3}, "cache_salt=3 must be"),
        ({"no_store": 1}, "no_store=1 must be True or False"),
        ({"cache_control": "ab"}, "cache_control='ab' must be a list"),
        ({"cache_control": [0]}, "cache_control has 0; a position is"),
        ({"cache_control": [True]}, "cache_control has True"),
        ({"cache_control": [101]}, "cache_control has 101, but the prompt has 100 tokens"),
    ],
)
def test_wrong_wishes(mute: tuple[Path, Judge], wishes: dict[str, Any], message: str) -> None:
    llm = make(mute)
    with pytest.raises(RequestError, match=message):
        llm.generate([tokens_of(100, 0, VOCAB)], GREEDY, **wishes)
    assert not llm.core.has_work


def test_a_mark_may_stand_at_the_prompt_s_end() -> None:
    CacheWishes(cache_control=[1, 100]).check_prompt(100)


def test_reset_forgets_everything(mute: tuple[Path, Judge]) -> None:
    """DS-11: also what a request that runs meanwhile would leave."""
    llm = make(mute)
    prompt = tokens_of(100, 0, VOCAB)
    cached(llm, prompt)
    stream = llm.stream(prompt, GREEDY)
    next(stream)
    llm.reset_prefix_cache()
    list(stream)
    stats = llm.stats()
    assert stats["prefix"]["checkpoints"] == 0
    assert [stats[kind]["cached"] for kind in ("slabs", "pages", "slots")] == [0, 0, 0]
    assert cached(llm, prompt) == 0


def test_stats_say_what_was_reused_and_why_not_more(mute: tuple[Path, Judge]) -> None:
    llm = make(mute)
    prompt = tokens_of(100, 0, VOCAB)
    cached(llm, prompt)
    cached(llm, prompt)
    cached(llm, prompt[:90] + tokens_of(10, 1, VOCAB))
    stats = llm.stats()
    prefix = stats["prefix"]
    assert (prefix["queries"], prefix["query_tokens"], prefix["hit_tokens"]) == (3, 300, 99)
    assert prefix["lost"]["one_token"] == 1 and prefix["lost"]["no_checkpoint"] == 90
    assert 0 < prefix["hit_flops"] < prefix["query_flops"]
    for kind in ("slabs", "pages", "slots"):
        assert stats[kind]["used"] == 0 < stats[kind]["cached"]
        assert stats[kind]["total"] >= stats[kind]["cached"] + stats[kind]["free"]


def test_a_request_whose_logits_are_not_finite_leaves_nothing(mute: tuple[Path, Judge]) -> None:
    """DS-08: nothing of it is registered, and all later ones are right."""
    judge = mute[1]
    llm = make(mute, debug=False)
    core = llm.core
    prompt = tokens_of(100, 0, VOCAB)
    id_ = core.add(prompt, SamplingParams(temperature=0, max_tokens=30))
    output = core.requests[id_].output
    for _ in range(5):
        core.step()
    (request,) = core.scheduler.requests.values()
    core.parts.storage.poison("slot", [request.slot])
    while core.has_work:
        core.step()
    assert output.outputs[0].finish_reason == "error"
    assert llm.stats()["prefix"]["checkpoints"] == 0
    prompts = [prompt, [*prompt[:90], 1, 2, 3]]
    outputs = llm.generate(prompts, GREEDY)
    for asked, after in zip(prompts, outputs, strict=True):
        judge.greedy(asked, after.outputs[0].token_ids)


def test_a_step_behind_the_last_one_spoils_what_was_left(
    mute: tuple[Path, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps overlap: when the stop is seen, the next one is on its way, and its logits are not finite."""
    llm = make(mute, async_scheduling=True)
    core, prompt = llm.core, tokens_of(100, 0, VOCAB)
    tokens = llm.generate([prompt], GREEDY)[0].outputs[0].token_ids
    stop = tokens[4]
    last = tokens.index(stop)
    llm.reset_prefix_cache()
    steps, plain = [], core.parts.forward.last_logits

    def spoilt(*given: Any) -> torch.Tensor:
        logits = plain(*given)
        steps.append(len(steps))
        return logits * float("nan") if len(steps) == last + 2 else logits

    monkeypatch.setattr(core.parts.forward, "last_logits", spoilt)
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop])
    (output,) = llm.generate([prompt], params)
    assert output.outputs[0].token_ids == tokens[: last + 1]
    assert llm.stats()["prefix"]["checkpoints"] > 0
    core.settle()
    assert len(steps) == last + 2
    assert llm.stats()["prefix"]["checkpoints"] == 0


def test_a_step_that_fails_empties_the_cache(
    mute: tuple[Path, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make(mute)
    prompt = tokens_of(100, 0, VOCAB)
    cached(llm, prompt)
    launch = llm.core.runner.launch

    def fail(plan: Any) -> Any:
        monkeypatch.setattr(llm.core.runner, "launch", launch)
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(llm.core.runner, "launch", fail)
    (output,) = llm.generate([prompt], GREEDY)
    assert output.outputs[0].finish_reason == "error"
    assert llm.stats()["prefix"]["checkpoints"] == 0
    assert cached(llm, prompt) == 0 and cached(llm, prompt) == 99


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_little_memory_and_rotating_sessions(mute: tuple[Path, Judge], async_scheduling: bool) -> None:
    """ME-07: checkpoints are skipped or leave, nothing fails, and answers are those of a cold engine."""
    judge = mute[1]
    llm = make(mute, memory="300KiB", max_model_len=200, max_num_seqs=4, async_scheduling=async_scheduling)
    histories = [tokens_of(70, seed, VOCAB) for seed in range(6)]
    for turn in range(3):
        outputs = llm.generate(histories, GREEDY)
        for prompt, output in zip(histories, outputs, strict=True):
            assert output.outputs[0].finish_reason == "length"
            judge.greedy(prompt, output.outputs[0].token_ids)
        histories = [
            [*prompt, *out.outputs[0].token_ids, *tokens_of(9, turn, VOCAB)]
            for prompt, out in zip(histories, outputs, strict=True)
        ]
    prefix = llm.stats()["prefix"]
    assert prefix["evicted"] + prefix["refused"] > 0
    llm.check()


def test_the_async_engine(mute: tuple[Path, Judge]) -> None:
    prompt = tokens_of(100, 0, VOCAB)

    async def scene() -> list[int]:
        hits = []
        async with AsyncEngine(mute[0], memory="8MiB", max_model_len=1024) as engine:
            for salt in ("a", "b", "a"):
                async for _ in engine.generate(prompt, GREEDY, cache_salt=salt):
                    pass
                hits.append((await engine.stats())["prefix"]["hit_tokens"])
            shown = await engine.cache_snapshot()
            assert shown["account"] == (await engine.stats())["prefix"]
            assert [space["salted"] for space in shown["namespaces"]] == [True, True]
            await engine.reset_prefix_cache()
            assert (await engine.stats())["prefix"]["checkpoints"] == 0
        return hits

    assert asyncio.run(scene()) == [0, 0, 99]


def test_every_turn_of_a_chat_reuses_its_stable_history() -> None:
    """PN-04, PN-15: what the next turn shares is known to the token, with thinking stripped from older turns.

    Eight conversations of six turns over one system part: a turn hits where the template says that the turn
    before agrees with it, and a new conversation behind the system part.
    """
    llm = LLM(memory="128MiB", max_model_len=2048, device="cpu")
    system = {"role": "system", "content": "You answer in few words, and never say more than is asked. " * 8}
    params = SamplingParams(temperature=0, max_tokens=12)
    for conversation in range(8):
        messages, stable = [system], 0
        for turn in range(6):
            messages.append({"role": "user", "content": f"Question {turn} of {conversation}: what is it?"})
            read = llm.read_chat(messages)
            system_end, boundary = read.boundaries
            assert system_end >= 64 and boundary == len(read.tokens) - 2  # before <think> and a line's end
            (output,) = llm.chat(messages, params)
            assert output.prompt_token_ids == read.tokens
            known = stable if turn else system_end if conversation else 0
            assert output.num_cached_tokens == known
            stable = boundary
            messages.append({"role": "assistant", "content": output.outputs[0].text})
    llm.check()


def test_a_mark_on_a_message_is_a_position() -> None:
    llm = LLM(memory="64MiB", max_model_len=2048, device="cpu")
    first = {"role": "user", "content": "A document. " * 20, "cache_control": {"type": "ephemeral"}}
    read = llm.read_chat([first])
    (mark,) = read.marks
    assert 0 < len(read.tokens) - mark < 10
    params = SamplingParams(temperature=0, max_tokens=4)
    llm.chat([first], params)
    question = {"role": "user", "content": "What does it say?"}
    (output,) = llm.chat([first, question], params)
    assert output.num_cached_tokens == mark


def test_a_warning_when_there_can_be_no_hit(caplog: pytest.LogCaptureFixture) -> None:
    """A slab of denim-tiny holds one slot: three of them are a request, a checkpoint and their pages."""

    def warned(slabs: int, policy: str, **options: Any) -> bool:
        caplog.clear()
        LLM(device="cpu", memory=slabs * 408 * 1024, checkpoint_policy=policy, **options)
        return any("can never be reused" in record.getMessage() for record in caplog.records)

    assert warned(2, "auto")
    assert not warned(2, "none") and not warned(3, "auto")
    assert warned(64, "all", max_model_len=800) and not warned(64, "all", max_model_len=2000)


def test_a_long_part_with_tools_gives_the_same_calls_warm_and_cold() -> None:
    """PH-10: five questions behind one description of tools; the first 20 tokens of each are a cold run's."""
    tools = "".join(f'{{"name": "tool_{i}", "parameters": {{"x": "integer"}}}}\n' for i in range(40))
    system = {"role": "system", "content": f"You may call these tools, one call an answer:\n{tools}"}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    warm, cold = (
        LLM(memory="64MiB", max_model_len=2048, device="cpu", dtype="float32", checkpoint_policy=policy)
        for policy in ("auto", "none")
    )
    for number in range(5):
        messages = [
            system,
            {"role": "user", "content": f"What is {number} and {number + 1}? Use tool_{number}."},
        ]
        read = warm.read_chat(messages)
        assert read.boundaries[0] > 800  # behind the system part
        (hit,), (miss,) = (llm.chat(messages, params) for llm in (warm, cold))
        assert hit.num_cached_tokens == (read.boundaries[0] if number else 0)
        assert hit.outputs[0].token_ids == miss.outputs[0].token_ids
