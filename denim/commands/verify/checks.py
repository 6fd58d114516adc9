"""The ways in which a request may come to begin from the cache, each as one check.

Owns the list. A check names the engine's options and what is done with it; it says which prompt was asked,
what came, and how many tokens must have been reused. Whether that is right, the judge says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from denim.commands.verify.judge import Answer
from denim.commands.verify.probes import Probe, Probes
from denim.commands.verify.session import TOKENS, Prompt, Session, answer_of
from denim.engine.cache_wishes import CacheWishes
from denim.ledger.deferred import deferred_cost
from denim.ledger.reload import DISK, HOST
from denim.spec.model import ModelSpec

TURNS = 4
RECORDS = 5  # of a ring of deferred writes: an answer does not end where the ring does


class Outcome(NamedTuple):
    """`reused`: tokens that must have come from the cache, at least."""

    prompt: Prompt
    answer: Answer
    reused: int


Act = Callable[[Session, Probes], Iterator[Outcome]]


@dataclass(frozen=True)
class Check:
    """`needs`: why it is left out where the model is none of those that it `fits`, or `act` finds nothing to
    do. `tier`: the lowest one below the device, `HOST` or `DISK`; "": none."""

    name: str
    act: Act
    options: dict[str, Any] = field(default_factory=dict)
    needs: str = ""
    tier: str = ""
    fits: Callable[[ModelSpec], bool] = lambda spec: True


def at_positions(session: Session, probes: Probes) -> Iterator[Outcome]:
    yield from _behind_heads(session, probes.each)


def on_blocks(session: Session, probes: Probes) -> Iterator[Outcome]:
    yield from _behind_heads(session, probes.long)


def _behind_heads(session: Session, probes: Sequence[Probe]) -> Iterator[Outcome]:
    for probe in probes:
        reused = session.leave(probe.head)
        yield Outcome(probe.prompt, session.answer(probe.prompt), reused)


def again(session: Session, probes: Probes) -> Iterator[Outcome]:
    """The same prompt computes one token."""
    for probe in probes.each:
        session.answer(probe.prompt)
        yield Outcome(probe.prompt, session.answer(probe.prompt), _worth(session, len(probe.prompt) - 1))


def at_marks(session: Session, probes: Probes) -> Iterator[Outcome]:
    """Checkpoints saved inside one prompt, then prompts that leave it just there."""
    for whole, other in zip(probes.each, probes.each[1:], strict=False):
        marks = sorted({whole.position, max(1, whole.position // 2), max(1, whole.position // 3)})
        session.answer(whole.prompt, cache=CacheWishes(cache_control=marks))
        for mark in marks:
            different = (whole.prompt[mark] + 1) % session.core.spec.vocab_size
            prompt = [*whole.prompt[:mark], different, *other.prompt[-other.tail :]]
            yield Outcome(prompt, session.answer(prompt), mark)


def next_turns(session: Session, probes: Probes) -> Iterator[Outcome]:
    """Conversations: what was generated is part of the next prompt, and its states came from decode steps."""
    for probe in probes.each[::3]:
        history, known = list(probe.prompt), 0
        most = session.core.scheduler.config.max_model_len - TOKENS
        for _ in range(TURNS):
            if len(history) > most:
                break
            answer = session.answer(history)
            yield Outcome(list(history), answer, known)
            history += answer.tokens
            known = len(history) - 1  # the last token was drawn, and never applied
            history += probe.prompt[-probe.tail :]


def siblings(session: Session, probes: Probes) -> Iterator[Outcome]:
    """Prompts that share a head which nobody has computed, all at once; and once more when it is known."""
    prompts: list[Prompt] = [probe.prompt for probe in probes.siblings]
    for known in (False, True):
        for number, answer in enumerate(session.answers(prompts)):
            reused = probes.siblings[number].position if number or known else 0
            yield Outcome(prompts[number], answer, _worth(session, reused))


def owner_runs_on(session: Session, probes: Probes) -> Iterator[Outcome]:
    for probe in probes.each[::2]:
        owner = session.start(probe.head, steps=0)
        while not owner.outputs[0].token_ids:
            session.core.step()
        answer = session.answer(probe.prompt)
        yield Outcome(probe.prompt, answer, _worth(session, probe.position - 1))
        yield Outcome(probe.head, answer_of(owner), 0)


def evicted_and_back(session: Session, probes: Probes) -> Iterator[Outcome]:
    for probe in probes.each[::2]:
        session.leave(probe.head)
        session.cache.evict_all()
        yield Outcome(probe.prompt, session.answer(probe.prompt), 0)
        yield Outcome(probe.prompt, session.answer(probe.prompt), _worth(session, len(probe.prompt) - 1))


def preempted(session: Session, probes: Probes) -> Iterator[Outcome]:
    """Right behind the hit, while the state still lies in the checkpoint, and later."""
    for number, probe in enumerate(probes.each):
        session.leave(probe.head)
        output = session.start(probe.prompt, steps=1 + number % 4)
        session.start([1, 2], steps=1, priority=-1)
        session.finish()
        yield Outcome(probe.prompt, answer_of(output), probe.position)


def aborted(session: Session, probes: Probes) -> Iterator[Outcome]:
    """What a request leaves that ends while it saves."""
    for number, probe in enumerate(probes.each):
        marks = (max(1, probe.position // 2), probe.position)
        output = session.start(probe.head, steps=1 + number % 3, cache=CacheWishes(cache_control=marks))
        session.core.abort(output.request_id)
        yield Outcome(probe.prompt, session.answer(probe.prompt), 0)


def several(session: Session, probes: Probes) -> Iterator[Outcome]:
    for probe in probes.each[::2]:
        session.leave(probe.head)
        for answer in session.completions(probe.prompt, n=3):
            yield Outcome(probe.prompt, answer, probe.position)


def chat_turns(session: Session, probes: Probes) -> Iterator[Outcome]:
    """By the model's own chat template: a turn reuses what it shares with the last one."""
    tokenizer = session.core.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        return
    messages = [{"role": "user", "content": "What is a loom? Please answer in one short sentence."}]
    known = 0
    for _ in range(3):
        read = session.core.reader.read_chat(messages)
        answer = session.answer(read)
        yield Outcome(read, answer, known)
        known = read.boundaries[-1] if read.boundaries else 0
        messages.append({"role": "assistant", "content": tokenizer.decode(list(answer.tokens))})
        messages.append({"role": "user", "content": "And who invented it? Say it as briefly as you can."})


