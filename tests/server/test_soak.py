"""The soak of `bench.server_soak`, for a minute."""

from __future__ import annotations

import pytest

from bench.served import Served
from bench.server_soak import MODEL, soak


@pytest.mark.slow
def test_clients_that_leave_at_any_moment_leave_nothing() -> None:
    """AB-03, AB-04, AB-06, AB-07: slots, pages, tasks, files and memory of both processes are as before."""
    with Served(MODEL) as served:
        rows, bad = soak(served, requests=400, at_once=64, seed=1)
    assert bad == [], rows
