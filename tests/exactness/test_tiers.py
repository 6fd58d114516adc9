"""Requests that begin from checkpoints in host memory or in files give the tokens of a cold run, whatever
happens meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from denim.engine.cache_wishes import CacheWishes
from denim.engine.core import EngineCore
from denim.errors import ConfigError
from denim.sampling_params import SamplingParams
from denim.spec.mixers import RECORD_ROLES
from tests.exactness.conftest import Model
from tests.exactness.harness import Case, Way, greedy, make_core, run, tokens_of
from tests.exactness.test_prefixes import PARAMS, SHARED, ask, judged, leave
from tests.tiny import VOCAB

HOST = {"host_memory": "16MiB"}


def core_of(
    model: Model, longest: int = 600, swap: bool = False, slabs: int | None = None, **options: Any
) -> EngineCore:
    way = Way(HOST | options, slabs=slabs, pushed=True, swap=swap)
    return make_core(model.folder, [greedy([0] * longest, 20)], way)


def push_out(core: EngineCore) -> None:
    """All checkpoints leave the device, at the head of a step that leaves none."""
    cache = core.scheduler.prefixes.cache
    cache.evict_all()
    core.add([1, 2], SamplingParams(max_tokens=1))
    while core.has_work:
        core.step()


def restarted(core: EngineCore, model: Model, **options: Any) -> EngineCore:
    """Another process on the same files."""
    directory = core.options.disk_cache
    core.close()
    return core_of(model, disk_cache=directory, **options)


def loaded(core: EngineCore) -> int:
    return core.stats()["tiers"]["host"]["loaded_tokens"]


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("length", [1, 3, 4, 15, 16, 17, 63, 64, 65, SHARED])
def test_a_checkpoint_of_any_length(models: dict[str, Model], kind: str, length: int) -> None:
    """OF-01, OF-13: state and pages go out together and come back together, at any position."""
    core = core_of(models[kind])
    shared = tokens_of(length, 0, VOCAB)
    leave(core, shared)
    push_out(core)
    output = judged(models[kind], ask(core, shared + tokens_of(20, 1, VOCAB)))
    assert output.num_cached_tokens == length == loaded(core)


def test_every_tensor_of_a_slot_comes_back(dense: Model) -> None:
    """OF-04: byte for byte, whatever kind of layer it belongs to; records are written into it before."""
    core = core_of(dense)
    kept = [place for place in core.layout.slot_tensors if place.role not in RECORD_ROLES]
    shared = tokens_of(100, 0, VOCAB)
    leave(core, shared)

    def content() -> list[torch.Tensor]:
        (node,) = [n for n in core.scheduler.prefixes.cache.tree.nodes() if n.checkpoint and n.end == 100]
        slot = node.checkpoint.slot
        return [core.parts.storage.state(place.layer, place.role)[slot].clone() for place in kept]

    before = content()
    push_out(core)
    ask(core, [*shared, 1, 2, 3])
    assert loaded(core) == 100
    assert all(torch.equal(a, b) for a, b in zip(before, content(), strict=True))


def test_a_needle_at_the_beginning(dense: Model) -> None:
    """OF-04: what comes back is what the first tokens left, and not another request's."""
    core = core_of(dense)
    first, second = (tokens_of(SHARED, seed, VOCAB) for seed in (0, 1))
    for prompt in (first, second):
        leave(core, prompt)
    push_out(core)
    for prompt in (second, first):
        judged(dense, ask(core, prompt + tokens_of(5, 9, VOCAB)))
    assert loaded(core) == 2 * SHARED


@pytest.mark.parametrize("answer_tokens", range(1, 7))
def test_recorded_updates_are_written_before_a_state_leaves(dense: Model, answer_tokens: int) -> None:
    core = core_of(dense, deferred_writes=4)
    prompt = tokens_of(100, 0, VOCAB)
    answer = ask(core, prompt, SamplingParams(temperature=0, max_tokens=answer_tokens, ignore_eos=True))
    history = [*prompt, *answer.outputs[0].token_ids]
    push_out(core)
    output = judged(dense, ask(core, history + tokens_of(10, 3, VOCAB)))
    assert output.num_cached_tokens == len(history) - 1 == loaded(core)


@pytest.mark.parametrize("swap", [True, False], ids=["swapped", "recomputed"])
@pytest.mark.parametrize("steps", [1, 2, 6])
def test_preempted_after_it_came_up(dense: Model, swap: bool, steps: int) -> None:
    core = core_of(dense, 300, swap, max_num_seqs=1, swap_space="1GiB" if swap else 0)
    prompt = tokens_of(130, 0, VOCAB)
    leave(core, prompt)
    push_out(core)
    output = core.requests[core.add(prompt + tokens_of(70, 1, VOCAB), PARAMS)].output
    while not any(request.computed for request in core.scheduler.requests.values()):
        core.step()
    for _ in range(steps):
        core.step()
    core.add([1, 2], SamplingParams(max_tokens=2), priority=-1)
    core.step()
    cache = core.scheduler.prefixes.cache
    cache.evict_all()
    while core.has_work:
        core.step()
    stats = core.stats()
    assert stats["preempted_swap" if swap else "preempted_recompute"] == 1
    assert judged(dense, output).num_cached_tokens == 130


