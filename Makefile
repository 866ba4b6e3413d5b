# Needs Python 3.11 or newer (with venv) and git; everything else is installed into .venv.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Empty: the newest packages instead of the tested ones (make test VENV=.venv-newest PINS=).
PINS ?= -c constraints.txt

BIN := $(VENV)/bin
# What is installed: the packages of a run, or with the tools of the tests. The second stamp covers the first.
RUNS := $(VENV)/.runs
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install run test test-slow zoo bench check-gpu lint format clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(INSTALLED) ## create .venv with the tested versions, and the tools of the tests

# The stamps skip the installation until pyproject.toml or constraints.txt changes.
$(RUNS) $(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1)"; \
	  echo "  do:    make $(or $(MAKECMDGOALS),install) PYTHON=/path/to/python3.11"; exit 2; } >&2
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments (its venv or ensurepip module is missing)"; \
	  echo "  do:    install it (Debian and Ubuntu: apt install python3-venv), or PYTHON=/path/to/another/python3"; \
	  exit 2; } >&2
	@# A working environment is kept: creating it again with another Python would mix the two.
	@$(BIN)/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PINS) -e '.$(if $(filter %.installed,$@),[dev])'
	@touch $(RUNS) $@

run: $(RUNS) ## carve the embedded model, end to end (make run ARGS="experts=8 n=128")
	$(BIN)/python -m pipeline $(ARGS)

# One process per core (at most 8); the tests of a file run in one process, since they share fixtures.
test: install ## the tests, a few minutes (make test ARGS="tests/unit -x")
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: install ## the tests that take minutes each
	$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS)

zoo: install ## which model types of transformers can be carved, as a table (make zoo ARGS="llama gemma3_image")
	PYTHONPATH=.:tests $(BIN)/python -m zoo $(ARGS)

bench: install ## speed and memory, as ratios in one run (make bench ARGS="--model /models/qwen --tokens 2048")
	PYTHONPATH=tests $(BIN)/python -m benchmarks $(ARGS)

check-gpu: install ## with a GPU: its tests, the chain, layers of two sizes and the benchmarks, in one table
	PYTHONPATH=tests $(BIN)/python -m benchmarks.check_gpu $(ARGS)

lint: install ## ruff, mypy --strict and the dependency rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: install ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv and caches, never outputs/
	rm -rf $(VENV) .*_cache *.egg-info
