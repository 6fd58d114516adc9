from __future__ import annotations

from pathlib import Path

import pytest

from denim.engine.tokenizer import Tokenizer, load_tokenizer
from tests.engine.byte_tokenizer import save


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = save(tmp_path_factory.mktemp("tokenizer"))
    loaded = load_tokenizer(folder)
    assert loaded is not None
    return loaded
