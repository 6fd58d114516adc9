from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from denim import LLM
from denim.engine.tokenizer import Tokenizer, load_tokenizer
from tests.engine.byte_tokenizer import save
from tests.exactness.judge import Judge
from tests.tiny import checkpoint

# The byte-level tokenizer has 267 tokens; published models pad their vocabulary too.
TEXT_VOCAB = 288


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = save(tmp_path_factory.mktemp("tokenizer"))
    loaded = load_tokenizer(folder)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="session")
def mute(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Judge]:
    """A model without a tokenizer, and its judge."""
    folder = tmp_path_factory.mktemp("mute")
    return folder, Judge(checkpoint(folder))


@pytest.fixture(scope="session")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a byte-level tokenizer, and a chat template."""
    folder = tmp_path_factory.mktemp("speaking")
    checkpoint(folder, vocab_size=TEXT_VOCAB, seed=3)
    return save(folder)


@pytest.fixture
def with_config(speaking: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of `speaking` with another generation_config.json."""

    def copy(**generation: Any) -> Path:
        for file in speaking.iterdir():
            if file.name != "generation_config.json":
                (tmp_path / file.name).symlink_to(file)
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return tmp_path

    return copy


@pytest.fixture
def llm(mute: tuple[Path, Judge]) -> LLM:
    """Small, with all checks on."""
    return LLM(mute[0], memory="1MiB", max_model_len=256, debug=True)
