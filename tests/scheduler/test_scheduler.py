"""The scheduler's rules one by one, and the public cases that a scheduler alone can show."""

from __future__ import annotations

import pytest

from denim.errors import ConfigError, RequestError
from denim.memory.layout import PAGE, SLOT
from denim.scheduler.config import SchedulerConfig
from denim.scheduler.request import Family, Status
from tests.memory.layouts import PAGE_SIZE, make_layout
from tests.scheduler.toy import ToyEngine, expected_tokens, output_of


def prompt_of(n: int, seed: int = 1) -> list[int]:
    return [(seed * 31 + i * 7) % 97 for i in range(n)]


def spans_of(engine: ToyEngine, request_id: int) -> list[tuple[int, int]]:
    return [(s.start, s.end) for plan in engine.plans for s in plan.spans if s.request_id == request_id]


# Spans


def test_segments_end_on_the_chunk_grid_or_at_the_prompts_end():
    engine = ToyEngine(chunk_size=8, max_num_batched_tokens=20)
    engine.add(prompt_of(45), 3)
    engine.drain()
    assert spans_of(engine, 0) == [(0, 16), (16, 32), (32, 45), (45, 46), (46, 47)]
    engine.check_exact()


def test_decode_rows_come_first_in_every_step():
    """A long prompt takes what decode rows leave; none of them waits for it."""
    engine = ToyEngine(num_slabs=20, chunk_size=4, max_num_batched_tokens=10)
    for seed in range(2):
        engine.add(prompt_of(3, seed), 30, seed)
    engine.step()
    engine.add(prompt_of(60), 2)
    for _ in range(7):
        engine.step()
        lengths = [span.length for span in engine.plans[-1].spans]
        assert lengths == [1, 1, 8]
    engine.drain()
    engine.check_exact()


@pytest.mark.parametrize("budget", [1, 2, 3, 8, 16, 63, 64, 65])
def test_cp_07_any_budget_progresses(budget):
    """CP-07: prefill budgets below, at and above the chunk; below it a segment takes what it gets."""
    engine = ToyEngine(num_slabs=30, chunk_size=64, max_num_batched_tokens=budget)
    for seed in range(3):
        engine.add(prompt_of(3 * 64 + 7, seed), 5, seed)
    engine.drain()
    engine.check_exact()
    engine.check_empty()
    longest = max(end - start for start, end in spans_of(engine, 0))
    assert longest == (budget if budget < 64 else 64)


def test_decode_rows_that_leave_less_than_a_chunk_do_not_stop_prefill():
    engine = ToyEngine(num_slabs=30, chunk_size=8, max_num_batched_tokens=8)
    engine.add(prompt_of(3), 30)
    engine.step()
    engine.add(prompt_of(20), 2)
    engine.drain()
    assert spans_of(engine, 1)[:3] == [(0, 7), (7, 14), (14, 20)]
    engine.check_exact()


def test_a_step_works_on_so_many_prompts_and_the_others_wait_their_turn():
    engine = ToyEngine(num_slabs=60, chunk_size=4, max_prefill_spans=2)
    for i in range(5):
        engine.add(prompt_of(6, i), 3, seed=i)
    engine.drain()
    begun = [[span.request_id for span in plan.spans if len(span.tokens) > 1] for plan in engine.plans]
    assert [ids for ids in begun if ids] == [[0, 1], [2, 3], [4]]
    engine.check_exact()


def test_cp_09_copies_of_one_prompt_are_cut_at_the_same_places():
    """CP-09: 8 copies in one batch, budget not a multiple of anything: every cut lies on the grid."""
    engine = ToyEngine(num_slabs=60, chunk_size=8, max_num_batched_tokens=50)
    for _ in range(8):
        engine.add(prompt_of(77), 10)
    engine.drain()
    cuts = {end for i in range(8) for _, end in spans_of(engine, i) if end < 77}
    assert cuts and all(cut % 8 == 0 for cut in cuts)
    assert len({tuple(output_of(request)) for request in engine.requests.values()}) == 1


