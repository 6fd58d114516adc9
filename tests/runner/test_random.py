from __future__ import annotations

from math import sqrt

from denim.runner.random import Streams, derive_seed, uniform


def test_a_number_depends_on_seed_and_draw_alone() -> None:
    assert uniform(7, 3) == uniform(7, 3)
    assert uniform(7, 3) == uniform(7 + 2**64, 3)
    assert len({uniform(seed, draw) for seed in range(-5, 50) for draw in range(50)}) == 55 * 50


def test_many_streams_at_once_are_the_same_streams() -> None:
    seeds, draws = [-5, 0, 7, 2**63, 2**64 - 1, 2**64 + 7], [3, 0, 2**40, 1, 2**31, 3]
    numbers = Streams(seeds).uniforms(draws)
    assert numbers.tolist() == [uniform(seed, draw) for seed, draw in zip(seeds, draws, strict=True)]
    assert Streams([]).uniforms([]).tolist() == []


def test_the_stream_is_pinned() -> None:
    """A seed means the same text in every release; these change only with a note to users."""
    assert [derive_seed(0, 0), derive_seed(1, 2)] == [0xA706DD2F4D197E6F, 0xB95F66D327E8D78]


def test_numbers_are_uniform_along_draws_seeds_and_pairs() -> None:
    count, cells = 20_000, 20
    for numbers in (
        [uniform(5, draw) for draw in range(count)],
        [uniform(seed, 0) for seed in range(count)],
        [(uniform(seed, 1) - uniform(seed + 1, 0)) % 1.0 for seed in range(count)],
        [(uniform(9, draw) - uniform(9, draw + 1)) % 1.0 for draw in range(count)],
    ):
        assert min(numbers) >= 0.0
        assert max(numbers) < 1.0
        seen = [0] * cells
        for number in numbers:
            seen[int(number * cells)] += 1
        expected = count / cells
        chi_square = sum((cell - expected) ** 2 / expected for cell in seen)
        assert chi_square < 50  # 19 degrees of freedom: exceeded once in 7,000
        assert abs(sum(numbers) / count - 0.5) < 4 / sqrt(12 * count)