@pytest.mark.parametrize("steps", range(6))
def test_aborted_while_it_comes_up_or_stores(dense: Model, steps: int) -> None:
    core = core_of(dense, max_num_batched_tokens=64)
    prompt = tokens_of(300, 0, VOCAB)
    leave(core, prompt[:200])
    push_out(core)
    id_ = core.add(prompt, PARAMS)
    for _ in range(steps):
        core.step()
    core.abort(id_)
    core.check()
    push_out(core)
    judged(dense, ask(core, prompt))
    judged(dense, ask(core, prompt[:250]))
    assert core.stats()["slots"]["used"] == 0


@pytest.mark.parametrize("n", [1, 3])
def test_siblings_and_forks(dense: Model, n: int) -> None:
    """PN-10: all that share what comes up hit, and all completions of one request are right."""
    core = core_of(dense)
    shared = tokens_of(SHARED, 0, VOCAB)
    leave(core, shared)
    push_out(core)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, n=n)
    prompts = [shared + tokens_of(7, seed, VOCAB) for seed in range(4)]
    outputs = [core.requests[core.add(prompt, params)].output for prompt in prompts]
    while core.has_work:
        core.step()
    for output in outputs:
        assert output.num_cached_tokens == SHARED
        for answer in output.outputs:
            dense.judge.greedy(output.prompt_token_ids, answer.token_ids)
    assert core.stats()["tiers"]["host"]["loaded"] == 1


def test_evicted_and_back_again_many_times(dense: Model) -> None:
    """A device that holds few conversations, a host that holds all ten."""
    core = core_of(dense, 200, slabs=3)
    histories = [tokens_of(60, seed, VOCAB) for seed in range(10)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for turn in range(3):
        for place, history in enumerate(histories):
            output = judged(dense, ask(core, history, params))
            assert output.num_cached_tokens == (len(history) - 10 if turn else 0)
            answer = output.outputs[0].token_ids
            histories[place] = [*history, *answer, *tokens_of(9, turn, VOCAB)]
    assert core.stats()["tiers"]["host"]["loaded"] > 10
    core.check()


def test_random_draws_do_not_depend_on_tiers(dense: Model) -> None:
    prompt = tokens_of(150, 3, VOCAB)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=20, repetition_penalty=1.2)
    (cold,) = run(dense.folder, [Case(prompt, params)]).outputs
    core = core_of(dense)
    ask(core, prompt, params)
    push_out(core)
    output = ask(core, prompt, params)
    assert output.num_cached_tokens == 149 == loaded(core)
    assert output.outputs[0].token_ids == cold.outputs[0].token_ids


def test_no_host_memory_is_left_behind(dense: Model) -> None:
    core = core_of(dense)
    for seed in range(4):
        leave(core, tokens_of(90, seed, VOCAB))
    push_out(core)
    memory = core.parts.tiers.memory
    assert len(memory._free) < memory.num_blocks
    core.reset_prefix_cache()
    core.check()
    assert len(memory._free) == memory.num_blocks
    assert ask(core, tokens_of(90, 0, VOCAB)).num_cached_tokens == 0


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 65, SHARED])
def test_prefixes_survive_a_restart(dense: Model, tmp_path: Path, length: int) -> None:
    """OF-11, PN-16: what was saved hits in the next process, at its end and where it parts from another."""
    core = core_of(dense, disk_cache=tmp_path)
    shared = tokens_of(length, 0, VOCAB)
    leave(core, shared)
    core = restarted(core, dense)
    output = judged(dense, ask(core, shared + tokens_of(20, 1, VOCAB)))
    assert output.num_cached_tokens == length == core.stats()["tiers"]["disk"]["loaded_tokens"]
    fork = judged(dense, ask(core, shared + tokens_of(20, 2, VOCAB)))
    assert fork.num_cached_tokens == length
    core.close()


