# Every target sets up what it needs; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Two busy pools of threads starve each other when they spin while they wait.
export OMP_WAIT_POLICY := PASSIVE

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench paper browser clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | sort | awk -F'\t' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: $(READY)  ## create .venv and install bier with everything its tests need

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "bier needs Python 3.11 or newer; found $$($(PYTHON) --version). Try: make setup PYTHON=python3.12"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(READY)  ## train a baseline and A-BIER on drawn characters, compare them, write a report (about 5 minutes)
	$(BIN)/bier demo

test: $(READY) browser  ## run the test suite and print its coverage
	$(BIN)/python -m pytest -m "not slow" --cov --cov-report=term

check: $(READY)  ## lint, formatting, types and the import rule
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/test_layers.py

bench: $(READY)  ## run every benchmark; prints ratios measured side by side
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

paper: $(READY)  ## run the paper's experiments on the data at ROOT (default ../shared/data)
	$(BIN)/bier paper run all --root $(or $(ROOT),../shared/data)

# The page's tests drive a real Chromium. Where one can be had it is installed; elsewhere those tests skip and say so.
browser:
	@command -v chromium >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 || \
	  { [ -n "$$CI" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && \
	    { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
	    echo "no Chromium found: the tests of the web page will be skipped"; }

clean:  ## remove what the targets made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
