"""Imports inside Denim only point downward, and the parts without tensors load without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import denim

ROOT = Path(denim.__file__).parent

# Top to bottom; a part may import itself and what lies in a lower row.
ROWS = [
    {"server", "cli", "commands", "cluster"},
    {"web"},
    {"engine"},
    {"scheduler", "speculative"},
    {"runner"},
    {"cache"},
    {"memory"},
    {"models"},
    {"layers"},
    {"recurrence"},
    {"ledger"},
    {"spec"},
    {"sampling_params"},
    {"structured_output"},
    {"json_schema"},
    {"errors"},
]
# Parts of one row that may see each other, in this direction only.
SIBLINGS = {("cli", "commands"), ("commands", "server")}

RANK = {part: -row for row, parts in enumerate(ROWS) for part in parts}
SOURCES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_parts(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, part) of every import of Denim's own modules, those inside functions included."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [
                (node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "denim"
            ]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            if node.module == "denim":
                found += [(node.lineno, home_of(alias.name)) for alias in node.names]
            elif node.module and node.module.startswith("denim."):
                found.append((node.lineno, node.module))
    return [(line, name.split(".")[1]) for line, name in found if "." in name]


def home_of(name: str) -> str:
    """The module behind `from denim import name`; "denim" alone for what the root itself defines."""
    return denim._HOMES.get(name, f"denim.{name}" if name in RANK else "denim")


def violations(part: str, source: str) -> list[str]:
    return [
        f"line {line}: {part} imports {target}"
        for line, target in imported_parts(ast.parse(source))
        if target != part and RANK[target] >= RANK[part] and (part, target) not in SIBLINGS
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downward(path: Path) -> None:
    assert part_of(path) in RANK, f"{path} belongs to no row"
    assert violations(part_of(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("spec", "import denim.ledger"),
        ("memory", "def f():\n    from denim.scheduler.queue import Queue"),
        ("runner", "from denim import LLM"),
        ("recurrence", "from denim.layers import norm"),
        ("scheduler", "from denim.speculative import ngram"),
        ("layers", "from denim import models"),
    ],
)
def test_the_check_sees_imports_that_point_up(part: str, source: str) -> None:
    assert len(violations(part, source)) == 1


def test_every_source_is_in_a_package() -> None:
    """A folder without __init__.py would be left out of the wheel."""
    assert [path for path in SOURCES if not (path.parent / "__init__.py").exists()] == []


def test_spec_and_ledger_load_without_torch() -> None:
    code = (
        "import sys, denim, denim.spec, denim.ledger\n"
        "import pkgutil, importlib\n"
        "for package in (denim.spec, denim.ledger):\n"
        "    for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_public_names_resolve() -> None:
    for name in denim.__all__:
        assert getattr(denim, name) is not None
    with pytest.raises(AttributeError, match="LMM"):
        _ = denim.LMM
