"""What passes between the clients' side of an engine and the loop that runs it.

Owns the kinds of messages. All are plain values that can be pickled, so that the loop may run in a thread or
in a process of its own. A request is known by its ticket, a number that is never used twice; its id may be.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from denim.engine.cache_wishes import CacheWishes
from denim.engine.facts import EngineFacts
from denim.engine.outputs import StreamDelta
from denim.engine.prompts import ReadPrompt
from denim.sampling_params import SamplingParams


class Add(NamedTuple):
    """A request. It is answered by Accepted or Refused, then by deltas."""

    ticket: int
    prompt: ReadPrompt
    params: SamplingParams
    request_id: str | None
    priority: int
    cache: CacheWishes


class Abort(NamedTuple):
    """End a request. One that is over, or was refused, is no error."""

    ticket: int


class Ask(NamedTuple):
    """The name of a question to the engine (`denim.engine.engine_loop`), answered by Answer."""

    number: int
    question: str


class Close(NamedTuple):
    """End the loop; nothing is answered any more."""


Command = Add | Abort | Ask | Close


class Accepted(NamedTuple):
    ticket: int
    request_id: str


class Refused(NamedTuple):
    """The request was not accepted, or its record was lost; there is nothing more to come."""

    ticket: int
    error: Exception


class Deltas(NamedTuple):
    """What one step brought, with the tickets. A request is over when all its completions are finished."""

    items: list[tuple[int, StreamDelta]]


class Answer(NamedTuple):
    """`error` is raised where the question was asked, if it is not None."""

    number: int
    value: Any
    error: Exception | None


class State(NamedTuple):
    """What the engine is from now on; None: it sleeps. Comes before the answer to whoever put it to sleep or
    woke it, who may have left by then."""

    facts: EngineFacts | None


Event = Accepted | Refused | Deltas | Answer | State
