"""A mask speaks of the model's tokens and of no other bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from denim.engine.grammars import Grammars
from denim.engine.tokenizer import load_tokenizer
from denim.structured_output import StructuredOutput
from tests.engine.byte_tokenizer import save

pytest.importorskip("xgrammar")


@pytest.mark.parametrize("vocab_size", [270, 287, 288, 301])
def test_where_any_text_may_follow_no_token_beyond_the_vocabulary_may(
    tmp_path: Path, vocab_size: int
) -> None:
    form = StructuredOutput(regex="(.|\n)*")
    one = Grammars(load_tokenizer(save(tmp_path)), vocab_size, []).constraint(form, [])
    allowed = one.allowed()
    assert len(allowed) > 100 and allowed.max() < vocab_size
