from __future__ import annotations

from math import inf, nan

import pytest
import torch
from torch import Tensor

from denim.errors import RequestError
from denim.runner.landing import SampleResult
from denim.runner.sampler import NO_TOKEN, Sampler, SamplingState
from denim.sampling_params import SamplingParams

VOCAB = 300
ENDS = (5, 6)
FREE = {"temperature": 1.0, "seed": 7}


def state(
    prompt: list[int] | None = None, index: int = 0, ends: tuple[int, ...] = ENDS, **params: object
) -> SamplingState:
    return SamplingState(SamplingParams(**params).resolve(), prompt or [1, 2], VOCAB, ends, index)


def random_logits(rows: int, seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def sample(logits: Tensor, *states: SamplingState) -> SampleResult:
    return Sampler().draw(logits, states).result()


def run(given: SamplingState, steps: int, logits_seed: int = 0) -> list[int]:
    """Tokens of one request alone, over `steps` given distributions."""
    sampler, tokens = Sampler(), []
    for step in range(steps):
        (token,) = sampler.draw(random_logits(1, 1000 * logits_seed + step), [given]).result().tokens
        given.append(token)
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_largest_logit_and_the_lowest_of_equal_ids(dtype: torch.dtype) -> None:
    logits = random_logits(4, 0).to(dtype)
    logits[1, [17, 200]] = 50.0
    expected = [row.tolist().index(row.max().item()) for row in logits]
    assert expected[1] == 17
    greedy = [state(temperature=0) for _ in range(4)]
    assert sample(logits, *greedy).tokens == expected
    # The same rows beside one that needs the long way.
    greedy[3] = state(temperature=1.0, logit_bias={9: 100})
    assert sample(logits, *greedy).tokens == [*expected[:3], 9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_k_1_and_a_tiny_top_p_are_greedy(dtype: torch.dtype) -> None:
    logits = random_logits(1, 4, scale=0.5).to(dtype).repeat(60, 1)
    logits[:, [40, 41]] = logits.max()
    for params in ({"top_k": 1}, {"top_p": 1e-6}):
        states = [state(temperature=1.5, seed=seed, **params) for seed in range(60)]
        assert set(sample(logits, *states).tokens) == {logits[0].float().argmax().item()}


def test_logits_are_left_as_they_were() -> None:
    logits = random_logits(3, 1)
    before = logits.clone()
    sample(
        logits,
        state(temperature=0.5, top_p=0.9, repetition_penalty=1.5),
        state(**FREE, logit_bias={3: 5}),
        state(temperature=0, min_tokens=4, logprobs=3),
    )
    assert torch.equal(logits, before)


def test_a_seed_repeats_and_other_seeds_differ() -> None:
    runs = [run(state(**FREE), 20), run(state(**FREE), 20), run(state(temperature=1.0, seed=8), 20)]
    assert runs[0] == runs[1] != runs[2]


def test_siblings_differ_and_are_the_requests_of_the_next_seeds() -> None:
    siblings = [run(state(temperature=1.0, seed=7, index=index), 20) for index in range(4)]
    assert len({tuple(tokens) for tokens in siblings}) == 4
    assert siblings == [run(state(temperature=1.0, seed=7 + index), 20) for index in range(4)]


def test_a_draw_depends_on_how_many_were_drawn_not_on_when() -> None:
    """A request that is recomputed after a preemption goes on with the numbers that it would have had."""
    tokens = run(state(**FREE), 12)
    resumed = state(**FREE)
    for token in tokens[:8]:
        resumed.append(token)
    sampler = Sampler()
    for step in range(8, 12):
        (token,) = sampler.draw(random_logits(1, step), [resumed]).result().tokens
        resumed.append(token)
        assert token == tokens[step]


def test_tokens_that_were_drawn_and_not_told_yet_count() -> None:
    """As steps overlap, a token may be drawn before the host knows the one before it."""
    told, untold = (state(**FREE, min_tokens=3) for _ in range(2))
    for token in (11, 12, 13):
        told.append(token)
    for seed in range(10):
        logits = random_logits(1, seed, scale=0.5)
        assert Sampler().draw(logits, [untold], [3]).result() == sample(logits, told)
    ends = torch.zeros(1, VOCAB)
    ends[0, 5] = 50.0
    assert Sampler().draw(ends, [untold], [2]).result().tokens != [5]
    assert Sampler().draw(ends, [untold], [3]).result().tokens == [5]


MIXED = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "seed": 3, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.3, "seed": 4, "min_p": 0.02, "repetition_penalty": 1.2},
    {"temperature": 0.9, "seed": 5, "top_p": 0.8, "presence_penalty": 0.5, "logprobs": 4},
    {"temperature": 0, "frequency_penalty": 1.0, "logprobs": 0},
    {"temperature": 1.0, "seed": 6, "min_tokens": 5, "logit_bias": {5: 20.0}},
    {"temperature": 1.0, "seed": 3, "index": 1, "top_k": 299},
]


