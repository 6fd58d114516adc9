from __future__ import annotations

from math import exp, inf, log, nan

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from denim.runner.draw import draw, draw_filtered, make_filters
from denim.runner.random import uniform

CPU = torch.device("cpu")
NEAR = 1e-6  # how close to a border float32 logits and float64 references may disagree


def kept_reference(logits: list[float], min_p: float, top_k: int, top_p: float) -> list[int]:
    """The tokens that stay, likeliest first: the definition, in plain Python."""
    best = max(logits)
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    weight = {token: exp(logits[token] - best) for token in order}
    kept = [token for token in order if weight[token] >= min_p]
    if top_k:
        kept = kept[:top_k]
    total = sum(weight[token] for token in kept)
    share = 0.0
    for place, token in enumerate(kept):
        share += weight[token] / total
        if share >= top_p - 1e-12:
            return kept[: place + 1]
    return kept


def draw_reference(logits: list[float], kept: list[int], number: float) -> tuple[int, float]:
    """The token of `number`, and how far `number` is from the next border."""
    best = max(logits)
    weights = [exp(logits[token] - best) for token in kept]
    total, share = sum(weights), 0.0
    chosen, distance = kept[-1], 1.0
    for token, weight in zip(kept, weights, strict=True):
        below = number < share + weight / total
        share += weight / total
        distance = min(distance, abs(number - share))
        if below:
            chosen = token
            break
    return chosen, distance


def on_a_grid(row: Tensor, min_p: float, top_k: int, top_p: float, steps: int) -> list[int]:
    """Tokens of `steps` even numbers between 0 and 1."""
    numbers = (torch.arange(steps, dtype=torch.float64)[:, None] + 0.5) / steps
    filters = make_filters([min_p] * steps, [top_k] * steps, [top_p] * steps, len(row), CPU)
    return draw_filtered(row.repeat(steps, 1), filters, numbers).tolist()


def clear_of_borders(logits: list[float], min_p: float, top_k: int, top_p: float) -> bool:
    """Whether no rounding can change which tokens stay."""
    kept = kept_reference(logits, min_p, top_k, top_p)
    return all(
        kept == kept_reference(logits, near_p, top_k, near_top)
        for near_p, near_top in (
            (min_p * (1 + NEAR), top_p),
            (min_p * (1 - NEAR), top_p),
            (min_p, min(1.0, top_p + NEAR)),
            (min_p, top_p - NEAR),
        )
    )


def check_against_reference(row: Tensor, min_p: float, top_k: int, top_p: float, steps: int) -> None:
    logits = row.tolist()
    kept = kept_reference(logits, min_p, top_k, top_p)
    drawn = on_a_grid(row, min_p, top_k, top_p, steps)
    assert set(drawn) <= set(kept)
    for step, token in enumerate(drawn):
        expected, distance = draw_reference(logits, kept, (step + 0.5) / steps)
        assert token == expected or distance < NEAR


@settings(deadline=None, max_examples=150)
@given(
    values=st.lists(st.integers(-40, 40), min_size=1, max_size=200),
    scale=st.sampled_from([0.01, 0.1, 0.7]),
    min_p=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 31, 250]),
    top_p=st.sampled_from([1.0, 0.97, 0.6, 0.2, 0.001]),
)
def test_filters_and_draw_follow_their_definition(
    values: list[int], scale: float, min_p: float, top_k: int, top_p: float
) -> None:
    """Few distinct values, so that ties stand on every border."""
    row = torch.tensor(values) * scale
    assume(clear_of_borders(row.tolist(), min_p, top_k, top_p))
    check_against_reference(row, min_p, top_k, top_p, steps=64)


