"""Programs beside the package end with one line where what they need is missing."""

from __future__ import annotations

import runpy
import sys

import pytest
import torch


@pytest.mark.parametrize("name", ["engine_gpu", "attention", "planned_against_real"])
def test_without_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit, match="this measures a CUDA device, and torch finds none; run it where"):
        runpy.run_module(f"bench.{name}", run_name="__main__")


@pytest.mark.parametrize("name", ["nbformat", "nbclient"])
def test_without_the_handbooks_packages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "docs.handbook.refresh", raising=False)
    with pytest.raises(SystemExit, match=rf"{name} cannot be imported; install what it needs with: pip"):
        runpy.run_module("docs.handbook.refresh", run_name="__main__")
