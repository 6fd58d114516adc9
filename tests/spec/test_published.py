"""The configs that ship: every name has a file that a reader takes, and the wheel takes the files along."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

import denim
from denim.spec import read_spec
from denim.spec.published import FOLDER, GROUPS, published_configs


@pytest.mark.parametrize("name", published_configs())
def test_a_reader_takes_it(name: str) -> None:
    assert read_spec(published_configs()[name]).layers


def test_no_name_stands_in_two_groups() -> None:
    assert sum(map(len, GROUPS.values())) == len(published_configs())


def test_the_wheel_has_them() -> None:
    project = Path(denim.__file__).parents[1] / "pyproject.toml"
    patterns = tomllib.loads(project.read_text())["tool"]["setuptools"]["package-data"]["denim"]
    inside = [str(path.relative_to(FOLDER.parents[1])) for path in published_configs().values()]
    assert [path for path in inside if not any(fnmatch(path, pattern) for pattern in patterns)] == []
