# Every target installs what it needs; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Two busy pools of threads slow each other down when they spin while they wait.
export OMP_WAIT_POLICY := PASSIVE

.DEFAULT_GOAL := help
.PHONY: docs help setup demo test soak check bench paper browser clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | sort | awk -F'\t' '{printf "  make %-8s %s\n", $$1, $$2}'

# Two stamps: what the demo needs, and that plus all extras and the test tools. Each installs only what is missing.
USER_READY := $(VENV)/.ready-user
DEV_READY := $(VENV)/.ready-dev
DOCS_READY := $(VENV)/.ready-docs
PEERS_READY := $(VENV)/.ready-peers

setup: $(DEV_READY)  ## create .venv and install bier with all it needs for development (2 to 5 minutes)

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "bier needs Python 3.11 or newer; found $$($(PYTHON) --version). Try: make setup PYTHON=python3.12"; exit 2; }
	@echo "Creating the Python environment $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)

# pip is silent while it unpacks, for a minute or more. Where no terminal shows its bar, a line every ten seconds
# says that it is still at work; it stops with the shell that started it.
define install
	@echo "Installing $(2) into $(VENV). The first time this takes 2 to 5 minutes, mostly for PyTorch."
	@if [ ! -t 1 ]; then (n=0; while sleep 10 >/dev/null 2>&1 && kill -0 $$$$ 2>/dev/null; do \
	  n=$$((n + 10)); echo "  installing, $$n s"; done) & ticker=$$!; fi; \
	$(BIN)/pip install --editable '$(1)'; code=$$?; [ -z "$$ticker" ] || kill $$ticker; exit $$code
endef

$(USER_READY): pyproject.toml | $(VENV)/bin/pip
	$(call install,.[serve],bier)
	@touch $@

$(DEV_READY): pyproject.toml | $(VENV)/bin/pip
	$(call install,.[dev],bier and the test tools)
	@touch $@ $(USER_READY)

$(DOCS_READY): pyproject.toml | $(VENV)/bin/pip
	$(call install,.[docs],bier and the tools of the documentation)
	@touch $@

docs: $(DOCS_READY)  ## build the documentation as site/index.html; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

demo: $(USER_READY)  ## train a baseline and A-BIER on drawn characters, compare them, write a report (about 5 minutes)
	$(BIN)/bier demo

test: check browser  ## run `make check`, then the test suite (in CI with its coverage)
	$(BIN)/python -m pytest -m "not slow" --ignore tests/test_layers.py $(if $(CI),--cov --cov-report=term)

soak: $(DEV_READY)  ## run the long form of the reliability suite (15 minutes on one core) and write SECURITY.md; SHARE=50 only runs, for a night
	BIER_SOAK=$(or $(SHARE),1) $(if $(SHARE),,BIER_SOAK_OUT=docs/results/reliability.json) $(BIN)/python -m pytest --timeout 7200 --durations 25 tests/reliability
	$(if $(SHARE),,$(BIN)/python tests/reliability/security_page.py)

check: $(DEV_READY)  ## lint, formatting, types and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/test_layers.py

bench: $(DEV_READY) $(PEERS_READY)  ## run the benchmarks and write docs/benchmarks.md; ONLY=loss runs one, NOTE=... is kept beside it
	$(BIN)/python benchmarks/run.py $(if $(ONLY),--only $(ONLY)) $(if $(NOTE),--note "$(NOTE)")

# open-metric-learning wants numpy 1 and forgets to ask for omegaconf: it gets an environment of its own on top of ours.
$(PEERS_READY): | $(DEV_READY)
	$(BIN)/pip install --quiet 'sentence-transformers>=5'
	$(BIN)/python -m venv $(VENV)/peers
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$($(VENV)/peers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/bier.pth
	$(VENV)/peers/bin/pip install --quiet open-metric-learning omegaconf
	@touch $@

paper: $(DEV_READY)  ## run the paper's experiments on the data at ROOT (default ../shared/data)
	$(BIN)/bier paper run all --root $(or $(ROOT),../shared/data)

# The tests of the web page drive a real Chromium. It is installed where that is possible; elsewhere they are skipped.
browser:
	@command -v chromium >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 || \
	  { [ -n "$$CI" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && \
	    { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
	    echo "no Chromium found: the tests of the web page will be skipped"; }

clean:  ## remove what the targets made
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
