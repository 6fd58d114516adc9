# `make run` and `make test` need nothing but a Python from 3.11 to 3.13: they make .venv on first use.
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SUPPORTED := import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(firstword $(foreach p,python3 python3.11 python3.12 python3.13,$(shell $(p) -c '$(SUPPORTED)' >/dev/null 2>&1 && echo $(p))))
PROMPT ?= Fellow citizens of the Senate and House of Representatives:

.PHONY: run test lint format clean

run: $(READY)
	$(BIN)/denim generate --max-tokens 64 "$(PROMPT)"
	$(BIN)/denim ledger

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info

# The stamp is written last, so an install that broke off is done again.
$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Denim needs Python 3.11 to 3.13 with venv; set PYTHON=/path/to/python3" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@
