"""Runs the checks and judges what came.

Owns the recomputes, one for each prompt, and the control that says how far two of them may be apart. Prints
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from denim.cache.sizing import block_tokens
from denim.commands.verify.checks import TURNS, Check, Outcome
from denim.commands.verify.judge import Answer, Difference, Rule, compare
from denim.commands.verify.probes import BEYOND, Sizes, draw_probes
from denim.commands.verify.session import TOKENS, Prompt, Session
from denim.engine.loading import LoadedModel
from denim.engine.options import EngineOptions
from denim.engine.prompts import ReadPrompt
from denim.ledger.reload import DISK
from denim.memory.layout import ArenaLayout
from denim.spec.ffn import MoEFFN

SEATS = 16
"""Requests at once; the arena holds as many of the longest, most of them as checkpoints."""

SHORT = 8
"""A prompt of fewer pieces than this is cut into shorter ones: what is cut once or twice may by chance be
rounded as the whole is."""

CONTROL = "recompute, cut elsewhere"


@dataclass
class Row:
    """Of one check. `asked` requests of `prompted` tokens reused `reused` of them. `tokens` were compared;
    `ties` of them differ from those of a recompute with which they tie. mean, worst: nats by which
    log-probabilities differ; rule_mean, rule_tie: what was allowed. `faults`: what is wrong, a sentence
    each. `left_out`: why it did not run."""

    name: str
    asked: int = 0
    prompted: int = 0
    reused: int = 0
    tokens: int = 0
    ties: int = 0
    mean: float = 0.0
    worst: float = 0.0
    rule_mean: float = 0.0
    rule_tie: float | None = None
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)
    left_out: str = ""


class Matrix:
    """`options` are the user's, of the engine; `count` probes of up to `longest` tokens."""

    def __init__(
        self, loaded: LoadedModel, options: dict[str, Any], seed: int, count: int, longest: int
    ) -> None:
        self._loaded = loaded
        spec = loaded.spec
        given = EngineOptions.of(**options)
        layout = ArenaLayout.of(spec, given.page_size, given.kept_kv_dtype)
        width = max(_width(layer.mixer) for layer in spec.layers)
        block = block_tokens(layout, given.chunk_size)
        sizes = Sizes(width, given.page_size, given.chunk_size, block)
        tail = given.chunk_size + 1  # the longest
        context = max(longest + TURNS * (tail + TOKENS), block + BEYOND + tail) + TOKENS
        context = min(context, spec.max_position)
        longest = min(longest, context - tail - TOKENS)
        most = {name: n * SEATS for name, n in layout.need(context).items()}
        self._options = options | {
            "max_model_len": context,
            "max_num_seqs": SEATS,
            "memory": layout.slabs_for(most) * layout.slab_bytes,
        }
        self._probes = draw_probes(seed, count, longest, context - TOKENS, sizes, spec.vocab_size)
        self._exact = {spec.dtype, spec.state_dtype, given.kept_kv_dtype or spec.dtype} == {"float32"}
        self._rule = Rule.of(self._exact, any(isinstance(layer.ffn, MoEFFN) for layer in spec.layers))
        self._recomputed = _Recomputed(self._alone())
        self._pieces = [given.chunk_size // 2 + 1, given.chunk_size // 8 + 1]
        self._cut = [_Recomputed(self._alone(max_num_batched_tokens=tokens)) for tokens in self._pieces]
        self._controls: dict[tuple[int, ...], Difference] = {}

    def control(self) -> Row:
        """Recomputes against recomputes that are cut where no chunk ends."""
        row = Row(CONTROL)
        with _timed(row):
            prompts: list[Prompt] = [probe.prompt for probe in self._probes.each]
            self._judge(row, [Outcome(prompt, self._cut_elsewhere(prompt), 0) for prompt in prompts])
        return row

    def rows(self, checks: Sequence[Check]) -> Iterator[Row]:
        """One row a check; checks of equal options share an engine."""
        for (tier, options), same in groupby(checks, key=lambda check: (check.tier, check.options)):
            session: Session | None = None
            with TemporaryDirectory(prefix="denim-verify-") as folder:
                below = {"host_memory": self._options["memory"]} if tier else {}
                below |= {"disk_cache": folder} if tier == DISK else {}
                for check in same:
                    row = Row(check.name)
                    if not check.fits(self._loaded.spec):
                        row.left_out = check.needs
                        yield row
                        continue
                    with _timed(row):
                        try:
                            session = session or self._session(options | below)
                            session.core.reset_prefix_cache()
                            outcomes = list(check.act(session, self._probes))
                            self._judge(row, outcomes)
                            row.left_out = "" if outcomes else check.needs
                        except Exception as error:  # whatever it is, the next check gets a fresh engine
                            row.faults.append(f"{type(error).__name__}: {error}")
                            session = None
                    yield row
                if session is not None:
                    session.close()

    def _alone(self, **options: Any) -> Session:
        """An engine without a cache, for one request at a time."""
        plain = {"checkpoint_policy": "none", "max_num_seqs": 1, "memory": None}
        return self._session(plain | options)

    def _cut_elsewhere(self, prompt: Prompt) -> Answer:
        """The recompute, in pieces that end where no chunk does."""
        short = len(_ids(prompt)) < SHORT * self._pieces[0]
        return self._cut[short](prompt)

    def _session(self, options: dict[str, Any]) -> Session:
        return Session(self._loaded, self._options | options)

    def _judge(self, row: Row, outcomes: Sequence[Outcome]) -> None:
        differences = [compare(self._recomputed(o.prompt), o.answer) for o in outcomes]
        rule = self._rule
        if not self._exact and outcomes:
            rule = rule.beside(*self._control([outcome.prompt for outcome in outcomes]))
        row.rule_mean, row.rule_tie = rule.mean, rule.tie
        for number, (outcome, difference) in enumerate(zip(outcomes, differences, strict=True), 1):
            length, cached = len(_ids(outcome.prompt)), outcome.answer.cached
            where = f"request {number}, {length} tokens of which {cached} were reused"
            row.asked += 1
            row.prompted += length
            row.reused += cached
            row.tokens += difference.tokens
            row.ties += difference.place is not None
            if not outcome.answer.ended:
                row.faults.append(f"{where}: it did not come to its end")
            if cached < outcome.reused:
                row.faults.append(f"{where}: {outcome.reused} should have been")
            if rule.breaks(difference):
                row.faults.append(
                    f"{where}: token {difference.place} differs, where the recompute's two best are"
                    f" {difference.gap:.2g} nat apart; a tie is up to {rule.tie:.2g}"
                )
        deltas = [delta for difference in differences for delta in difference.deltas]
        if deltas:
            row.mean, row.worst = mean(deltas), max(deltas)
        if row.mean > rule.mean:
            row.faults.append(
                f"log-probabilities differ by {row.mean:.2g} nat on average;"
                f" rounding explains {rule.mean:.2g}"
            )

    def _control(self, prompts: Sequence[Prompt]) -> tuple[list[Difference], list[Difference]]:
        """What rounding does to these prompts, and to all so far."""
        own = {
            tuple(_ids(prompt)): compare(self._recomputed(prompt), self._cut_elsewhere(prompt))
            for prompt in prompts
        }
        self._controls |= own
        return list(own.values()), list(self._controls.values())


class _Recomputed:
    """Answers of an engine without a cache, each prompt alone; one for each prompt."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._answers: dict[tuple[int, ...], Answer] = {}

    def __call__(self, prompt: Prompt) -> Answer:
        key = tuple(_ids(prompt))
        if key not in self._answers:
            self._answers[key] = self._session.answer(list(key))
        return self._answers[key]


def _ids(prompt: Prompt) -> Sequence[int]:
    return prompt.tokens if isinstance(prompt, ReadPrompt) else prompt


@contextmanager
def _timed(row: Row) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    row.seconds = time.perf_counter() - begin


def _width(mixer: Any) -> int:
    """Tokens that the mixer's short convolution spans; 1 where there is none."""
    shapes = {tensor.role: tensor.shape for tensor in mixer.state_tensors("float32", "float32")}
    return shapes["conv"][0] + 1 if "conv" in shapes else 1
