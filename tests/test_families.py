"""Every family against its oracle: logits, greedy tokens, the exactness matrix, memory, published configs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from denim.commands.configs import find_config
from denim.commands.inspect import describe
from denim.ledger.cost import ledger_json, ledger_of
from denim.models.registry import all_families
from denim.models.weights import load_model
from denim.spec.published import FOLDER as CONFIGS
from denim.spec.reader import read_spec
from tests.exactness.harness import COLD, cold_tokens, crossings, greedy, run, tokens_of, warm
from tests.exactness.judge import Judge, judge_run
from tests.families.row import VOCAB, Row
from tests.families.small import configs, rows
from tests.tiny import Bench, checkpoint

TOLERANCE = 3e-4  # of the spread of the oracle's logits
LENGTH = 150


ROWS = rows()
CROSSINGS = crossings(seed=1)
FEW = CROSSINGS[:4]


class FamilyJudge(Judge):
    """A judge over the row's own way to ask its oracle."""

    def __init__(self, row: Row, oracle: nn.Module) -> None:
        super().__init__(oracle)
        self.row = row

    def logits(self, tokens: Sequence[int]) -> Tensor:
        key = tuple(tokens)
        if key not in self._logits:
            self._logits[key] = self.row.logits(self.reference, list(tokens))
        return self._logits[key]


class Model:
    """A family's small checkpoint, its oracle, and a judge over it."""

    def __init__(self, row: Row, folder: Path) -> None:
        self.row = row
        self.folder = folder
        self.oracle = row.save(folder)
        self.spec = read_spec(folder)
        self.judge = FamilyJudge(row, self.oracle)

    def bench(self) -> Bench:
        model = load_model(self.spec, self.folder, device="cpu", chunk_size=64)
        return Bench(model, self.spec)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(ROWS[request.param], tmp_path_factory.mktemp("model"))


each_family = pytest.mark.parametrize("model", ROWS, indirect=True, scope="module")


@each_family
def test_logits(model: Model) -> None:
    """Whole prompt, ragged segments, and token by token."""
    tokens = tokens_of(LENGTH, 0, VOCAB)
    expected = model.row.logits(model.oracle, tokens)
    spread = expected.std().item()
    assert 0.1 < spread < 100, f"logits of spread {spread} test nothing"
    largest = 0.0
    bench = model.bench()
    for cuts in ([0, LENGTH], [0, 1, 4, 67, 71, LENGTH], [0, 100, *range(101, LENGTH + 1)]):
        parts = [bench.run(tokens, a, b, slot_in=2 if a else -1, slot_out=2) for a, b in pairwise(cuts)]
        largest = max(largest, (torch.cat(parts) - expected).abs().max().item() / spread)
    print(f"{model.row.name}: largest logit difference {largest:.1e} of the spread")  # shown by pytest -s
    assert largest < TOLERANCE


@each_family
def test_the_state_matters(model: Model) -> None:
    """The oracle is worth something: what stands far back moves the last logits."""
    tokens = tokens_of(60, 0, VOCAB)
    changed = [tokens[0] ^ 1, *tokens[1:]]
    first, second = (model.row.logits(model.oracle, t)[-1] for t in (tokens, changed))
    assert (first - second).abs().max() > 10 * TOLERANCE * first.std()


@each_family
def test_greedy_tokens(model: Model) -> None:
    """100 tokens behind prompts around the convolution's width, the page and the chunk."""
    cases = [greedy(tokens_of(n, n, VOCAB), 100) for n in (1, 5, 70)]
    judge_run(model.judge, cases, run(model.folder, cases))
    model.judge.check_ties()


@each_family
def test_hits(model: Model) -> None:
    """The same prompts again, from one token before their ends: KV, state and window are all restored."""
    cases = [greedy(tokens_of(n, n, VOCAB), 12) for n in (2, 17, 100)]
    outcome = run(model.folder, cases, warm("ends")(COLD))
    judge_run(model.judge, cases, outcome)
    assert outcome.stats["prefix"]["hit_tokens"] == 1 + 16 + 99


def check_matrix(model: Model, ways: list) -> None:
    cases = [greedy(tokens_of(n, n, VOCAB), 12, prompt_logprobs=0) for n in (1, 3, 16, 64, 65, 100)]
    expected = cold_tokens(model.folder, cases)
    for crossing in ways:
        judge_run(model.judge, cases, run(model.folder, cases, crossing.way), expected)


def test_attention_alone(tmp_path: Path) -> None:
    """No linear layer: the arena has no slots, and a one-token prompt looks like a decode row."""
    oracle = checkpoint(tmp_path, layer_types=["full_attention"] * 4)
    cases = [greedy(tokens_of(n, n, VOCAB), 12, prompt_logprobs=0) for n in (1, 2, 16, 65, 100)]
    for crossing in FEW:
        judge_run(Judge(oracle), cases, run(tmp_path, cases, crossing.way))
    assert run(tmp_path, cases).stats["slots"]["total"] == 0


@each_family
def test_a_few_crossings(model: Model) -> None:
    check_matrix(model, FEW)


@pytest.mark.slow
@each_family
def test_every_crossing(model: Model) -> None:
    check_matrix(model, CROSSINGS)


@each_family
@pytest.mark.parametrize("length", [100, 1000, 3000])
def test_ledger_equals_the_reference_s_cache(model: Model, length: int) -> None:
    if model.row.reference_bytes is None:
        assert model.row.note, "say why there is nothing to compare with"
        pytest.skip(model.row.note)
    ledger = ledger_of(model.spec)
    kv, state, conv = model.row.reference_bytes(model.oracle, tokens_of(length, 0, VOCAB))
    assert (kv, state, conv) == (length * ledger.kv_bytes_per_token, ledger.state_bytes, ledger.conv_bytes)


@pytest.mark.parametrize(
    ("file", "pattern", "billions"),
    [(file, *expected) for row in ROWS.values() for file, expected in row.configs.items()],
)
def test_published_configs(file: str, pattern: str, billions: float) -> None:
    spec = read_spec(json.loads((CONFIGS / file).read_text()))
    values = ledger_json(spec)
    assert values["layers"] == pattern
    assert values["parameters"] == pytest.approx(billions * 1e9, rel=0.02)
    assert describe(find_config(CONFIGS / file))["layers"] == pattern


def test_every_family_has_a_row(tmp_path: Path) -> None:
    """And the rows' models without transformers, which run on a GPU, are the same."""
    covered = set()
    stored = configs()
    assert stored.keys() == ROWS.keys(), "run python -m tests.families.small"
    for name, row in ROWS.items():
        row.save(tmp_path / name)
        spec = read_spec(tmp_path / name)
        assert read_spec(stored[name]) == spec, f"{name} has changed: run python -m tests.families.small"
        covered.add(spec.family)
    assert covered >= set(all_families()), "a family without a row in tests/families"
