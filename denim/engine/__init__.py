"""Requests in, tokens out."""

from denim.engine.async_engine import AsyncEngine, EngineClosedError
from denim.engine.llm import LLM
from denim.engine.options import EngineOptions
from denim.engine.outputs import CompletionOutput, RequestOutput, StreamDelta

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EngineClosedError",
    "EngineOptions",
    "RequestOutput",
    "StreamDelta",
]
