import json
import logging

import pytest
from typer.testing import CliRunner

from denim import LLM
from denim.cli import app
from denim.commands.profile.measure import HOST, REST
from denim.commands.profile.parts import ATTENTION, FFN, HEAD, LINEAR, SAMPLING, work_of
from denim.commands.profile.report import numbers, show_profile
from denim.errors import ConfigError


@pytest.fixture(scope="module")
def llm() -> LLM:
    logging.getLogger("denim").setLevel(logging.WARNING)
    return LLM(memory="20MiB", max_model_len=200, max_num_seqs=4)


def test_every_part_is_timed_and_nothing_is_left_behind(llm, capsys, tmp_path):
    show_profile(llm, [1, 3], 40, [70], tmp_path, as_json=True)
    result = json.loads(capsys.readouterr().out)
    assert [step["title"] for step in result["steps"]] == [
        "decode, 1 x 40 tokens",
        "decode, 3 x 40 tokens",
        "prefill, 70 tokens",
    ]
    for step in result["steps"]:
        names = [part["name"] for part in step["parts"]]
        assert names == [ATTENTION, LINEAR, FFN, HEAD, SAMPLING, REST, HOST]
        assert all(part["seconds"] > 0 and part["floor"] > 0 for part in step["parts"][:5])
        assert step["floor"] == pytest.approx(sum(part["floor"] for part in step["parts"][:5]))
    assert json.loads((tmp_path / "profile.json").read_text()) == result
    assert (tmp_path / "profile.png").stat().st_size > 10_000
    assert llm.stats()["slots"]["used"] == 0
    llm.check()
    assert len(llm.generate([[1, 2, 3]])[0].outputs[0].token_ids) > 0


def test_the_table_names_the_parts(llm, capsys):
    show_profile(llm, [2], 20, [], None, as_json=False)
    printed = capsys.readouterr().out
    assert "decode, 2 x 20 tokens" in printed
    assert "linear layers" in printed and "time / floor" in printed


def test_states_are_read_and_written_once_for_each_request(llm):
    spec = llm.core.spec
    one, three = (work_of(spec, [], LINEAR, rows, rows, 40) for rows in (1, 3))
    assert one.moved_bytes == 2 * llm.core.layout.size_class("slot").entry_bytes
    assert three.moved_bytes == 3 * one.moved_bytes
    assert three.flops == 3 * one.flops > 0


@pytest.mark.parametrize("text", ["0", "1,x", "-1", "1,,2"])
def test_numbers_that_are_none(text):
    with pytest.raises(ConfigError, match="--batch"):
        numbers("--batch", text)


@pytest.mark.parametrize("option", ["--context", "--prompt"])
def test_what_the_model_cannot_hold_is_refused_before_it_is_loaded(option, monkeypatch):
    monkeypatch.setattr("denim.commands.engine.open_engine", lambda *_: pytest.fail("loaded"))
    error = CliRunner().invoke(app, ["profile", option, "99999999"]).exception
    assert isinstance(error, ConfigError) and "are more than max_model_len=" in str(error)


def test_what_does_not_fit_is_refused(llm):
    assert numbers("--batch", " ") == []
    with pytest.raises(ConfigError, match="max_model_len=200"):
        show_profile(llm, [1], 190, [], None, as_json=True)
    with pytest.raises(ConfigError, match="do not fit, only 4"):
        show_profile(llm, [9], 40, [], None, as_json=True)
    assert not llm.core.requests