def test_batch_mates_do_not_matter() -> None:
    """Each of eight very different requests gives alone what it gives among the others, which come and go."""
    logits = [random_logits(8, step, scale=1.0) for step in range(25)]
    alone: list[list[tuple[int, object]]] = []
    for row, params in enumerate(MIXED):
        one, sampler, results = state(**params), Sampler(), []
        for step in range(25):
            result = sampler.draw(logits[step][row : row + 1], [one]).result()
            results.append((result.tokens[0], result.logprobs.get(0)))
            one.append(result.tokens[0])
        alone.append(results)

    states, sampler, at = [state(**params) for params in MIXED], Sampler(), [0] * 8
    for step in range(60):
        rows = [row for row in range(8) if at[row] < 25 and (step * 5 + row * 3) % 7 < 5]
        if not rows:
            continue
        batch = torch.stack([logits[at[row]][row] for row in rows])
        result = sampler.draw(batch, [states[row] for row in rows]).result()
        for place, row in enumerate(rows):
            assert (result.tokens[place], result.logprobs.get(place)) == alone[row][at[row]]
            states[row].append(result.tokens[place])
            at[row] += 1
    assert min(at) == 25


def test_the_first_use_of_a_state_does_not_leak_into_the_next_batch() -> None:
    """The kept parameter tensors belong to the very states, not to a batch of the same size."""
    sampler, logits = Sampler(), random_logits(2, 0)
    biased = [state(temperature=0, logit_bias={9: 100}) for _ in range(2)]
    plain = [state(temperature=0) for _ in range(2)]
    assert sampler.draw(logits, biased).result().tokens == [9, 9]
    assert sampler.draw(logits, plain).result().tokens == logits.argmax(-1).tolist()
    assert sampler.draw(logits, [plain[0], biased[0]]).result().tokens == [logits[0].argmax().item(), 9]
    assert sampler.draw(logits, [biased[0], plain[0]]).result().tokens == [9, logits[1].argmax().item()]


def test_temperature_flattens() -> None:
    logits = torch.full((400, VOCAB), -inf)
    logits[:, :2] = torch.tensor([2.0, 0.0])
    shares = []
    for temperature in (0.25, 1.0, 8.0):
        states = [state(temperature=temperature, seed=seed) for seed in range(400)]
        shares.append(sample(logits, *states).tokens.count(0) / 400)
    assert shares[0] > 0.99
    assert shares[1] == pytest.approx(0.881, abs=0.05)  # 1 / (1 + e^-2)
    assert shares[2] == pytest.approx(0.562, abs=0.08)  # 1 / (1 + e^-0.25)


def test_bias_forces_and_forbids() -> None:
    logits = random_logits(2, 3)
    best = logits.argmax(-1).tolist()
    forced, banned = state(**FREE, logit_bias={8: 100}), state(temperature=0, logit_bias={best[1]: -100})
    tokens = sample(logits, forced, banned).tokens
    assert tokens[0] == 8
    assert tokens[1] == logits[1].topk(2).indices[1]


def test_penalties_count_prompt_and_output_as_they_should() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, :4] = torch.tensor([3.0, 2.9, 2.8, 2.0])

    def next_token(*drawn: int, **params: object) -> int:
        one = state(prompt=[0], temperature=0, **params)
        for token in drawn:
            one.append(token)
        return sample(logits, one).tokens[0]

    assert next_token() == 0
    assert next_token(repetition_penalty=1.2) == 1  # the prompt counts
    assert next_token(1, repetition_penalty=1.2) == 2
    assert next_token(presence_penalty=0.5) == 0  # the prompt does not count
    assert next_token(0, presence_penalty=0.15) == 1
    assert next_token(0, 1, 1, presence_penalty=0.15) == 0
    assert next_token(0, 1, 1, frequency_penalty=0.15) == 0  # 2.85 against 2.6 and 2.8
    assert next_token(0, 0, 1, frequency_penalty=0.15) == 2  # 2.7 and 2.75 against 2.8


