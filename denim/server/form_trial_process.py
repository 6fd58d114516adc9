"""The process in which forms are tried: it compiles each in a child of its own, which may die of it.

Owns the limits of time and memory. Reads, pickled, first what the vocabulary is, then (number, form); writes
a line of JSON for each, [number, error or null]. It has one thread, so that it may fork.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import sys

import psutil

from denim.engine.grammars import Grammars
from denim.errors import RequestError
from denim.structured_output import StructuredOutput

AT_ONCE = 4
LONGEST_TEXT = 600
"""Bytes of an answer's text: each is at most six in JSON, which together fit into one write."""
SECONDS = 10  # of one core
MEMORY = 4 * 2**30  # bytes beyond what the process has anyway


def main() -> None:
    """Until its input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source = sys.stdin.buffer
    grammars = Grammars(*pickle.load(source))
    grammars.build(StructuredOutput(regex="a"))  # reads the vocabulary once for all children
    running = 0
    while True:
        try:
            number, form = pickle.load(source)
        except EOFError:
            return
        while running and os.waitpid(-1, 0 if running == AT_ONCE else os.WNOHANG) != (0, 0):
            running -= 1
        running += 1
        if os.fork() == 0:
            _watch(grammars, number, form)


def _watch(grammars: Grammars, number: int, form: StructuredOutput) -> None:
    """In a child: have a child of its own try the form, and answer for it if it dies."""
    os.close(sys.stdin.fileno())  # its end is the server's sign that the process is gone
    child = os.fork()
    if child == 0:
        _try(grammars, number, form)
    _, status = os.waitpid(child, 0)
    if status != 0:
        _answer(
            number,
            f"{form.kind}: this cannot be compiled and followed within {SECONDS} s and {MEMORY >> 30} GiB;"
            " make it simpler",
        )
    os._exit(0)


def _try(grammars: Grammars, number: int, form: StructuredOutput) -> None:
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    error = None
    try:
        grammars.build(form)
    except RequestError as refused:
        error = str(refused)
    _answer(number, error)
    os._exit(0)


def _answer(number: int, error: str | None) -> None:
    """One write, which is not mixed with those of others as long as it fits a pipe's buffer (4 KiB)."""
    text = None
    if error is not None:
        text = error.encode(errors="backslashreplace")[:LONGEST_TEXT].decode(errors="ignore")
    os.write(sys.stdout.fileno(), json.dumps([number, text]).encode("ascii") + b"\n")


if __name__ == "__main__":
    main()
