# shoal's tasks: `make` lists them. All of them set up .venv by themselves, once: again only when pyproject.toml or
# constraints.txt changed. ARGS="…" is handed on to the command behind the task.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Tests at a time. Those of tests/integration start processes of their own: one of ZeRO runs beside one of the others.
JOBS ?= 2

BIN := $(VENV)/bin
# -qq: errors only.
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
DEMO_READY := $(VENV)/.ready-demo
DEV_READY := $(VENV)/.ready-dev
EXAMPLES_READY := $(VENV)/.ready-examples
# Every run shuffles sets and dictionaries of strings another way; the seed is in the first lines of the output.
# Bytecode is kept, whatever the environment says: each worker of each run would rewrite all asserts anew, 13 seconds.
PYTEST = PYTHONDONTWRITEBYTECODE= PYTHONHASHSEED=$${PYTHONHASHSEED:-$$$$} $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo zero-demo albert-demo test test-long test-long-sample lint format tables bench reading-path clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 22

demo: $(DEMO_READY)  ## a swarm trains a model, loses a peer, takes in another (ARGS="--headless --seconds 60")
	@$(BIN)/shoal demo $(ARGS)

zero-demo: $(EXAMPLES_READY)  ## a BERT under each stage of ZeRO on 2 ranks, and what each takes (ARGS="--steps 20")
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --nproc-per-node 2 examples/zero_bert.py $(ARGS)

albert-demo: $(EXAMPLES_READY)  ## ALBERT by Hugging Face's Trainer: one trainer is killed, one comes late (ARGS="--epochs 150")
	@$(BIN)/python -m examples.albert $(ARGS)

test: $(DEV_READY)  ## all tests but the long ones (ARGS="tests/unit -k peer"; JOBS=0: one after another)
	@$(PYTEST) -n $(JOBS) --dist loadgroup $(or $(ARGS),--situations=note)

test-long: $(DEV_READY)  ## the long tests at full size: hours
	@$(PYTEST) -m long --soak=full $(ARGS)

test-long-sample: $(DEV_READY)  ## the long tests at a size for every commit: minutes
	@$(PYTEST) -m long --soak=sample -n $(JOBS) --dist loadgroup $(or $(ARGS),--situations=require) \
		|| [ $$? -eq 5 ]  # 5: no long tests

lint: $(DEV_READY)  ## ruff, mypy, import contracts: changes nothing
	@failed=0; \
	for check in 'ruff check .' 'ruff format --check .' 'mypy $(wildcard src tests benchmarks examples)' lint-imports; do \
		$(BIN)/$$check || failed=1; \
	done; \
	exit $$failed

format: $(DEV_READY)  ## mend what ruff can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

tables: $(DEV_READY)  ## make the tables of the protocol and of arguments anew from the code
	@$(BIN)/python -m tests.protocol_tables

bench: $(DEV_READY)  ## all speed measurements: an hour or two (ARGS="--hivemind-python PATH"; --quick, --only NAMES, --list)
	@$(BIN)/python -m benchmarks $(ARGS)

reading-path: $(DEV_READY)  ## what a newcomer reads to follow the stories of docs/why/architecture.md
	@$(BIN)/python -m tests.reading_path

clean:  ## remove caches and build products; .venv stays
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis demo-report albert-demo albert-data
	@find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'shoal needs Python 3.11 or newer: make PYTHON=python3.11 …' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(DEMO_READY): pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing shoal into $(VENV) (torch is large: the first time takes minutes) …'
	@$(PIP) install -c constraints.txt -e '.[demo]'
	@touch $@

$(EXAMPLES_READY): pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing shoal and what its examples need into $(VENV) (torch is large: the first time takes minutes) …'
	@$(PIP) install -c constraints.txt -e '.[examples]'
	@touch $@

# [dev] contains [demo] and [examples].
$(DEV_READY): pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing shoal and its tools into $(VENV) (torch is large: the first time takes minutes) …'
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $(DEMO_READY) $(EXAMPLES_READY) $@
