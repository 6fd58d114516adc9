"""Requests in, tokens out."""

from denim.engine.async_engine import AsyncEngine
from denim.engine.llm import LLM
from denim.engine.options import EngineOptions
from denim.engine.outputs import CompletionOutput, RequestOutput, StreamDelta
from denim.engine.unavailable import (
    EngineAsleepError,
    EngineClosedError,
    EngineDiedError,
    EngineUnavailableError,
)

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EngineAsleepError",
    "EngineClosedError",
    "EngineDiedError",
    "EngineOptions",
    "EngineUnavailableError",
    "RequestOutput",
    "StreamDelta",
]
