"""The offline interface: prompts in, outputs back.

Owns the shape of calls under vLLM's names; the work is done by `EngineCore`, driven here in the caller's
thread. For many clients at once see `denim.engine.async_engine`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any

from denim.engine.cache_wishes import CacheWishes
from denim.engine.core import EngineCore
from denim.engine.log import show_log
from denim.engine.options import EngineOptions
from denim.engine.outputs import RequestOutput, StreamDelta
from denim.engine.prompts import Prompt, ReadPrompt, short
from denim.engine.tokenizer import Message, Tokenizer, need_tokenizer
from denim.errors import RequestError
from denim.sampling_params import SamplingParams


class DeltaStream(Iterator[StreamDelta]):
    """The deltas of one request. Closing the stream, or letting go of it, aborts the request."""

    def __init__(self, llm: LLM, request_id: str) -> None:
        self._llm = llm
        self._request_id = request_id
        self._pending = llm._streams[request_id] = deque()

    def __next__(self) -> StreamDelta:
        with self._llm._turn:
            while not self._pending:
                if self._request_id not in self._llm.core.requests:
                    self.close()
                    raise StopIteration
                self._llm._step()
            return self._pending.popleft()

    def close(self) -> None:
        """End the request if it still runs; there are no more deltas."""
        with self._llm._turn:
            self._pending.clear()
            self._llm._streams.pop(self._request_id, None)
            self._llm.core.abort(self._request_id)

    def __del__(self) -> None:
        # A finaliser may run inside a step, where nothing may be aborted.
        self._llm._streams.pop(self._request_id, None)
        self._llm.core.let_go(self._request_id)


class LLM:
    """A model and its memory. Options: see `EngineOptions`. Several threads may call it; they take turns,
    step by step.

    Raises ConfigError or CapacityError when the model cannot be served as asked.
    """

    def __init__(self, model: Any = None, **options: Any) -> None:
        show_log()
        self.core = EngineCore(EngineOptions.of(model=model, **options))
        self._streams: dict[str, deque[StreamDelta]] = {}  # deltas that an open stream has not given out yet
        self._turn = threading.RLock()  # threads take turns, step by step

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None for a folder without one."""
        return self.core.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt | ReadPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        cache_control: Sequence[int] = (),
        no_store: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts, each a string or a list of token ids; outputs come in the same order.

        One `params` (None: the defaults) and one `priority` (lower goes first) for all, or one for each.
        `cache_salt`, `cache_control`, `no_store`: see `CacheWishes`; for all.
        Raises RequestError for a prompt that cannot be served, before any of them runs.
        """
        batch = _as_list(prompts)
        each_params = _for_each(params, SamplingParams, len(batch), "params")
        each_priority = _for_each(priority, Integral, len(batch), "priority")
        cache = CacheWishes(cache_salt, cache_control, no_store)
        ids: list[str] = []
        outputs = []
        try:
            for prompt, one, order in zip(batch, each_params, each_priority, strict=True):
                with self._turn:
                    ids.append(self.core.add(prompt, one, priority=order, cache=cache))
                    outputs.append(self.core.requests[ids[-1]].output)
            while not all(output.finished for output in outputs):
                self._step()
        finally:
            with self._turn:
                for id_ in ids:
                    self.core.abort(id_)
        return outputs

    def stream(
        self,
        prompt: Prompt | ReadPrompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        cache_control: Sequence[int] = (),
        no_store: bool = False,
    ) -> DeltaStream:
        """One request, piece by piece. Other requests go on meanwhile.

        Raises RequestError at once when it cannot be served.
        """
        cache = CacheWishes(cache_salt, cache_control, no_store)
        with self._turn:
            return DeltaStream(self, self.core.add(prompt, params, priority=priority, cache=cache))

    def _step(self) -> None:
        with self._turn:
            for delta in self.core.step():
                pending = self._streams.get(delta.request_id)
                if pending is not None:  # asked once: another thread may let go of the stream just now
                    pending.append(delta)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several. `template_options` go to the chat template
        (`enable_thinking=False`, `tools=…`)."""
        several = isinstance(messages, (list, tuple)) and messages and isinstance(messages[0], (list, tuple))
        conversations: Sequence[Any] = messages if several else [messages]
        return self.generate([self.read_chat(one, **template_options) for one in conversations], params)

    def read_chat(self, messages: Sequence[Message], **template_options: Any) -> ReadPrompt:
        """What `chat` sends for a conversation: its prompt, and where the next turn will still agree with it.
        `stream` takes it as well."""
        return self.core.reader.read_chat(messages, **template_options)

    def render(self, messages: Sequence[Message], **template_options: Any) -> list[int]:
        """The prompt, as token ids, that `chat` sends for a conversation."""
        tokenizer = need_tokenizer(self.tokenizer, "A chat")
        return tokenizer.apply_chat_template(messages, **template_options)

    def stats(self) -> dict[str, Any]:
        """Slabs, pages, slots (total, used, cached, free), running, waiting, …: see `EngineCore.stats`."""
        with self._turn:
            return self.core.stats()

    def cache_snapshot(self) -> dict[str, Any] | None:
        """The prefix tree as it is now, for `denim cache inspect`: see `EngineCore.cache_snapshot`."""
        with self._turn:
            return self.core.cache_snapshot()

    def check(self) -> None:
        """Raises AssertionError when an invariant of memory or scheduler is broken."""
        with self._turn:
            self.core.check()

    def close(self) -> None:
        """Bring all checkpoints to the files, where there are any (`disk_cache`). The engine is not to be
        used afterwards; `with LLM(…) as llm` does it at the end."""
        with self._turn:
            self.core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes. Requests that run keep what they began from, and leave nothing behind."""
        with self._turn:
            self.core.reset_prefix_cache()


def _as_list(prompts: Any) -> list[Prompt | ReadPrompt]:
    if isinstance(prompts, str | ReadPrompt):
        return [prompts]
    if hasattr(prompts, "tolist") and not isinstance(prompts, memoryview):
        prompts = prompts.tolist()  # of an array or a tensor
    if isinstance(prompts, bytes | bytearray | memoryview) or not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts are a string, a list of token ids, or a list of either, not {short(prompts)}"
        )
    if prompts and isinstance(prompts[0], Integral):
        return [list(prompts)]
    return list(prompts)


def _for_each(value: Any, kind: type, n: int, name: str) -> list[Any]:
    if value is None or isinstance(value, kind):
        return [value] * n
    if not isinstance(value, Sequence) or len(value) != n:
        raise RequestError(f"{name} must be one for all prompts or a list of {n}, one for each")
    return list(value)
