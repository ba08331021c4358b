# make help lists the targets. PYTHON= and VENV= can be set.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# A file stays on one worker, because its tests share trained runs, clusters and pairs of nodes. timm_parallel/testing/fixtures.py sets the
# order.
ON_ALL_CORES := -n logical --dist loadfile --no-loadscope-reorder
# Has the packages that build a wheel, if there is an environment.
OWN_PYTHON := $(firstword $(wildcard $(BIN)/python) $(PYTHON))

.DEFAULT_GOAL := help
.PHONY: help doctor install train compare tune verdict test test-fast test-all test-ci test-nightly check lint format lock schema update own-library clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

doctor: $(VENV)/runtime ## check this machine: the command to start with, or what to fix (quick=true: train no steps)
	$(BIN)/python scripts/doctor.py $(if $(quick),quick=$(quick)) $(ARGS)

install: $(VENV)/runtime ## install into .venv, and do nothing else
	@echo "source $(BIN)/activate"

train: $(VENV)/runtime ## train a timm model on real digits, with the strategy for this machine (ARGS="key=value …")
	$(BIN)/python train.py $(ARGS)

compare: $(VENV)/runtime ## DP against DDP on this machine's GPUs, with a report (on a CPU: single against ddp)
	$(BIN)/python train.py -m experiment=compare $(ARGS)

tune: $(VENV)/runtime ## find the fastest precision, memory format, compiling, workers, threads and batch for a model here
	$(BIN)/python train.py -m experiment=tune $(ARGS)

verdict: $(VENV)/runtime ## test if the working tree is better than a commit (BASE=main ARGS="…")
	$(BIN)/python scripts/verdict.py base=$(BASE) $(ARGS)

test: $(VENV)/development ## run the tests, without the slow ones
	$(PYTEST) $(ON_ALL_CORES) -m "not slow and not nightly and not gpu and not slurm" $(ARGS)

test-fast: $(VENV)/development ## run the tests that start no processes (under 90 seconds)
	$(PYTEST) $(ON_ALL_CORES) -m "not slow and not nightly and not gpu and not slurm and not processes" $(ARGS)

test-all: $(VENV)/development ## run the slow tests too
	$(PYTEST) $(ON_ALL_CORES) -m "not nightly" $(ARGS)

test-ci: $(VENV)/development ## run what CI runs: the slow tests, and a seventh of the nightly ones
	$(PYTEST) $(ON_ALL_CORES) -m "not nightly or today" $(ARGS)

test-nightly: $(VENV)/development ## run all tests that can run here, also random and exhaustive ones
	$(PYTEST) $(ON_ALL_CORES) $(ARGS)

lint: $(VENV)/development ## run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy

check: lint test ## lint and test: must pass before a commit

format: $(VENV)/development ## format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: $(BIN)/uv ## write requirements.lock from requirements.txt: every package with its hashes
	$(BIN)/uv pip compile requirements.txt --output-file requirements.lock --quiet --upgrade --universal \
		--python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate \
		--custom-compile-command "make lock"

schema: $(VENV)/runtime ## write conf/schema.json (for editors) and the tables of docs/keys.md from src/schema.py
	$(BIN)/python scripts/schema.py

update: ## in a fork: take a newer template (FROM=<its URL>, or the git remote named template)
	$(OWN_PYTHON) scripts/update.py $(if $(FROM),--from "$(FROM)") $(if $(KEEP),--keep $(KEEP))

own-library: ## in a fork: keep the library as a folder, to edit it, instead of as a wheel
	$(OWN_PYTHON) scripts/update.py --library source $(if $(FROM),--from "$(FROM)")
	-$(BIN)/python -m pip --quiet --disable-pip-version-check uninstall --yes timm-parallel

clean: ## remove the environment and the caches, not the outputs
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache

# Targets of the template; make fork removes them.
-include scripts/maintain/targets.mk

# Stamp files: a second call installs nothing, unless the requirements have changed.
$(VENV)/runtime: requirements.txt requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python scripts/install.py requirements.lock
	touch $@

# Without the runtime, which cannot be installed before the lock fits requirements.txt.
$(BIN)/uv:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip --quiet --disable-pip-version-check install $$(grep '^uv==' requirements-dev.txt)

$(VENV)/development: requirements-dev.txt $(VENV)/runtime
	$(BIN)/python scripts/install.py requirements-dev.txt
	touch $@
