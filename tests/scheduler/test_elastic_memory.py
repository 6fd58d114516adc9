"""Memory changes sides under load: nobody waits while the arena has room for him, whatever the mixture."""

from __future__ import annotations

from bench.elastic_memory import CONFIG, GIB, LONG, SHARES, SHORT, run
from denim.spec.reader import read_spec

PHASES = [(SHORT, 1200), (LONG, 30), (SHORT, 1200)]


def test_nobody_waits_while_a_twentieth_of_the_arena_is_free() -> None:
    """Requests of 100 tokens, then of 32k, then of 100 again, in 16 GiB; one of 32k is 2.4% of that."""
    outcome = run(read_spec(CONFIG), 16 * GIB, PHASES)
    assert [len(phase.held) > 10 for phase in outcome.phases] == [True] * 3
    assert min(min(phase.held) for phase in outcome.phases) > 0.95
    assert outcome.moves > 0, "no slab had to be joined for that"


def test_no_fixed_split_comes_near() -> None:
    """Some phase of the same workload leaves a quarter of the arena unused, whatever the split."""
    spec = read_spec(CONFIG)
    elastic = run(spec, 16 * GIB, PHASES).steps
    for share in SHARES:
        outcome = run(spec, 16 * GIB, PHASES, share)
        assert min(min(phase.held) for phase in outcome.phases) < 0.75
        assert outcome.steps > elastic
