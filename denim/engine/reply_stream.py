"""What one client reads of one request.

Owns the deltas that nobody has read yet, and the making of text. What comes while nobody reads is joined,
one delta for each completion: a slow reader gets fewer and longer ones, holds nobody up, and never keeps more
than the answer itself. Text is made when it is read, so that the loop that runs the engine need not do it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

from denim.engine.outputs import Logprob, StreamDelta
from denim.engine.text_stream import TextStream
from denim.engine.tokenizer import Tokenizer
from denim.sampling_params import SamplingParams


class ReplyStream:
    """The deltas of one request, for one reader on one event loop: `async with`, then `async for`.

    Closing it before the end aborts the request. The engine's side is called on `loop`, where it was made.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        end_token_ids: Collection[int],
        max_tokens: int,
        leave: Callable[[], None],
    ) -> None:
        """`max_tokens`: what params and context allow. `leave` is called when the reader leaves early."""
        self.request_id = ""  # known when it is accepted
        self.loop = asyncio.get_running_loop()
        self._tokenizer = tokenizer if params.detokenize else None
        self._texts = [
            TextStream(params, self._tokenizer, end_token_ids, max_tokens)
            for _ in range(params.n if self._tokenizer is not None else 0)
        ]
        self._running = params.n
        self._leave = leave
        self._waiting: dict[int, StreamDelta] = {}  # by completion
        self._error: BaseException | None = None
        self._bell: asyncio.Future[None] | None = None  # rung for whoever waits
        self._accepted = False

    # The engine's side

    def accept(self, request_id: str) -> None:
        self.request_id, self._accepted = request_id, True
        self._ring()

    def give(self, delta: StreamDelta) -> None:
        if not self._running:
            return  # it was on its way when the reader left
        before = self._waiting.get(delta.index)
        self._waiting[delta.index] = delta if before is None else _joined(before, delta)
        self._running -= delta.finished
        self._ring()

    def fail(self, error: BaseException) -> None:
        """What was given before is still read, then the error is raised."""
        if not self._running:
            return
        self._error, self._running = error, 0
        self._ring()

    def _ring(self) -> None:
        if self._bell is not None and not self._bell.done():
            self._bell.set_result(None)

    # The reader's side

    async def accepted(self) -> None:
        """Wait until the engine has taken the request. Raises its error if it does not."""
        while not self._accepted and self._error is None:
            await self._wait()
        if not self._accepted:
            error, self._error = self._error, None
            assert error is not None
            raise error

    async def __anext__(self) -> StreamDelta:
        while not self._waiting:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if not self._running:
                raise StopAsyncIteration
            await self._wait()
        return self._worded(self._waiting.pop(next(iter(self._waiting))))

    def __aiter__(self) -> ReplyStream:
        return self

    async def aclose(self) -> None:
        """Abort the request if it still runs; there are no more deltas, also for who waits for one just now.
        Closing twice is no error."""
        self._waiting.clear()
        self._error = None
        if self._running:
            self._running = 0
            self._ring()
            self._leave()

    async def __aenter__(self) -> ReplyStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _wait(self) -> None:
        self._bell = self.loop.create_future()
        await self._bell

    def _worded(self, delta: StreamDelta) -> StreamDelta:
        """The delta with its text, and with the texts of tokens in its logprobs."""
        if self._tokenizer is None:
            return delta
        stream = self._texts[delta.index]
        text, ended = "", False
        for token in delta.token_ids:
            piece = stream.push(token)
            text += piece.text
            ended = piece.finish_reason is not None
        if delta.finished and not ended and delta.finish_reason != "error":
            text += stream.flush()  # something else ended it
        logprobs = delta.logprobs
        if logprobs is not None:
            logprobs = [self._named(report) for report in logprobs]
        return delta._replace(text=text, logprobs=logprobs)

    def _named(self, report: dict[int, Logprob]) -> dict[int, Logprob]:
        assert self._tokenizer is not None
        decode = self._tokenizer.decode_one
        return {token: Logprob(entry.logprob, entry.rank, decode(token)) for token, entry in report.items()}


def _joined(first: StreamDelta, then: StreamDelta) -> StreamDelta:
    """Two deltas of one completion as one. The first one's lists grow: it was nobody's yet."""
    first.token_ids.extend(then.token_ids)
    logprobs: list[dict[int, Logprob]] | None = first.logprobs
    if logprobs is None:
        logprobs = then.logprobs
    elif then.logprobs is not None:
        logprobs.extend(then.logprobs)
    scores: Any = first.prompt_logprobs if first.prompt_logprobs is not None else then.prompt_logprobs
    return then._replace(token_ids=first.token_ids, logprobs=logprobs, prompt_logprobs=scores)