@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"),
    [(0.0, 0, 0.9), (0.0, 0, 0.1), (0.5, 0, 1.0), (0.9, 0, 0.5), (0.0, 900, 0.99), (0.2, 2500, 0.9)],
)
@pytest.mark.parametrize("scale", [0.02, 0.5, 6.0])
def test_rows_too_flat_for_the_first_candidates(min_p: float, top_k: int, top_p: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    row = torch.randn(5000, generator=generator) * scale
    assert clear_of_borders(row.tolist(), min_p, top_k, top_p)
    check_against_reference(row, min_p, top_k, top_p, steps=16)


def test_equal_logits_stay_by_the_lowest_ids() -> None:
    """However many tokens equal the last one that stays, and wherever topk happens to find them."""
    row = torch.zeros(3000)
    assert set(on_a_grid(row, 0.0, 5, 1.0, 50)) == {0, 1, 2, 3, 4}
    row[2990:] = 1.0
    assert set(on_a_grid(row, 0.0, 12, 1.0, 400)) == {*range(2990, 3000), 0, 1}
    assert set(on_a_grid(torch.zeros(4), 0.0, 0, 0.5, 50)) == {0, 1}


def test_tokens_without_weight_are_never_drawn() -> None:
    row = torch.tensor([[-inf, 1.0, -inf, 1.0, -inf]])
    for number, token in ((0.0, 1), (1 - 2.0**-53, 3)):
        numbers = torch.tensor([[number]], dtype=torch.float64)
        assert draw(row, numbers).tolist() == [token]
        for top_k in (0, 2, 4):
            filters = make_filters([0.0], [top_k], [1.0], 5, CPU)
            assert draw_filtered(row, filters, numbers).tolist() == [token]


def test_the_free_draw_is_in_the_order_of_ids() -> None:
    probabilities = [0.1, 0.2, 0.3, 0.4]
    row = torch.tensor([[log(p) for p in probabilities]])
    for number, token in ((0.05, 0), (0.15, 1), (0.29, 1), (0.31, 2), (0.59, 2), (0.61, 3), (0.99, 3)):
        assert draw(row, torch.tensor([[number]], dtype=torch.float64)).tolist() == [token]


@pytest.mark.parametrize("filtered", [False, True])
def test_draws_have_the_right_frequencies(filtered: bool) -> None:
    count, vocab = 20_000, 30
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(0))
    numbers = torch.tensor([[uniform(11, i)] for i in range(count)], dtype=torch.float64)
    rows = row.repeat(count, 1)
    if filtered:
        drawn = draw_filtered(
            rows, make_filters([0.0] * count, [20] * count, [1.0] * count, vocab, CPU), numbers
        )
        row = torch.where(row >= row.topk(20).values[-1], row, -inf)
    else:
        drawn = draw(rows, numbers)
    expected = row.double().softmax(0) * count
    seen = drawn.bincount(minlength=vocab).double()
    assert not seen[expected == 0].any()
    chi_square = ((seen - expected) ** 2 / expected)[expected > 0].sum()
    assert chi_square < 65  # at most 29 degrees of freedom: exceeded once in 7,000


def test_a_row_draws_alone_what_it_draws_in_a_batch() -> None:
    """Batch mates change how many candidates are looked at and which rows are sorted whole."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(8, 4000, generator=generator) * torch.tensor([[0.01, 1, 8, 0.5, 3, 3, 3, 3]]).T
    logits[4:] = logits[4:].bfloat16().float()
    min_p = [0.0, 0.05, 0.0, 0.9, 0.0, 0.2, 0.0, 0.0]
    top_k = [0, 0, 3, 0, 40, 0, 3999, 0]
    top_p = [0.5, 1.0, 0.9, 1.0, 1.0, 0.8, 0.7, 0.9999]
    for turn in range(10):
        numbers = torch.tensor([[uniform(row, turn)] for row in range(8)], dtype=torch.float64)
        together = draw_filtered(logits, make_filters(min_p, top_k, top_p, 4000, CPU), numbers).tolist()
        for row in range(8):
            filters = make_filters([min_p[row]], [top_k[row]], [top_p[row]], 4000, CPU)
            alone = draw_filtered(logits[row : row + 1], filters, numbers[row : row + 1])
            assert alone.tolist() == [together[row]]
        assert draw(logits, numbers).tolist() == [
            draw(logits[row : row + 1], numbers[row : row + 1]).item() for row in range(8)
        ]


def test_a_row_of_nan_harms_nobody() -> None:
    logits = torch.randn(3, 2000, generator=torch.Generator().manual_seed(2))
    numbers = torch.full((3, 1), 0.4, dtype=torch.float64)
    filters = make_filters([0.0] * 3, [0, 5, 0], [0.9] * 3, 2000, CPU)
    free, filtered = draw(logits, numbers).tolist(), draw_filtered(logits, filters, numbers).tolist()
    for place, value in ((7, nan), (0, inf)):
        broken = logits.clone()
        broken[1, place] = value
        drawn_filtered = draw_filtered(broken, filters, numbers)
        for drawn, before in ((draw(broken, numbers), free), (drawn_filtered, filtered)):
            assert 0 <= int(drawn[1]) < 2000
            assert [drawn[0].item(), drawn[2].item()] == [before[0], before[2]]
