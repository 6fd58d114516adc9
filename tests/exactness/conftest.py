"""Small random models on disk, each with its transformers reference and judge."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.exactness.judge import Judge
from tests.tiny import checkpoint


class Model(NamedTuple):
    folder: Path
    judge: Judge


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Model]]:
    """By name. At the end of the session ties are counted over all that was judged."""
    kinds = {
        "dense": {},
        "tied": {"tie_word_embeddings": True, "seed": 1},
        "moe": {"moe": True, "seed": 2},
    }
    made = {}
    for name, changes in kinds.items():
        folder = tmp_path_factory.mktemp(name)
        made[name] = Model(folder, Judge(checkpoint(folder, **changes)))
    yield made
    for model in made.values():
        model.judge.check_ties()


@pytest.fixture(scope="session")
def dense(models: dict[str, Model]) -> Model:
    return models["dense"]