def from_host(session: Session, probes: Probes) -> Iterator[Outcome]:
    for probe in probes.each:
        session.leave(probe.head)
        session.push_out()
        yield Outcome(probe.prompt, session.answer(probe.prompt), probe.position)


def from_files(session: Session, probes: Probes) -> Iterator[Outcome]:
    for probe in probes.each:
        session.leave(probe.head)
        session.push_out()
        session.push_further()
        yield Outcome(probe.prompt, session.answer(probe.prompt), probe.position)


def after_a_restart(session: Session, probes: Probes) -> Iterator[Outcome]:
    for probe in probes.each:
        session.leave(probe.head)
    session.restart()
    for probe in probes.each:
        yield Outcome(probe.prompt, session.answer(probe.prompt), probe.position)


def _worth(session: Session, position: int) -> int:
    """What `auto` saves without being asked spares at least a chunk."""
    return position if position >= session.cache.grid.chunk else 0


def can_defer(spec: ModelSpec) -> bool:
    return deferred_cost(spec, RECORDS) is not None


CAN_DEFER = "no layer can defer its writes"
A_BLOCK = "its blocks are longer than the context"

CHECKS = (
    Check("random positions", at_positions),
    Check("marks inside a prompt", at_marks),
    Check("the same prompt again", again),
    Check("next turns", next_turns),
    Check("chat template", chat_turns, needs="there is no chat template"),
    Check("siblings at once", siblings),
    Check("hit while its owner runs on", owner_runs_on),
    Check("evicted, and back", evicted_and_back),
    Check("preempted after a hit", preempted, {"max_num_seqs": 1}),
    Check("preempted, nothing swapped", preempted, {"max_num_seqs": 1, "swap_space": 0}),
    Check("aborted while it saves", aborted, {"max_num_batched_tokens": 64}),
    Check("three completions", several),
    Check("next turns, deferred writes", next_turns, {"deferred_writes": RECORDS}, CAN_DEFER, fits=can_defer),
    Check("policy ends", at_positions, {"checkpoint_policy": "ends"}),
    Check("policy align", on_blocks, {"checkpoint_policy": "align"}, A_BLOCK),
    Check("policy all", on_blocks, {"checkpoint_policy": "all"}, A_BLOCK),
    Check("from host memory", from_host, tier=HOST),
    Check("from files", from_files, tier=DISK),
    Check("from files, after a restart", after_a_restart, tier=DISK),
)
