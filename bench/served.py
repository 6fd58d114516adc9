"""A server to be measured: `denim serve` on a port of its own, and the two processes behind it."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil

START = 120.0  # seconds that a start may take
HOST = "127.0.0.1"


class Served:
    """`denim serve` with `arguments`. `server` and `engine` are its processes, `cores` those of the two, if
    given. To be used with `with`."""

    def __init__(self, arguments: Sequence[str] = (), cores: tuple[int, int] | None = None) -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-m", "denim.cli", "serve", "--quiet"]
        self._process = subprocess.Popen(
            [*command, "--host", HOST, "--port", str(self.port), "--no-log-requests", *arguments],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        try:
            self._wait_ready()
            self.server = psutil.Process(self._process.pid)
            (self.engine,) = self.server.children()
        except BaseException:
            self._process.kill()
            raise
        if cores is not None:
            pin(self.server, cores[0])
            pin(self.engine, cores[1])

    def _wait_ready(self) -> None:
        patience = time.monotonic() + START
        while self._process.poll() is None and time.monotonic() < patience:
            try:
                if self.get("/ready")[0] == 200:
                    return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError("denim serve did not become ready; its messages say why")

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body."""
        return self._ask("GET", path)

    def post(self, path: str, body: bytes = b"") -> tuple[int, bytes]:
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=START)
        try:
            connection.request(method, path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.terminate()
        self._process.wait(START)


def pin(process: psutil.Process, core: int) -> None:
    """All threads of a process, and those that they will start."""
    for thread in process.threads():
        os.sched_setaffinity(thread.id, {core})


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time so far."""
    times = process.cpu_times()
    return times.user + times.system
