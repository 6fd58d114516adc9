"""Forms that clients describe themselves, tried in a process apart before the engine sees them.

Owns the process (`form_trial_process`), when it is started, and what its end means. A grammar or a regular
expression of a few characters can make its compiler run for hours, take all memory, or crash; there it can do
no harm. Forms that Denim puts together, and schemas without patterns, cannot, and are not tried.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from itertools import count

from denim.engine.tokenizer import Tokenizer
from denim.errors import RequestError
from denim.server.errors import ApiError
from denim.structured_output import StructuredOutput

KEPT = 1024  # forms that are known to be harmless
WAIT = 60.0  # seconds; the process itself allows a form less, but it may have to be started
ENDED = "the process that compiles forms has ended; ask again"


class FormTrial:
    """For one vocabulary. Safe on several event loops."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._about = (tokenizer, vocab_size, list(end_token_ids))
        self._lock = threading.Lock()  # of `_process`; never held while one is waited for
        # Asking waits while the process has no room for more. The event loop's own threads, which read
        # everybody's prompts, must not wait with it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="denim-forms-ask")
        self._process: _Process | None = None
        self._passed: OrderedDict[StructuredOutput, None] = OrderedDict()

    async def check(self, form: StructuredOutput) -> None:
        """Raises RequestError for a form that does harm, or that is none; ApiError if that takes too long to
        find out."""
        if self._about[0] is None or not is_foreign(form) or form in self._passed:
            return
        try:
            async with asyncio.timeout(WAIT):
                error = await self._answer(form)
        except TimeoutError:
            raise ApiError(
                503, "too many forms are being compiled; try again in a moment", headers={"retry-after": "5"}
            ) from None
        if error is not None:
            raise RequestError(error, form.named or form.kind)
        self._passed[form] = None
        if len(self._passed) > KEPT:
            self._passed.popitem(last=False)

    def close(self) -> None:
        """End the process; who waits for it is told. A later check starts another one."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.popen.kill()
            process.popen.wait()

    async def _answer(self, form: StructuredOutput) -> str | None:
        asked = await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, form)
        return await asyncio.wrap_future(asked)

    def _ask(self, form: StructuredOutput) -> Future[str | None]:
        for _ in range(2):  # the process may just have ended, or may not even begin
            process = self._running()
            with suppress(BrokenPipeError):
                return process.ask(form)
            if not self._forget(process):
                break  # it was closed meanwhile
        raise ApiError(503, ENDED, headers={"retry-after": "1"})

    def _running(self) -> _Process:
        with self._lock:
            if self._process is None or self._process.popen.poll() is not None:
                self._process = _Process(self._about)
            return self._process

    def _forget(self, process: _Process) -> bool:
        """Whether it was still the one to ask."""
        with self._lock:
            known = self._process is process
            if known:
                self._process = None
            return known


class _Process:
    """One process, and who waits for its answers. One thread asks."""

    def __init__(self, about: object) -> None:
        command = [sys.executable, "-m", "denim.server.form_trial_process"]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._open: dict[int, Future[str | None]] = {}
        self._gate = threading.Lock()  # nobody asks once `_ended` is set
        self._ended = False
        self._numbers = count()
        self._untold: object | None = about  # sent before the first question, by who may wait
        threading.Thread(target=self._listen, name="denim-forms", daemon=True).start()

    def ask(self, form: StructuredOutput) -> Future[str | None]:
        """Raises BrokenPipeError if the process has ended."""
        with self._gate:
            if self._ended:
                raise BrokenPipeError
            number = next(self._numbers)
            answer = self._open[number] = Future()
            if self._untold is not None:
                self._send(self._untold)
                self._untold = None
            self._send((number, form))
        return answer

    def _send(self, message: object) -> None:
        assert self.popen.stdin is not None
        pickle.dump(message, self.popen.stdin)
        self.popen.stdin.flush()

    def _listen(self) -> None:
        """Hand on answers until the process ends; then nobody is to wait for it."""
        assert self.popen.stdin is not None and self.popen.stdout is not None
        for line in self.popen.stdout:
            number, error = json.loads(line)
            answer = self._open.pop(number, None)  # a child that dies behind its answer is answered for too
            if answer is not None:
                with suppress(InvalidStateError):  # whoever asked has left
                    answer.set_result(error)
        with self._gate:  # who sends just now is told that nobody reads
            self._ended = True
            with suppress(BrokenPipeError):  # of what was not sent
                self.popen.stdin.close()
        self.popen.stdout.close()
        for answer in self._open.values():
            with suppress(InvalidStateError):
                answer.set_exception(ApiError(503, ENDED, headers={"retry-after": "1"}))
        self.popen.wait()


def is_foreign(form: StructuredOutput) -> bool:
    """Whether a client's own grammar or regular expression is part of a form."""
    if form.kind in ("regex", "grammar"):
        return True
    text = form.structural_tag or form.json or ""
    # Denim's own tags hold patterns of numbers and line breaks; those of tools may hold a client's.
    return '"pattern' in text if form.named == "tools" or form.json else form.kind == "structural_tag"
