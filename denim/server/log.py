"""How the server's log lines look.

Owns the two forms: text for people, JSON for machines (one object a line). Where they go is stderr.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

# Characters that end a line or steer a terminal, as escapes: a line may hold what a client sent.
ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
ESCAPES |= {code: f"\\u{code:04x}" for code in (0x2028, 0x2029)}


class TextLines(logging.Formatter):
    """A line has the time and the message, and begins as all that Denim says on stderr."""

    def __init__(self) -> None:
        super().__init__("denim: %(asctime)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(ESCAPES)


class JsonLines(logging.Formatter):
    """A line is an object with time, level, logger, message, and the fields that a record carries."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up_log(log_format: str, level: int) -> None:
    """Send the lines of Denim and uvicorn to stderr in this form, from `level` up."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    for name in ("denim", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
    logging.getLogger("denim").setLevel(level)
    logging.getLogger("uvicorn").setLevel(max(level, logging.WARNING))  # what it says at INFO is said here