def test_a_penalty_is_on_the_biased_logit() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, :2] = torch.tensor([1.0, 3.0])
    one = state(prompt=[0], temperature=0, repetition_penalty=2.0, logit_bias={0: 3})
    assert sample(logits, one).tokens == [1]  # (1 + 3) / 2 against 3; 1 / 2 + 3 would win


def test_no_end_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 6, 11, 30]] = torch.tensor([9.0, 8.0, 7.0, 6.0])
    params = {"temperature": 0, "min_tokens": 2}
    cases = [
        (state(**params), [11, 11, 5]),
        (state(**params, stop_token_ids=[11]), [30, 30, 5]),
        (state(**params, ignore_eos=True, stop_token_ids=[5]), [6, 6, 5]),
        (state(**params, ends=()), [5, 5, 5]),
        (state(**params, logit_bias={6: 100}), [11, 11, 6]),
    ]
    for one, expected in cases:
        sampler, tokens = Sampler(), []
        for _ in range(3):
            tokens += sampler.draw(logits, [one]).result().tokens
            one.append(tokens[-1])
        assert tokens == expected


def test_logprobs_are_of_the_model_not_of_the_parameters() -> None:
    logits = random_logits(3, 5)
    expected = logits.double().log_softmax(-1)
    states = [
        state(temperature=0.3, seed=1, top_k=5, logit_bias={7: 100}, logprobs=3),
        state(temperature=0),
        state(temperature=0, logprobs=0),
    ]
    result = sample(logits, *states)
    assert result.tokens[0] == 7
    assert list(result.logprobs) == [0, 2]
    first, third = result.logprobs.values()
    assert first.token == 7
    assert first.logprob == pytest.approx(expected[0, 7].item(), abs=1e-5)
    assert first.rank == 1 + int((expected[0] > expected[0, 7]).sum())
    assert first.top_ids == expected[0].topk(3).indices.tolist()
    assert first.top_logprobs == pytest.approx(expected[0].topk(3).values.tolist(), abs=1e-5)
    assert (third.token, third.rank, third.top_ids) == (result.tokens[2], 1, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("poison", [nan, inf])
def test_a_bad_row_is_named_and_the_others_are_served(poison: float, dtype: torch.dtype) -> None:
    logits = random_logits(4, 6).to(dtype)
    kinds = ({"temperature": 0}, FREE, {**FREE, "top_p": 0.9, "repetition_penalty": 1.2})
    for params in kinds:
        good = sample(logits, *(state(**params, logprobs=1) for _ in range(4)))
        assert good.bad_rows == []
        broken = logits.clone()
        broken[2, 123] = poison
        broken[3] = -inf
        result = sample(broken, *(state(**params, logprobs=1) for _ in range(4)))
        assert result.bad_rows == [2, 3]
        assert result.tokens == [*good.tokens[:2], NO_TOKEN, NO_TOKEN]
        assert result.logprobs == {row: good.logprobs[row] for row in (0, 1)}


def test_token_ids_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(RequestError, match="logit_bias=300"):
        state(logit_bias={VOCAB: 1.0})


@pytest.mark.gpu
def test_the_gpu_draws_what_the_cpu_draws() -> None:
    """Equal up to the last bits of exp, which decide once in millions of draws."""
    logits = random_logits(8, 7)
    states = [state(**params) for params in MIXED]
    on_cpu, on_gpu = Sampler(), Sampler()
    for _ in range(50):
        expected, result = on_cpu.draw(logits, states).result(), on_gpu.draw(logits.cuda(), states).result()
        assert result.tokens == expected.tokens
        for one, token in zip(states, result.tokens, strict=True):
            one.append(token)
    broken = logits.cuda()
    broken[3, 2] = nan
    assert on_gpu.draw(broken, states).result().bad_rows == [3]
