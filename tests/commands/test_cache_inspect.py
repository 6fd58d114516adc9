"""`denim cache inspect`: a tree that people read, from a server, a dump or a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from denim import LLM, ConfigError, SamplingParams
from denim.cache.snapshot import FORM, snapshot
from denim.cli import app
from denim.commands.cache_inspect import drawn, heading, node_text, read_snapshot, show_cache
from tests.cache.memory import World
from tests.cache.test_stored_snapshot import filled


def grown() -> World:
    """A conversation of four turns, another that leaves it after the second, and a use of each."""
    world = World(num_slabs=80)
    turns = [[turn * 10 + i for i in range(8)] for turn in range(4)]
    for turn in range(4):
        world.run([token for part in turns[: turn + 1] for token in part])
    world.run([*turns[0], *turns[1], 91, 92])
    return world


def text_of(found: dict[str, Any], most: int = 100) -> str:
    console = Console(width=100, highlight=False)
    with console.capture() as capture:
        console.print(drawn(found, most), soft_wrap=True)
    return capture.get()


def test_a_path_goes_down_and_branches_are_indented() -> None:
    text = text_of(snapshot(grown().cache))
    lines = text.splitlines()[1:]
    starts = [line[: len(line) - len(line.lstrip("│├└─ "))] for line in lines]
    shown = [line.lstrip("│├└─ ").split("  ")[0] for line in lines]
    assert shown == ["0 → 8", "8 → 16", "16 → 24", "24 → 32", "16 → 18"]
    assert starts == ["└── ", "    ", "    ├── ", "    │   ", "    └── "]
    assert "● generation end, 2 hits" in lines[1]


def test_what_a_line_says() -> None:
    node: dict[str, Any] = {"start": 1000, "end": 2500, "checkpoint": None, "lost": "no_memory"}
    node |= {"bytes": 0, "below": 0, "running": 2}
    text = node_text(node)
    assert "1,000 → 2,500" in text and "○[/] no memory" in text and "ids only" in text and "2 running" in text
    kept = node | {"checkpoint": {"kind": "mark", "hits": 0}, "bytes": 2048, "below": 1, "running": 0}
    assert "● " in node_text(kept).replace("[/]", "") and "2 KiB" in node_text(kept)
    assert "hit" not in node_text(kept)
    used = kept | {"checkpoint": {"kind": "mark", "hits": 1}}
    assert "mark, 1 hit  " in node_text(used)


def test_the_heading_counts() -> None:
    world = grown()
    text = heading(snapshot(world.cache))
    assert "(auto): 5 checkpoints (5 generation end)" in text
    account = world.cache.stats()
    assert f"reused {account['hit_tokens']:,} of {account['query_tokens']:,} prompt tokens" in text
    assert heading(snapshot(World().cache)).endswith("0 checkpoints; 0 B with their pages")


def test_the_tiers_below_are_named() -> None:
    llm = LLM(device="cpu", memory="16MiB", max_model_len=512, host_memory="8MiB")
    llm.generate([[5, 6, 7] * 30], SamplingParams(temperature=0, max_tokens=2))
    found = llm.cache_snapshot()
    assert found is not None and found["tiers"] == llm.stats()["tiers"]
    assert "host: 0 checkpoints in 0 B of 8 MiB" in heading(found)


def test_a_large_tree_is_cut() -> None:
    text = text_of(snapshot(grown().cache), most=2)
    assert text.count("→") == 2 and "and 3 nodes more" in text


def test_a_dump(tmp_path: Path) -> None:
    found = snapshot(grown().cache)
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(found))
    assert read_snapshot(str(path)) == found
    result = CliRunner().invoke(app, ["cache", "inspect", str(path)])
    assert result.exit_code == 0 and "0 → 8" in result.stdout
    as_json = CliRunner().invoke(app, ["cache", "inspect", str(path), "--json"])
    assert json.loads(as_json.stdout) == found


def test_lines_are_whole_in_a_pipe(tmp_path: Path) -> None:
    found = snapshot(grown().cache)
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(found))
    shown = CliRunner().invoke(app, ["cache", "inspect", str(path)], env={"COLUMNS": "40"}).stdout
    assert shown.splitlines()[0] == Console().render_str(heading(found)).plain


def test_a_count_of_nodes_below_zero(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["cache", "inspect", str(tmp_path), "--most", "-1"])
    assert isinstance(result.exception, ConfigError) and "--most is -1" in str(result.exception)


def test_a_directory(tmp_path: Path) -> None:
    filled(tmp_path).close()
    text = text_of(read_snapshot(str(tmp_path)))
    assert "(files): 4 checkpoints" in text and "0 → 8" in text and "8 → 12" in text
    assert "requests with a salt" in text and "requests without a salt" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no URL, no directory and no file"),
        ("null", "its checkpoint_policy is none"),
        ("nonsense", "is not JSON: .*; give the URL of `denim serve`"),
        ("[" * 100_000, "is not JSON: .*; give the URL of `denim serve`"),
        ("[]", "is JSON, but no snapshot of a prefix cache; give the URL"),
        ('{"a": 1}', "is JSON, but no snapshot"),
        ('{"form": 99, "nodes": []}', "snapshot in form 99, and this is a Denim that reads form 1"),
    ],
)
def test_what_is_no_snapshot(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_snapshot(str(path))


@pytest.mark.parametrize("rest", [{"nodes": 3}, {"nodes": []}, {"nodes": [{}]}, {"nodes": [], "account": []}])
def test_a_snapshot_that_is_not_whole(tmp_path: Path, rest: dict[str, Any]) -> None:
    path = tmp_path / "file"
    path.write_text(json.dumps({"form": FORM, **rest}))
    with pytest.raises(ConfigError, match="is no whole snapshot of a prefix cache"):
        show_cache(str(path), None, 100, as_json=False)


def test_a_server_that_is_not_there() -> None:
    message = r"asked: \[Errno \d+\] Connection refused; is `denim serve` running there"
    with pytest.raises(ConfigError, match=message):
        read_snapshot("http://127.0.0.1:9")
