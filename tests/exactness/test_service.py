"""An engine in use for long, with as much memory as its load needs and little more."""

from __future__ import annotations

import random
from collections.abc import Sequence

from denim.engine.core import EngineCore
from denim.memory.layout import ArenaLayout
from denim.sampling_params import SamplingParams
from tests.exactness.conftest import Model
from tests.exactness.harness import COLD, Case, Run, Way, cold_tokens, greedy, make_core, run, tokens_of
from tests.exactness.judge import judge_run
from tests.tiny import VOCAB

SEATS = 6
TURNS = 30


def slabs_for(layout: ArenaLayout, requests: int, tokens: int) -> int:
    return layout.slabs_for({name: n * requests for name, n in layout.need(tokens).items()})


def snug_core(model: Model, cases: Sequence[Case], seats: int) -> EngineCore:
    """An engine whose arena holds `seats` requests of the longest kind, and the free page for each running
    one that admission asks for."""
    way = Way(options={"max_num_seqs": seats})
    roomy = make_core(model.folder, cases, way)
    tokens = roomy.scheduler.config.max_model_len + seats * roomy.layout.page_size
    return make_core(model.folder, cases, Way(way.options, slabs_for(roomy.layout, seats, tokens)))


def test_every_seat_taken_for_hundreds_of_steps(dense: Model) -> None:
    """ME-11: whoever ends is replaced at once; all seats are in use in every step, and nobody gives way."""
    chance = random.Random(0)
    cases = [
        Case(
            tokens_of(chance.randrange(1, 60), place, VOCAB),
            SamplingParams(temperature=float(place % 2), max_tokens=chance.randrange(5, 30), seed=place),
        )
        for place in range(110)
    ]
    core = snug_core(dense, cases, SEATS)
    outputs = []
    for case in cases:
        outputs.append(core.requests[core.add(*case)].output)
        while len(core.requests) == SEATS:
            core.step()
            assert core.stats()["running"] == len(core.requests)
    assert core.steps > 200
    while core.has_work:
        core.step()
    stats = core.stats()
    assert [stats[kind]["used"] for kind in ("slabs", "pages", "slots")] == [0, 0, 0]
    assert stats["preempted_swap"] == stats["preempted_recompute"] == 0
    cold = cold_tokens(dense.folder, cases, forks=1)
    judge_run(dense.judge, cases, Run(outputs, [0] * len(cases), stats), cold)


def test_a_growing_chat_in_memory_for_one(dense: Model) -> None:
    """ME-15: each user turn is edited once; memory is flat, and replies are those of a cold engine."""
    user, reply = 18, 8
    longest = TURNS * (user + reply)
    core = snug_core(dense, [greedy([0] * (longest - reply), reply)], seats=1)
    assert core.arena.num_slabs < slabs_for(core.layout, 2, longest)
    history: list[int] = []
    cases, outputs, at_rest = [], [], []
    for turn in range(TURNS):
        for edit in range(2):
            case = greedy(history + tokens_of(user, 2 * turn + edit, VOCAB), reply)
            output = core.requests[core.add(*case)].output
            while core.has_work:
                core.step()
            cases.append(case)
            outputs.append(output)
            stats = core.stats()
            at_rest.append({kind: stats[kind]["used"] for kind in ("slabs", "pages", "slots")})
        history = [*case.prompt, *output.outputs[0].token_ids]
    assert len(history) == longest
    assert core.swap.used_bytes == 0
    assert all(used == {"slabs": 0, "pages": 0, "slots": 0} for used in at_rest)
    judge_run(dense.judge, cases, Run(outputs, [0] * len(cases), stats))
    cold = run(dense.folder, cases, COLD)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in cold.outputs]
