# Byte code on disk cuts vLLM's start-up to a third; some environments turn it off.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
BIN := .venv/bin
CONFIG ?= configs/local.yaml

# Local wheels, where a machine has them, hold the CPU build of torch; elsewhere uv knows where it is.
TORCH := $(if $(PIP_FIND_LINKS),$(foreach link,$(PIP_FIND_LINKS),--find-links $(link)),--torch-backend=cpu)

.PHONY: help install serve test lint format bench-batcher bench-serve clean

help: ## List the targets.
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: .venv/installed ## Install into .venv, for the CPU, with all that the tests need.

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "saturate needs Python 3.11 or newer; name one with make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade uv
	$(BIN)/uv pip install --python $(BIN)/python $(TORCH) --compile-bytecode --editable '.[cpu,test]'
	@touch $@

serve: install ## Serve CONFIG (configs/local.yaml) in the foreground; Ctrl-C ends it.
	@$(BIN)/python -m serve_app.launch $(CONFIG)

lint: install ## Check style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install ## Put the code into its style.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint ## Run every test.
	$(BIN)/python -m pytest

bench-batcher: install ## Measure the batcher beside others; ARGS="--quick", ARGS="--help".
	@$(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("flyte") is None)' \
		|| $(BIN)/uv pip install --quiet --python $(BIN)/python $(TORCH) --editable '.[bench]' \
		|| echo "flyte can't be had from here: the benchmarks run without it."
	@$(BIN)/python -m tests.benchmarks.batcher $(ARGS)

bench-serve: install ## Measure the service beside vLLM's own server; ARGS="--rounds 2", ARGS="--help".
	@$(BIN)/python -m tests.benchmarks.serve $(ARGS)

clean: ## Remove what the other targets made.
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
