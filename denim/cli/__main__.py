"""`python -m denim.cli`: the command where its script is not installed."""

from __future__ import annotations

from denim.cli import main

main()
