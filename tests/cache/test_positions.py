from __future__ import annotations

import pytest

from denim.cache.positions import (
    BLOCK,
    BOUNDARY,
    JUNCTION,
    MARK,
    POLICIES,
    PROMPT_END,
    SPACED,
    Grid,
    Sighting,
    Wanted,
)
from denim.cache.spacing import OverlapDepths
from denim.ledger.flops import CHUNK


def grid(block: int = 100, tokens_each: int = 0) -> Grid:
    return Grid(block, 150, CHUNK, OverlapDepths(tokens_each))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("prompt", [1, 2, 3, 99, 100, 101, 1000])
@pytest.mark.parametrize("start", [0, 1, 50, 100])
def test_positions_lie_behind_the_start_and_leave_a_token(name: str, prompt: int, start: int) -> None:
    sighting = Sighting(prompt, min(start, prompt - 1), min(70, prompt), [0, 3, 2000, prompt], [prompt, 5])
    positions = [position for position, _ in POLICIES[name].positions(sighting, grid(tokens_each=50))]
    assert positions == sorted(set(positions))
    assert all(sighting.start < position < prompt for position in positions)


def test_plain_policies() -> None:
    sighting = Sighting(250)
    assert POLICIES["none"].positions(sighting, grid()) == []
    assert POLICIES["align"].positions(sighting, grid()) == [Wanted(100, BLOCK), Wanted(200, BLOCK)]
    assert POLICIES["align"].positions(Sighting(420, start=90), grid()) == [
        Wanted(p, BLOCK) for p in (200, 300, 400)
    ]
    assert POLICIES["all"].positions(sighting, grid()) == [Wanted(100, BLOCK), Wanted(200, BLOCK)]
    assert POLICIES["ends"].positions(sighting, grid()) == [Wanted(249, PROMPT_END)]
    assert {name for name, policy in POLICIES.items() if policy.generation_end} == {"ends", "auto"}


def test_auto_takes_what_it_is_told() -> None:
    sighting = Sighting(500, start=10, seen=140, boundaries=[120, 200], marks=[300])
    assert POLICIES["auto"].positions(sighting, grid()) == [
        Wanted(120, BOUNDARY),
        Wanted(140, JUNCTION),
        Wanted(200, BOUNDARY),
        Wanted(300, MARK),
        Wanted(499, PROMPT_END),
    ]


def test_a_boundary_close_to_the_end_stands_for_it() -> None:
    near, far = (
        POLICIES["auto"].positions(Sighting(500, boundaries=[500 - distance]), grid())
        for distance in (CHUNK, CHUNK + 1)
    )
    assert near == [Wanted(500 - CHUNK, BOUNDARY)]
    assert far == [Wanted(500 - CHUNK - 1, BOUNDARY), Wanted(499, PROMPT_END)]


def test_one_position_is_saved_once_for_its_best_reason() -> None:
    sighting = Sighting(100, seen=70, boundaries=[70], marks=[70])
    assert POLICIES["auto"].positions(sighting, grid())[0] == Wanted(70, MARK)


def test_what_saves_less_than_a_chunk_is_left_out_unless_it_is_asked_for() -> None:
    short = Sighting(100, start=40, seen=60, boundaries=[50, 98], marks=[45])
    assert POLICIES["auto"].positions(short, grid()) == [Wanted(45, MARK), Wanted(98, BOUNDARY)]
    assert POLICIES["auto"].positions(Sighting(CHUNK), grid()) == []
    assert POLICIES["auto"].positions(Sighting(CHUNK + 1), grid()) == [Wanted(CHUNK, PROMPT_END)]


def test_only_the_new_part_of_a_very_long_prompt_is_spaced() -> None:
    found = POLICIES["auto"].positions(Sighting(10_000, start=2000, seen=4000), grid(tokens_each=2000))
    spaced = [position for position, kind in found if kind == SPACED]
    assert len(spaced) == 3 and all(4000 < position < 10_000 for position in spaced)
    told = POLICIES["auto"].positions(Sighting(10_000, boundaries=[9000]), grid(tokens_each=2000))
    assert SPACED not in {kind for _, kind in told}