def test_a_conversation_goes_on_after_a_restart(dense: Model, tmp_path: Path) -> None:
    """OF-10, OF-17: the answer's tokens are reused too, and reading and going on change no file."""
    core = core_of(dense, disk_cache=tmp_path)
    history = tokens_of(80, 0, VOCAB)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for turn in range(3):
        output = judged(dense, ask(core, history, params))
        assert output.num_cached_tokens == (len(history) - 6 if turn else 0)
        history = [*history, *output.outputs[0].token_ids, *tokens_of(5, turn, VOCAB)]
        core.close()
        before = {path.name: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
        core = core_of(dense, disk_cache=tmp_path)
        judged(dense, ask(core, history[:-1], params))
        core.scheduler.prefixes.write_out()
        after = {path.name: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
        assert before.items() <= after.items()
    core.close()


def test_a_process_that_is_killed_leaves_what_had_gone_out(dense: Model, tmp_path: Path) -> None:
    """Without a farewell: what host memory held is in files, and half-written ones are no harm."""
    core = core_of(dense, disk_cache=tmp_path)
    first, second = (tokens_of(90, seed, VOCAB) for seed in (0, 1))
    leave(core, first)
    push_out(core)
    core.scheduler.prefixes.write_out()
    leave(core, second)
    core.parts.tiers.close()  # the lock goes with the process
    (tmp_path / "000000000099-state.safetensors.tmp").write_bytes(b"half")
    (tmp_path / "000000000098-state.safetensors").write_bytes(b"")
    core = core_of(dense, disk_cache=tmp_path)
    assert judged(dense, ask(core, [*first, 1, 2])).num_cached_tokens == 90
    assert judged(dense, ask(core, [*second, 1, 2])).num_cached_tokens == 0
    core.close()


@pytest.mark.parametrize("steps", range(5))
def test_aborted_while_files_are_read(dense: Model, tmp_path: Path, steps: int) -> None:
    core = core_of(dense, disk_cache=tmp_path)
    prompt = tokens_of(200, 0, VOCAB)
    leave(core, prompt)
    core = restarted(core, dense)
    id_ = core.add([*prompt, 1], PARAMS)
    for _ in range(steps):
        core.step()
    core.abort(id_)
    core.check()
    assert judged(dense, ask(core, [*prompt, 1])).num_cached_tokens == 200
    core.close()


def test_salts_are_apart_in_files(dense: Model, tmp_path: Path) -> None:
    """LO-06."""
    core = core_of(dense, disk_cache=tmp_path)
    prompt = tokens_of(70, 0, VOCAB)
    ask(core, prompt, cache=CacheWishes("a"))
    core = restarted(core, dense)
    for salt, cached in (("b", 0), (None, 0), ("a", 69)):
        assert judged(dense, ask(core, prompt, cache=CacheWishes(salt))).num_cached_tokens == cached
    core.close()


def test_reset_forgets_files_too(dense: Model, tmp_path: Path) -> None:
    core = core_of(dense, disk_cache=tmp_path)
    leave(core, tokens_of(70, 0, VOCAB))
    core = restarted(core, dense)
    core.reset_prefix_cache()
    assert ask(core, tokens_of(71, 0, VOCAB)).num_cached_tokens == 0
    core.reset_prefix_cache()
    core.close()
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ("moe", "model"),
        ("tied", "model"),
        ({"page_size": 4}, "page_size"),
        ({"kv_dtype": "bfloat16"}, "kv_dtype"),
        ({"checkpoint_dtype": "int8"}, "checkpoint_dtype"),
    ],
)
def test_files_of_another_model_or_layout(
    models: dict[str, Model], tmp_path: Path, other: Any, named: str
) -> None:
    """Refused at the start, with what differs; the same model with another memory or budget is welcome."""
    core = core_of(models["dense"], disk_cache=tmp_path)
    leave(core, tokens_of(70, 0, VOCAB))
    core.close()
    model = models[other] if isinstance(other, str) else models["dense"]
    options = {} if isinstance(other, str) else other
    with pytest.raises(ConfigError, match=f"belongs to something else .*{named}"):
        core_of(model, disk_cache=tmp_path, **options)
    core = core_of(models["dense"], 500, disk_cache=tmp_path, max_num_batched_tokens=64, deferred_writes=4)
    assert ask(core, [*tokens_of(70, 0, VOCAB), 1]).num_cached_tokens == 70
    core.close()


def test_records_are_written_once_where_a_checkpoint_leaves_as_somebody_begins_from_it(
    dense: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one step a request begins from a state with recorded updates, and that goes to host memory."""
    core = core_of(dense, deferred_writes=6)
    prompt = tokens_of(70, 0, VOCAB)
    history = [*prompt, *ask(core, prompt).outputs[0].token_ids]
    cache, prefixes = core.scheduler.prefixes.cache, core.scheduler.prefixes
    assert max(core.arena.tag(n.checkpoint.slot).pending for n in cache.tree.nodes() if n.checkpoint) > 1
    reserve = prefixes.reserve  # called between admission and the dealing of spans

    def crowded(*given: Any) -> None:
        cache.evict_all()
        reserve(*given)

    monkeypatch.setattr(prefixes, "reserve", crowded)
    id_ = core.add(history + tokens_of(3, 1, VOCAB), PARAMS)
    output = core.requests[id_].output
    core.step()
    monkeypatch.undo()
    while core.has_work:
        core.step()
    assert judged(dense, output).num_cached_tokens == len(history) - 1
    push_out(core)
    output = judged(dense, ask(core, history + tokens_of(3, 2, VOCAB)))
    assert output.num_cached_tokens == len(history) - 1 <= loaded(core)
