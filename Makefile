# Every target with one line: make help. PYTHON= and VENV= can be given.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# A file stays on one worker: its tests share what they have trained, and one cluster or pair of nodes is enough. Their order
# is that of tests/conftest.py.
ON_ALL_CORES := -n logical --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help doctor train compare test test-fast test-all bench gpu-wheels gpu-check check lint format lock schema docs-figures fork clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

doctor: $(VENV)/runtime ## looks at this machine: the command to begin with, or what to mend
	$(BIN)/python scripts/doctor.py $(ARGS)

train: $(VENV)/runtime ## the main job: a timm model on real digits, strategy chosen by the machine (ARGS="key=value …")
	$(BIN)/python train.py $(ARGS)

compare: $(VENV)/runtime ## DataParallel against DistributedDataParallel on this machine, with a report
	$(BIN)/python train.py -m experiment=compare $(ARGS)

test: $(VENV)/development ## the tests that a newcomer runs, on all cores
	$(PYTEST) $(ON_ALL_CORES) -m "not slow and not gpu and not slurm" $(ARGS)

test-fast: $(VENV)/development ## without the tests that start processes (under 90 seconds)
	$(PYTEST) $(ON_ALL_CORES) -m "not slow and not gpu and not slurm and not processes" $(ARGS)

test-all: $(VENV)/development ## all tests that can run here, the slow ones too
	$(PYTEST) $(ON_ALL_CORES) $(ARGS)

bench: $(VENV)/runtime ## this project against a loop written by hand, on this machine (ARGS="--rounds 5")
	$(BIN)/python scripts/maintain/bench.py $(ARGS)

gpu-wheels: $(VENV)/development ## into .gpu-wheels/: what a machine with a GPU, torch and no package index may lack
	$(BIN)/python scripts/maintain/gpu_wheels.py

gpu-check: ## what only a CUDA device can show, in under 9 minutes (BIN=/usr/bin: whose python has torch)
	PYTHONPATH=$(CURDIR)/.gpu-wheels:$(PYTHONPATH) $(firstword $(wildcard $(BIN)/python $(BIN)/python3) $(PYTHON)) \
		scripts/maintain/gpu_check.py

lint: $(VENV)/development ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test ## what must be green before a commit

format: $(VENV)/development ## let ruff format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: $(VENV)/development ## requirements.lock anew from requirements.txt: every package with its hashes
	$(BIN)/uv pip compile requirements.txt --output-file requirements.lock --quiet --upgrade --universal \
		--python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate \
		--custom-compile-command "make lock"

schema: $(VENV)/runtime ## conf/schema.json anew, for editors, after src/schema.py has changed
	$(BIN)/python scripts/maintain/schema.py

docs-figures: $(VENV)/runtime ## the figures of docs/ anew, the report's from a sweep that runs now (ARGS=<sweep folder>)
	$(BIN)/python scripts/maintain/docs_figures.py $(ARGS)

fork: ## this clone becomes your project (NAME=my_project HOLDER="Ada Example" DROP_DEMO=1)
	$(PYTHON) scripts/maintain/fork.py "$(NAME)" $(if $(HOLDER),--holder "$(HOLDER)") $(if $(DROP_DEMO),--drop-demo)

clean: ## remove the environment and the caches, not the outputs
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache

# Stamp files: a second call installs nothing unless the requirements have changed.
$(VENV)/runtime: requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python scripts/maintain/install.py requirements.txt
	touch $@

$(VENV)/development: requirements-dev.txt $(VENV)/runtime
	$(BIN)/python scripts/maintain/install.py requirements-dev.txt
	touch $@
