"""Memory that others have used: nothing of them is left to be seen. Freed memory is full of NaN."""

from __future__ import annotations

from itertools import product

from denim import LLM, SamplingParams
from tests.exactness.conftest import Model
from tests.exactness.harness import COLD, Way, greedy, make_core, run, tokens_of
from tests.exactness.judge import judge_run
from tests.tiny import VOCAB

WIDTH, CHUNK = 4, 64


def test_short_prompts_after_long_ones(dense: Model) -> None:
    """DS-01: in every slot, poisoned or not."""
    lengths = (1, 2, 3, WIDTH - 1, WIDTH, CHUNK - 1)
    for debug in (True, False):
        llm = LLM(dense.folder, memory="1MiB", max_num_seqs=6, debug=debug)
        long = [tokens_of(200, seed, VOCAB) for seed in range(6)]
        llm.generate(long, SamplingParams(temperature=0, max_tokens=10))
        for shift in range(6):
            order = [*lengths[shift:], *lengths[:shift]]
            short = [tokens_of(length, 3, VOCAB) for length in order]
            for prompt, output in zip(
                short, llm.generate(short, SamplingParams(temperature=0, max_tokens=8)), strict=True
            ):
                dense.judge.greedy(prompt, output.outputs[0].token_ids)


def test_the_first_request_equals_the_hundredth(dense: Model) -> None:
    """DS-02: what the allocator returned at start is not seen; a fresh buffer holds NaN here. Bit for bit
    where all is computed again; what begins from a checkpoint is computed in another way, and the judge says
    how near it has to be."""
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=1)
    for length, policy in product((1, 2 * CHUNK), ("none", "auto")):
        llm = LLM(dense.folder, memory="1MiB", debug=True, checkpoint_policy=policy)
        assert llm.core.runner.storage.kv(3).isnan().all()
        prompt = tokens_of(length, 0, VOCAB)
        texts = [llm.generate(prompt, params)[0].outputs[0] for _ in range(100)]
        assert all(text.token_ids == texts[0].token_ids for text in texts)
        assert policy == "auto" or all(text.logprobs == texts[0].logprobs for text in texts)
        for text in texts if policy == "auto" else texts[:1]:
            dense.judge.greedy(prompt, text.token_ids)
            dense.judge.logprobs(prompt, text.token_ids, text.logprobs)


def test_asking_again_begins_again(dense: Model) -> None:
    """DS-04: the second answer is the first; half an answer is continued with its second half."""
    llm = LLM(dense.folder, memory="1MiB", debug=True)
    prompt = tokens_of(40, 0, VOCAB)

    def tokens(prompt: list[int], n: int) -> list[int]:
        return llm.generate(prompt, SamplingParams(temperature=0, max_tokens=n))[0].outputs[0].token_ids

    first = tokens(prompt, 120)
    dense.judge.greedy(prompt, first)
    assert tokens(prompt, 120) == first
    assert tokens(prompt + first[:60], 60) == first[60:]


def test_prompts_of_one_token(dense: Model) -> None:
    """DS-09: they have the shape of a decode row, alone and among decoding rows, on used slots."""
    ones = [greedy([token], 3) for token in range(0, VOCAB, 4)]
    long = [greedy(tokens_of(90, seed, VOCAB), 30) for seed in range(3)]
    judge_run(dense.judge, ones, run(dense.folder, ones, Way(company="alone", recycled=True)))
    mixed = [*long, *ones]
    way = Way(company="joining", recycled=True).with_options(max_num_seqs=6)
    judge_run(dense.judge, mixed, run(dense.folder, mixed, way))


def test_nothing_is_kept_on_layers(dense: Model) -> None:
    """DS-10: one row after another, then two rows that change places between steps."""
    a, b = (greedy(tokens_of(n, 2, VOCAB), 20) for n in (9, 23))
    judge_run(dense.judge, [a, b, a], run(dense.folder, [a, b, a], COLD))
    llm = LLM(dense.folder, memory="1MiB", debug=True)
    ids = [llm.core.add(*case) for case in (a, b)]
    outputs = [llm.core.requests[id_].output.outputs[0] for id_ in ids]
    running = llm.core.scheduler._running
    while llm.core.has_work:
        llm.core.step()
        running._requests.reverse()
        for order, request in enumerate(running):
            request.key = (0, order)
    for case, output in zip((a, b), outputs, strict=True):
        dense.judge.greedy(case.prompt, output.token_ids)


def test_the_poison_is_there(dense: Model) -> None:
    """The check of all the above: the next step fills what was freed with NaN, so that reading it shows."""
    llm = LLM(dense.folder, memory="1MiB", debug=True)
    core, storage = llm.core, llm.core.parts.storage
    core.add(tokens_of(60, 0, VOCAB), SamplingParams(temperature=0, max_tokens=9, n=3))
    for _ in range(5):
        core.step()
    requests = core.scheduler.requests.values()
    kinds = [(storage.kv(3), {page for request in requests for page in request.pages})]
    kinds += [(storage.state(0, "recurrent"), {request.slot for request in requests})]

    def written() -> list[int]:
        return [sum(not entries[i].isnan().all() for i in held) for entries, held in kinds]

    while core.has_work:
        core.step()
    llm.reset_prefix_cache()
    assert min(written()) > 1
    llm.generate([[1]], SamplingParams(temperature=0, max_tokens=1))
    assert max(written()) <= 1  # a page and a slot that this one may have written to


def test_steps_record_only_while_many_decode(dense: Model) -> None:
    """Requests end one after the other: steps defer their writes while three decode, and then write states;
    what was recorded before is written first."""
    cases = [greedy(tokens_of(20, seed, VOCAB), 4 + 5 * seed) for seed in range(5)]
    core = make_core(dense.folder, cases, Way({"deferred_writes": 6}, record_from=3))
    outputs = [core.requests[core.add(case.prompt, case.params)].output for case in cases]
    core.step()
    pending_after = {True: 0, False: 0}  # by whether many decoded
    while core.has_work:
        slots = [request.slot for request in core.scheduler.requests.values()]
        core.step()
        tags = [core.arena.tag(request.slot) for request in core.scheduler.requests.values()]
        pending_after[len(slots) >= 3] += sum(tag.pending for tag in tags)
    assert pending_after[True] and not pending_after[False]
    for case, output in zip(cases, outputs, strict=True):
        dense.judge.greedy(case.prompt, output.outputs[0].token_ids)
