# Byte code on disk cuts vLLM's start-up to a third; some environments turn it off.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
BIN := .venv/bin
CONFIG ?= configs/local.yaml

# The builds of vLLM, cpu and gpu, have one import name: .venv has one of them. Another BUILD makes .venv anew.
# The default is the build that is there, or else the build for this machine.
INSTALLED := $(if $(wildcard .venv/installed),$(or $(file <.venv/installed),cpu))
BUILD ?= $(or $(INSTALLED),$(if $(shell nvidia-smi --list-gpus 2>/dev/null | grep ^GPU),gpu,cpu))

# Local wheels, where a machine has them, hold the CPU build of torch; elsewhere uv knows where it is.
# What pyproject.toml tells uv about packages is for the CPU build.
LINKS := $(foreach link,$(PIP_FIND_LINKS),--find-links $(link))
CPU_TORCH := $(or $(LINKS),--torch-backend=cpu)
TORCH := $(if $(filter gpu,$(BUILD)),--no-config $(LINKS),$(CPU_TORCH))

.PHONY: help install other-build lock serve reference test quick test-all pytest test-batcher tests lint format check-vllm bench bench-gpu mutants soak generate release clean

help: ## List the targets.
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

install: .venv/installed ## Install into .venv, for GPUs if nvidia-smi lists some, else for the CPU; BUILD=cpu, BUILD=gpu.

.venv/installed: pyproject.toml requirements/$(BUILD).txt $(if $(filter-out $(BUILD),$(INSTALLED)),other-build)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "saturate needs Python 3.11 or newer; name one with make PYTHON=python3.12 ...")'
	@echo 'Installing vLLM ($(BUILD)), torch and Ray into .venv: 5 GB on the disk, 2 to 10 minutes. Compiling byte code comes last, and says nothing.'
	$(PYTHON) -m venv $(if $(filter $(BUILD),$(INSTALLED)),,--clear) .venv
	$(BIN)/python -m pip install --quiet --upgrade uv
	$(BIN)/uv pip install --python $(BIN)/python $(TORCH) --constraint requirements/$(BUILD).txt --compile-bytecode --group test --editable '.[$(BUILD),all]'
	@echo $(BUILD) > $@

other-build:

# A version of each package, for `make install` and the images. A version stays as long as it fits pyproject.toml.
LOCK = $(BIN)/uv pip compile --quiet --python-platform linux --python-version 3.11 --extra all --group test pyproject.toml \
	--no-annotate --no-emit-find-links --custom-compile-command 'make lock' $(ARGS)

lock: ## Resolve the packages of both builds into requirements/; ARGS=--upgrade, ARGS="--upgrade-package httpx".
	$(LOCK) $(CPU_TORCH) --extra cpu --output-file requirements/cpu.txt
	$(LOCK) --no-config --extra gpu --output-file requirements/gpu.txt

serve: install ## Serve CONFIG (configs/local.yaml) in the foreground; Ctrl-C stops it.
	@$(BIN)/saturate serve $(CONFIG)

reference: install ## Make the generated pages anew, after a change of the code.
	@$(BIN)/python -m tests.reference

lint: install ## Check style, types and generated pages.
	@$(TIMED) set -x -e; \
	$(BIN)/ruff check .; \
	$(BIN)/ruff format --check .; \
	$(BIN)/mypy; \
	$(BIN)/python -m tests.reference --check

format: install ## Put the code into its style.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Two cores: one worker runs the tests of the service, the other the rest beside it, and the checks take what is
# left of both. One core: the checks run first, then all tests in one process, which is -n 0.
JOBS := $(if $(filter 1,$(shell nproc 2>/dev/null)),1,2)

# These tests import neither vLLM nor Ray (tests/test_budget.py).
QUICK := @tests/quick.txt

# Prints the seconds that a part has taken.
TIMED = began=$$(date +%s); timed() { status=$$?; echo "$@: $$(($$(date +%s) - began)) s"; exit $$status; }; trap timed EXIT;

test: install ## Check style and types, and run every test but the long ones.
	@$(MAKE) --no-print-directory --keep-going --jobs=$(JOBS) lint tests

quick: install ## Run the tests that need neither vLLM nor Ray: a minute.
	@$(TIMED) $(BIN)/python -m pytest --quiet $(QUICK) $(ARGS)

# The long tests measure, and keep both cores busy: each has the machine for itself.
test-all: test ## The same, then the long tests, and each property with many examples.
	@$(TIMED) $(BIN)/python -m pytest -m 'long or hypothesis' --hypothesis-profile=long $(ARGS)

pytest: install ## Run some tests; ARGS="tests/batcher -k order".
	$(BIN)/python -m pytest $(ARGS)

# The library needs no other package, so these tests run on a Python for which there is no Ray or vLLM.
test-batcher: ## Run the tests of batcher/ alone, on another Python; PYTHON=python3.14, ARGS="-m long".
	$(PYTHON) -m venv --clear .venv-batcher
	.venv-batcher/bin/python -m pip install --quiet pytest pytest-asyncio pytest-timeout hypothesis
	.venv-batcher/bin/python -m pytest -W ignore::pytest.PytestConfigWarning tests/batcher $(ARGS)

tests: install
	@$(TIMED) $(BIN)/python -m pytest --quiet -n $(JOBS:1=0) --no-loadscope-reorder $(ARGS)

check-vllm: install ## Look for the names of vLLM that are used here in other releases; ARGS="vllm==0.33.0", ARGS="--help".
	@$(BIN)/python -m tests.benchmarks.vllm_names $(ARGS)

# A peer of the benchmarks, which run without it too.
.venv/bench: .venv/installed
	@$(BIN)/uv pip install --quiet --python $(BIN)/python $(TORCH) --group bench && touch $@ \
		|| echo "Some of what is compared can't be had from here; the benchmarks run without it."

bench: install .venv/bench ## Run the benchmark NAME, such as serve; ARGS="--help". Without NAME, list them.
	@$(BIN)/python -m tests.benchmarks$(NAME:%=.%) $(ARGS)

bench-gpu: ## Measure the service beside others with a model of 7B, on a GPU.
	@$(MAKE) --no-print-directory bench BUILD=gpu NAME=serve ARGS='--model 7b $(ARGS)'

soak: install ## Run half an hour of load with faults at random; ARGS="--minutes 10", ARGS="--help".
	@$(BIN)/python -m tests.soak $(ARGS)

mutants: install ## Put faults into the product, and count those that the tests catch; ARGS="--rooms=jobs", ARGS="--help".
	@$(BIN)/python -m tests.mutants $(ARGS)

generate: install ## Make what is made from other files: the Helm chart in build/chart, the dashboard, configs/schema.json.
	@$(BIN)/python -m k8s.helm build/chart
	@$(BIN)/python -m serve_app.cli schema > configs/schema.json

release: generate ## Write into dist/ what a release has beside its wheel and images: chart, dashboard, schema.
	@mkdir -p dist
	@cp configs/schema.json k8s/components/observability/dashboard.json dist
	@tar --create --gzip --file dist/saturate-chart.tgz --directory build --transform 's/^chart/saturate/' chart

clean: ## Remove what the other targets made.
	rm -rf .venv .venv-batcher .tools build dist .bench .mutants .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
