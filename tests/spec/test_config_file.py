"""Files that are no config: one error that names the file and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from denim.errors import ConfigError
from denim.spec.config_file import load_config


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as JSON: .*correct it, or download it again"),
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON: 'utf-8' codec"),
        (b"[" * 100_000, "cannot be read as JSON: maximum recursion depth"),
        (b'{"vocab_size": ' + b"9" * 5_000 + b"}", "cannot be read as JSON: Exceeds the limit"),
        (b"[1]", "holds a JSON list; an object is needed"),
    ],
    ids=["empty", "half", "not utf-8", "nested", "long number", "list"],
)
def test_what_is_no_config(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"config.json {message}"):
        load_config(path)