def test_ds_09_a_prompt_of_one_token_reads_no_slot():
    """DS-09: it has the shape of a decode row but nothing behind it; recycled slots stay unread."""
    engine = ToyEngine(num_slabs=4)
    for i in range(20):
        engine.add([i], 3, seed=i)
    engine.drain()
    first = {span.request_id: span for plan in reversed(engine.plans) for span in plan.spans}
    assert all(span.slot_in == -1 and span.start == 0 for span in first.values())
    engine.check_exact()


def test_ds_06_rows_join_and_leave_a_running_batch():
    """DS-06: later rows join at step 5, one leaves, another takes its slot."""
    engine = ToyEngine(num_slabs=12)
    engine.add(prompt_of(9, 0), 40, 0)
    for _ in range(5):
        engine.step()
    engine.add(prompt_of(5, 1), 40, 1)
    engine.add(prompt_of(6, 2), 40, 2)
    for _ in range(4):
        engine.step()
    slot = engine.requests[0].slot
    engine.scheduler.finish(0, "stop")
    engine.add(prompt_of(7, 3), 40, 3)
    engine.step()
    assert engine.requests[3].slot == slot
    engine.drain()
    engine.check_exact()


def test_all_logits_cover_the_prompt_once():
    """Each prompt token but the first is scored once, also when the prompt is computed again."""
    engine = ToyEngine(num_slabs=4, swap_bytes=0, chunk_size=4, max_num_batched_tokens=8)
    request = engine.add(prompt_of(30), 4, prompt_logprobs=3)
    engine.step()
    engine.step()
    engine.add(prompt_of(30, 2), 1, priority=-1)
    engine.drain()
    assert request.preemptions == 1 and engine.scored[0] == list(range(29))
    spans = [span for plan in engine.plans for span in plan.spans if span.all_logits]
    assert {span.top_logprobs for span in spans} == {3}
    engine.check_exact()


def test_a_prompt_computed_again_is_scored_from_where_the_first_time_ended():
    """The second time has the budget to itself, so its segments would step over that position."""
    engine = ToyEngine(num_slabs=4, swap_bytes=0, chunk_size=4, max_num_batched_tokens=8)
    engine.add(prompt_of(1), 3, priority=-1)
    engine.step()
    request = engine.add(prompt_of(30), 4, prompt_logprobs=3)
    engine.step()
    engine.add(prompt_of(40, 2), 1, priority=-1)
    engine.drain()
    assert request.preemptions == 1
    assert spans_of(engine, 1)[:4] == [(0, 4), (0, 4), (4, 12), (12, 20)]
    engine.check_exact()


# Admission


def test_memory_is_taken_when_there_are_tokens_to_spend():
    engine = ToyEngine(num_slabs=20, chunk_size=4, max_num_batched_tokens=8)
    engine.add(prompt_of(20), 3)
    later = engine.add(prompt_of(20, 2), 3)
    for status in (Status.WAITING, Status.WAITING, Status.RUNNING):
        plan = engine.begin()
        assert later.status is status
        engine.complete(plan)
    engine.drain()
    engine.check_exact()


