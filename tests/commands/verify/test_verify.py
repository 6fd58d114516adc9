"""`denim verify` passes on what is right, and finds what is wrong, in fp32 and in bf16."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from denim.cli import app
from denim.commands.verify import report
from denim.commands.verify.checks import CHECKS, Check, Outcome, at_positions
from denim.commands.verify.matrix import CONTROL, Matrix, Row
from denim.commands.verify.probes import Probes
from denim.commands.verify.report import Extent, advice, verify
from denim.commands.verify.session import ONE_TOKEN, Session
from denim.engine.loading import load
from denim.engine.options import EngineOptions
from denim.memory.layout import PAGE
from tests.tiny import checkpoint

SMALL = Extent(2, 90)
SEVERAL = Extent(4, 120)
POSITIONS = Check("random positions", at_positions)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    checkpoint(folder, max_position_embeddings=1024)
    return folder


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_what_is_right_passes(folder: Path, dtype: str) -> None:
    """Every check runs, and reuses what it says that it does."""
    piped = StringIO()
    done = verify({"model": folder, "device": "cpu", "dtype": dtype}, 0, SMALL, Console(file=piped))
    lines = [line.partition(": ") for line in piped.getvalue().splitlines()]
    assert [name for name, _, _ in lines] == [row["name"] for row in done["checks"]]
    for (_, _, told), row in zip(lines, done["checks"], strict=True):
        assert told.startswith("left out, " if row["left_out"] else "passed, ")
    assert done["passed"] and done["advice"] == []
    assert [row["name"] for row in done["checks"]] == [CONTROL, *(check.name for check in CHECKS)]
    for row in done["checks"]:
        assert bool(row["left_out"]) != bool(row["asked"])
        assert row["tokens"] == 0 or row["mean"] <= row["rule_mean"]
    left_out = [row["name"] for row in done["checks"] if row["left_out"]]
    assert left_out == ["chat template"]
    assert done["checks"][1]["reused"] > 0
    json.dumps(done)


def slots(session: Session) -> dict[int, Any]:
    """Tokens -> the slot of the checkpoint that stands for them."""
    nodes = session.cache.tree.nodes()
    return {node.end: node.checkpoint.slot for node in nodes if node.checkpoint is not None}


def other_window(session: Session, head: list[int]) -> None:
    """The window of one convolution is another one's."""
    place = next(tensor for tensor in session.core.layout.slot_tensors if tensor.role == "conv")
    session.core.runner.storage.state(place.layer, "conv")[slots(session)[len(head)]].zero_()


def one_token_late(session: Session, head: list[int]) -> None:
    """The state has one token more applied to it than it stands for."""
    session.answers([[*head, 3]], ONE_TOKEN)
    found = slots(session)
    for tensor in session.core.layout.slot_tensors:
        state = session.core.runner.storage.state(tensor.layer, tensor.role)
        state[found[len(head)]] = state[found[len(head) + 1]]
    for node in list(session.cache.tree.nodes()):
        if node.checkpoint is not None and node.end == len(head) + 1:
            session.cache.evict(node)


def no_page(session: Session, head: list[int]) -> None:
    """One page of KV is another one's."""
    node = next(node for node in session.cache.tree.nodes() if node.end == len(head))
    (bytes_,) = session.core.runner.storage.parts(PAGE, node.pages[:1])
    bytes_.zero_()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("damage", [other_window, one_token_late, no_page])
def test_what_is_wrong_is_found(
    folder: Path, dtype: str, damage: Callable[[Session, list[int]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in one tensor of one checkpoint is far above what rounding does."""
    leave = Session.leave

    def damaged(session: Session, head: list[int]) -> int:
        reused = leave(session, head)
        damage(session, head)
        return reused

    monkeypatch.setattr(Session, "leave", damaged)
    options = {"model": folder, "device": "cpu", "dtype": dtype}
    matrix = Matrix(load(EngineOptions.of(**options)), options, 0, *SEVERAL)
    (row,) = matrix.rows([POSITIONS])
    assert row.faults and row.mean > 3 * row.rule_mean


def test_a_hit_that_does_not_come_is_a_fault(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave = Session.leave
    monkeypatch.setattr(Session, "leave", lambda session, head: leave(session, head) + 1)
    options = {"model": folder, "device": "cpu", "dtype": "float32"}
    (row,) = Matrix(load(EngineOptions.of(**options)), options, 0, *SMALL).rows([POSITIONS])
    assert len(row.faults) == SMALL.positions and all("should have been" in fault for fault in row.faults)


def test_an_answer_that_does_not_come_to_its_end_is_a_fault(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Session.answer
    monkeypatch.setattr(Session, "answer", lambda self, prompt: answer(self, prompt)._replace(ended=False))
    options = {"model": folder, "device": "cpu", "dtype": "float32"}
    (row,) = Matrix(load(EngineOptions.of(**options)), options, 0, *SMALL).rows([POSITIONS])
    assert len(row.faults) == SMALL.positions and all("not come to its end" in fault for fault in row.faults)


def test_an_engine_that_breaks_is_a_fault_and_the_next_check_runs(folder: Path) -> None:
    def breaks(session: Session, probes: Probes) -> Iterator[Outcome]:
        session.core.arena.alloc("slot")  # held by nobody
        yield from at_positions(session, probes)

    options = {"model": folder, "device": "cpu", "dtype": "float32"}
    matrix = Matrix(load(EngineOptions.of(**options)), options, 0, *SMALL)
    broken, whole = matrix.rows([Check("breaks", breaks), POSITIONS])
    assert any("AssertionError" in fault for fault in broken.faults)
    assert not whole.faults and whole.asked == SMALL.positions


def test_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table, JSON, and exit code 1 with advice where something is wrong."""
    monkeypatch.setattr(report, "CHECKS", (POSITIONS,))
    monkeypatch.setattr(report, "QUICK", SMALL)
    arguments = ["verify", str(folder), "--quick", "--device", "cpu", "--dtype", "float32"]
    table = CliRunner().invoke(app, arguments)
    assert table.exit_code == 0 and "✓  random positions" in table.stdout
    assert "all checks passed" in table.stdout
    leave = Session.leave
    monkeypatch.setattr(Session, "leave", lambda session, head: leave(session, head) + 1)
    as_json = CliRunner().invoke(app, [*arguments, "--json"])
    done = json.loads(as_json.stdout)
    assert as_json.exit_code == 1 and not done["passed"] and done["seed"] == 0
    assert 'checkpoint_policy="none"' in done["advice"][0]
    table = CliRunner().invoke(app, arguments)
    assert table.exit_code == 1 and "✗ random positions: request 1" in table.stdout


def test_a_control_that_fails_is_a_failure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although every hit is as its recompute."""
    monkeypatch.setattr(report, "CHECKS", (POSITIONS,))
    monkeypatch.setattr(Matrix, "control", lambda matrix: Row(CONTROL, faults=["cut elsewhere"]))
    options = {"model": folder, "device": "cpu", "dtype": "float32"}
    level = logging.getLogger("denim").level
    done = verify(options, 0, SMALL, Console(file=StringIO()))
    assert [bool(row["faults"]) for row in done["checks"]] == [True, False]
    assert not done["passed"] and "do not serve" in done["advice"][0]
    assert logging.getLogger("denim").level == level, "engines speak again"


def test_advice_names_what_to_change() -> None:
    assert advice([], []) == []
    assert "do not serve" in advice([CONTROL, "policy all"], [])[0]
    assert "attention_backend='torch'" in advice(["x"], [("kernels", "attention_backend='torch'")])[0]
