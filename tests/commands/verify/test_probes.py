from __future__ import annotations

from denim.commands.verify.probes import SIBLINGS, Sizes, draw_probes

SIZES = Sizes(4, 16, 64, 128)


def test_positions_and_tails() -> None:
    probes = draw_probes(seed=3, count=11, longest=300, context=1000, sizes=SIZES, vocab=50)
    assert {probe.tail for probe in probes.each} == {1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65}
    assert all(probe.position >= 2 and len(probe.prompt) <= 300 for probe in probes.each)
    assert all(0 <= token < 50 for probe in probes.each for token in probe.prompt)
    assert len({probe.position for probe in probes.each}) > 5
    assert probes.long and all(probe.position > SIZES.block for probe in probes.long)
    heads = {tuple(probe.head) for probe in probes.siblings}
    assert len(probes.siblings) == SIBLINGS and len(heads) == 1
    assert len({tuple(probe.prompt) for probe in probes.siblings}) == SIBLINGS


def test_no_prompt_is_longer_than_was_asked_for() -> None:
    for seed in range(30):
        probes = draw_probes(seed, 11, 80, 1000, SIZES, 50)
        assert max(len(probe.prompt) for probe in probes.each) <= 80


def test_the_seed_decides() -> None:
    def drawn(seed: int) -> object:
        return draw_probes(seed, 4, 100, 1000, SIZES, 50)

    assert drawn(1) == drawn(1) != drawn(2)


def test_a_short_context_leaves_long_probes_out() -> None:
    probes = draw_probes(0, 12, 40, 200, SIZES, 50)
    assert not probes.long and max(len(probe.prompt) for probe in probes.each) <= 200