def test_me_13_what_is_used_is_the_sum_of_what_requests_need():
    """ME-13: used pages are the sum of ceil(tokens / page_size), used slots the number of requests."""
    engine = ToyEngine(num_slabs=20)
    for n in (1, 4, 5, 17):
        engine.add(prompt_of(n), 10)
    for _ in range(5):
        engine.step()
        computed = [request.computed for request in engine.requests.values()]
        stats = engine.arena.stats()
        assert stats["pages"]["used"] == sum(-(-c // PAGE_SIZE) for c in computed)
        assert stats["slots"]["used"] == len(computed)


def test_me_06_nobody_waits_while_memory_is_free():
    """ME-06: with more load than fits, a queue means that the first of it really has no room."""
    engine = ToyEngine(num_slabs=7, max_num_batched_tokens=1000)
    for seed in range(30):
        engine.add(prompt_of(4 + seed % 9, seed), 6, seed)
    queued = 0
    while (plan := engine.begin()) is not None:
        waiting = [r for r in engine.scheduler.requests.values() if r.status is not Status.RUNNING]
        if waiting:
            queued += 1
            head = min(waiting, key=lambda r: r.key)
            pages = -(-len(head.tokens) // PAGE_SIZE) + engine.scheduler.stats()["running"]
            assert not engine.arena.can_alloc({SLOT: 1, PAGE: pages})
        engine.complete(plan)
    assert queued > 10
    engine.check_exact()


def test_me_01_more_seats_than_slots():
    """ME-01: max_num_seqs beyond what memory holds is no error; memory is the limit."""
    engine = ToyEngine(num_slabs=4, max_num_seqs=256)
    for seed in range(10):
        engine.add(prompt_of(4, seed), 8, seed)
    engine.drain()
    assert max(len(plan.spans) for plan in engine.plans) == 3
    engine.check_exact()


@pytest.mark.parametrize("layout", [(5, 1), (3, 2), (1, 4), (2, 1), (1, 1), (4, 0), (0, 2)])
@pytest.mark.parametrize("extra", range(5))
def test_me_14_bs_06_every_pool_from_the_smallest_up(layout, extra):
    """ME-14, BS-06: at the smallest arena and each size above, the longest request that is accepted runs,
    alone and with others, and one token more is refused with the numbers."""
    sizes = make_layout(*layout)
    smallest = sizes.slabs_for(sizes.need(1))
    engine = ToyEngine(num_slabs=smallest + extra, layout=sizes, max_model_len=200)
    longest = engine.longest_request()
    for seed in range(6):
        prompt = prompt_of(longest // 2 or 1, seed)
        engine.add(prompt, longest - len(prompt), seed)
    engine.add(prompt_of(1), 1)
    with pytest.raises(RequestError, match=f"{longest // 2 or 1} prompt tokens"):
        engine.add(prompt_of(longest // 2 or 1), longest)
    engine.drain()
    engine.check_exact()
    engine.check_empty()


def test_requests_that_never_fit_are_refused_with_numbers():
    engine = ToyEngine(num_slabs=3, max_model_len=50)
    with pytest.raises(RequestError, match=r"60 tokens, but max_model_len is 50"):
        engine.add(prompt_of(40), 20)
    with pytest.raises(
        RequestError, match=r"11 pages and 1 slot, which is 4 slabs; the arena has 3.* 40 tokens"
    ):
        engine.add(prompt_of(31), 10)
    engine.check_empty()
    assert engine.scheduler.requests == {}
    engine.add(prompt_of(30), 10)
    engine.drain()
    engine.check_exact()


def test_the_first_in_the_queue_is_not_overtaken_by_a_smaller_one():
    engine = ToyEngine(num_slabs=4)
    engine.add(prompt_of(20), 20)
    engine.step()
    big, small = engine.add(prompt_of(40), 2), engine.add(prompt_of(1), 1)
    for _ in range(10):
        engine.step()
        assert (big.status, small.status) == (Status.WAITING, Status.WAITING)
    engine.drain()
    engine.check_exact()


def test_better_priority_goes_first_and_takes_memory_from_worse():
    engine = ToyEngine(num_slabs=3)
    low = [engine.add(prompt_of(16, seed), 10, seed, priority=1) for seed in range(2)]
    engine.step()
    assert [r.status for r in low] == [Status.RUNNING, Status.WAITING]
    urgent = engine.add(prompt_of(30, 9), 4, 9, priority=0)
    plan = engine.begin()
    assert [s.request_id for s in plan.swap_out] == [low[0].id]
    assert urgent.status is Status.RUNNING and low[0].status is Status.SWAPPED
    engine.complete(plan)
    engine.drain()
    assert low[0].preemptions == 1 and low[1].preemptions == 0
    engine.check_exact()


def test_worse_or_equal_priority_takes_nothing():
    engine = ToyEngine(num_slabs=3)
    first = engine.add(prompt_of(20), 15, priority=0)
    engine.step()
    engine.add(prompt_of(20), 10, priority=0)
    engine.add(prompt_of(20), 10, priority=5)
    engine.drain()
    assert first.preemptions == 0
    engine.check_exact()


def test_seats_are_limited():
    engine = ToyEngine(num_slabs=30, max_num_seqs=3)
    for seed in range(9):
        engine.add(prompt_of(4, seed), 5, seed)
    while engine.step():
        assert engine.scheduler.stats()["running"] <= 3
    engine.check_exact()


# Preemption


@pytest.mark.parametrize("swap_bytes", [0, 10**9])
def test_pr_01_pr_02_requests_that_give_way_again_and_again(swap_bytes):
    """PR-01, PR-02: four long answers in an arena for one and a half; slots change hands meanwhile."""
    engine = ToyEngine(num_slabs=12, layout=make_layout(2, 1), swap_bytes=swap_bytes)
    requests = [engine.add(prompt_of(8, seed), 70, seed) for seed in range(4)]
    slots = set()
    while engine.step():
        slots |= {(r.slot, r.id) for r in requests if r.slot >= 0}
    assert all(request.preemptions > 0 for request in requests[1:])
    assert len(slots) > len({slot for slot, _ in slots}), "no slot changed hands"
    engine.check_exact()
    engine.check_empty()


@pytest.mark.parametrize("generated", [1, 8, 31, 60])
@pytest.mark.parametrize("swap_bytes", [0, 10**9])
def test_pr_05_pr_06_resume_after_so_many_generated_tokens(generated, swap_bytes):
    """PR-05, PR-06: what was generated is prefilled again in several pieces; nothing repeated or lost."""
    engine = ToyEngine(num_slabs=7, swap_bytes=swap_bytes, chunk_size=4, max_num_batched_tokens=16)
    request = engine.add(prompt_of(20), 61)
    while request.num_output < generated:
        engine.step()
    engine.add(prompt_of(80, 5), 3, seed=5, priority=-1)
    engine.drain()
    assert request.preemptions == 1 and request.num_output == 61
    starts = [start for start, _ in spans_of(engine, 0)]
    assert starts.count(0) == (2 if swap_bytes == 0 else 1)
    engine.check_exact()


def test_pr_07_a_step_of_resumed_requests_only():
    """PR-07: both running requests give way at once and resume in one step, with nothing new beside them."""
    engine = ToyEngine(num_slabs=5, swap_bytes=0, max_num_batched_tokens=1000)
    pair = [engine.add(prompt_of(12, seed), 12, seed) for seed in range(2)]
    for _ in range(4):
        engine.step()
    urgent = engine.add(prompt_of(70, 5), 1, seed=5, priority=-1)
    engine.step()
    assert [r.status for r in pair] == [Status.WAITING] * 2 and urgent.status is Status.FINISHED
    engine.step()
    assert [(s.start, s.end) for s in engine.plans[-1].spans] == [(0, 16), (0, 16)]
    engine.drain()
    engine.check_exact()


def test_recompute_is_chosen_where_it_is_cheaper_or_swap_is_full():
    for options, swaps in [
        ({"recompute_below": 0}, 1),
        ({"recompute_below": 1000}, 0),
        ({"swap_bytes": 100}, 0),
    ]:
        engine = ToyEngine(num_slabs=4, **options)
        engine.add(prompt_of(20), 10, priority=1)
        engine.step()
        engine.add(prompt_of(50), 10)
        engine.drain()
        stats = engine.scheduler.stats()
        assert (stats["preempted_swap"], stats["preempted_recompute"]) == (swaps, 1 - swaps)
        engine.check_exact()


def test_swapped_state_carries_its_token_count():
    engine = ToyEngine(num_slabs=4)
    low = engine.add(prompt_of(20), 10, priority=1)
    for _ in range(3):
        engine.step()
    engine.add(prompt_of(50), 1)
    engine.drain()
    moves = [move for plan in engine.plans for move in (*plan.swap_out, *plan.swap_in)]
    assert [move.tokens for move in moves] == [22, 22] and {move.request_id for move in moves} == {low.id}


# Ends


def test_me_09_me_10_slots_come_back_with_nothing_else_running():
    """ME-09, ME-10: twice as many requests as slots, one after the other with idle gaps; then three rounds
    of pressure. Everything is free afterwards."""
    engine = ToyEngine(num_slabs=4)
    for seed in range(8):
        engine.add(prompt_of(6, seed), 3, seed)
        engine.drain()
        engine.check_empty()
        assert not engine.step()
    for _ in range(3):
        for seed in range(50):
            engine.add(prompt_of(20, 1), 8, seed)
        engine.drain()
        engine.check_empty()
    engine.check_exact()


def test_ab_06_abort_while_waiting():
    """AB-06: half of a long queue is aborted before it ran, family members among them."""
    engine = ToyEngine(num_slabs=4, max_num_seqs=2)
    families = [Family() for _ in range(10)]
    for seed in range(50):
        engine.add(prompt_of(10, seed // 5), 4, seed, family=families[seed // 5])
    engine.step()
    for request_id in range(0, 50, 2):
        assert engine.scheduler.finish(request_id, "abort")
        engine.scheduler.check()
    engine.drain()
    engine.check_exact()
    engine.check_empty()
    assert sum(r.finish_reason == "length" for r in engine.requests.values()) == 25


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode", "swapped", "in flight", "swapping"])
def test_abort_at_any_moment(when):
    engine = ToyEngine(num_slabs=4, max_num_batched_tokens=8)
    engine.add(prompt_of(20), 15, priority=1)
    plan = None
    if when == "prefill":
        engine.step()
    elif when != "waiting":
        for _ in range(5):
            engine.step()
    if when in ("swapped", "swapping"):
        engine.add(prompt_of(50), 1)
        plan = engine.begin()
        assert plan.swap_out
    elif when == "in flight":
        plan = engine.begin()
    if when == "swapped":
        engine.complete(plan)
        plan = None
        assert engine.requests[0].status is Status.SWAPPED
    assert engine.scheduler.finish(0, "abort")
    assert not engine.scheduler.finish(0, "abort")
    engine.scheduler.check()
    if plan is not None:
        engine.complete(plan)
    engine.drain()
    engine.check_empty()
    engine.check_exact()
    assert engine.requests[0].finish_reason == "abort"


def test_memory_of_a_finished_request_serves_the_next_step_while_the_last_is_out():
    engine = ToyEngine(num_slabs=2)
    engine.add(prompt_of(6), 3)
    engine.add(prompt_of(7), 3)
    first = engine.begin()
    engine.scheduler.finish(0, "abort")
    assert all(counts["used"] == 0 for counts in engine.arena.stats().values())
    second = engine.begin()
    assert [span.request_id for span in second.spans] == [1]
    engine.complete(first)
    engine.complete(second)
    engine.drain()
    engine.check_exact()
    engine.check_empty()


def test_a_request_that_has_all_its_tokens_waits_for_the_last_without_a_step():
    engine = ToyEngine(num_slabs=4)
    engine.add(prompt_of(6), 1)
    plan = engine.begin()
    assert engine.begin() is None
    engine.complete(plan)
    engine.check_exact()
    engine.check_empty()


def test_an_end_that_is_seen_one_step_late_costs_one_token_and_nothing_else():
    engine = ToyEngine(num_slabs=8)
    engine.add(prompt_of(6), 5)
    engine.add(prompt_of(6), 5, seed=1)
    first = engine.begin()
    second = engine.begin()
    engine.complete(first)
    engine.scheduler.finish(0, "stop")
    third = engine.begin()
    assert [len(plan.spans) for plan in (first, second, third)] == [2, 2, 1]
    engine.complete(second)
    engine.complete(third)
    engine.drain()
    engine.check_exact()
    assert output_of(engine.requests[0])[0] == expected_tokens(prompt_of(6), 1, 0)[0]
    engine.check_empty()


def test_a_failed_step_takes_only_its_own_requests():
    engine = ToyEngine(num_slabs=6)
    for seed in range(8):
        engine.add(prompt_of(20, seed), 4, seed)
    engine.fail(engine.begin())
    engine.drain()
    engine.check_exact()
    engine.check_empty()
    reasons = [request.finish_reason for request in engine.requests.values()]
    assert reasons.count("error") == 2 and reasons.count("length") == 6


# Families


@pytest.mark.parametrize("length", [2, 3, 4, 5, 8, 9, 17, 18])
def test_ap_04_members_begin_from_the_leaders_state(length):
    """AP-04: n=4, the prompt computed once up to its last token; each member draws on its own."""
    engine = ToyEngine(num_slabs=20, chunk_size=4, max_num_batched_tokens=8)
    family = Family()
    members = [engine.add(prompt_of(length), 6, seed, family=family) for seed in range(4)]
    engine.drain()
    computed = sum(
        end - start for member in members for start, end in spans_of(engine, member.id) if end <= length
    )
    assert computed == length - 1 + 4
    copies = [copy for plan in engine.plans for copy in plan.page_copies]
    assert len(copies) == (3 if (length - 1) % PAGE_SIZE else 0)
    assert [output_of(m) for m in members] == [
        expected_tokens(prompt_of(length), 6, seed) for seed in range(4)
    ]
    engine.check_empty()


def test_members_share_the_leaders_full_pages():
    engine = ToyEngine(num_slabs=20)
    family = Family()
    members = [engine.add(prompt_of(4 * PAGE_SIZE + 2), 9, seed, family=family) for seed in range(3)]
    engine.step()
    plan = engine.begin()
    assert [span.request_id for span in plan.spans] == [1, 2], "the leader waits while its slot is read"
    assert {span.slot_in for span in plan.spans} == {members[0].slot}
    assert len({tuple(member.pages[:4]) for member in members}) == 1
    assert len({member.pages[4] for member in members}) == 3
    assert engine.arena.stats()["pages"]["used"] == 4 + 3
    engine.complete(plan)
    engine.step()
    assert [span.request_id for span in engine.plans[-1].spans] == [0, 1, 2]
    engine.drain()
    engine.check_exact()
    engine.check_empty()


def test_members_without_room_compute_the_prompt_themselves_once_for_the_rest():
    engine = ToyEngine(num_slabs=30, max_num_seqs=2)
    family = Family()
    for seed in range(6):
        engine.add(prompt_of(11), 5, seed, family=family)
    engine.drain()
    prefills = [i for i in range(6) if spans_of(engine, i)[0][0] == 0]
    assert 1 < len(prefills) < 6
    engine.check_exact()
    engine.check_empty()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_leader_aborted(steps):
    """Whenever the leader goes, before, at or after the fork point, the others go on without it."""
    engine = ToyEngine(num_slabs=20, chunk_size=4, max_num_batched_tokens=8)
    family = Family()
    for seed in range(4):
        engine.add(prompt_of(18), 5, seed, family=family)
    for _ in range(steps):
        engine.step()
    engine.scheduler.finish(0, "abort")
    engine.drain()
    engine.check_exact()
    engine.check_empty()
    prefills = [i for i in range(1, 4) if spans_of(engine, i)[0][0] == 0]
    assert prefills == ([1] if steps <= 3 else [])


def test_leader_aborted_while_members_read_its_slot():
    engine = ToyEngine(num_slabs=20)
    family = Family()
    for seed in range(3):
        engine.add(prompt_of(10), 5, seed, family=family)
    engine.step()
    plan = engine.begin()
    assert len(plan.spans) == 2
    engine.scheduler.finish(0, "abort")
    engine.complete(plan)
    engine.drain()
    engine.check_exact()
    engine.check_empty()


def test_sharing_member_is_swapped_whole():
    """A member that gives way takes a copy of the shared pages along; the others keep theirs."""
    engine = ToyEngine(num_slabs=8)
    family = Family()
    members = [engine.add(prompt_of(18), 12, seed, priority=1, family=family) for seed in range(3)]
    for _ in range(4):
        engine.step()
    engine.add(prompt_of(70, 5), 2, seed=5)
    engine.drain()
    moves = {move.request_id: move for plan in engine.plans for move in plan.swap_out}
    assert moves and all(len(move.pages) == -(-move.tokens // PAGE_SIZE) for move in moves.values())
    assert members[2].preemptions > 0
    engine.check_exact()
    engine.check_empty()


def test_config_is_checked():
    with pytest.raises(ConfigError, match="max_num_seqs is 0"):
        SchedulerConfig(64, 0, 2048, 4096)
