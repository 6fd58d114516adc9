"""Requests in, tokens out."""

from denim.engine.async_engine import AsyncEngine, EngineAsleepError, EngineClosedError
from denim.engine.llm import LLM
from denim.engine.options import EngineOptions
from denim.engine.outputs import CompletionOutput, RequestOutput, StreamDelta

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EngineAsleepError",
    "EngineClosedError",
    "EngineOptions",
    "RequestOutput",
    "StreamDelta",
]
