.PHONY: bench size gpu-wheels gpu-check test-simulated docs docs-outputs fork

bench: $(VENV)/runtime ## measure train.py against a hand-written loop on this machine (ARGS="--rounds 5")
	$(BIN)/python scripts/maintain/bench.py $(ARGS)

size: ## print the number of statements of each folder
	$(PYTHON) scripts/maintain/size.py

gpu-wheels: $(VENV)/development ## copy to .gpu-wheels/ the packages that a GPU machine without a package index may lack
	$(BIN)/python scripts/maintain/gpu_wheels.py

gpu-check: ## check what needs a CUDA device, in under 9 minutes (BIN=/usr/bin: its python has torch; FULL=1: all)
	PYTHONPATH=$(CURDIR)/.gpu-wheels:$(PYTHONPATH) $(firstword $(wildcard $(BIN)/python $(BIN)/python3) $(PYTHON)) \
		scripts/maintain/gpu_check.py

# Not part of CI, which has no simulator. SIMULATOR is the folder of its run.sh.
SIMULATOR ?= ../shared/simcuda
# The first files hold the tests marked gpu; the others compare strategies, evaluate, sweep and break on 3 devices.
ON_GPUS := timm_parallel/tests/test_gpu.py timm_parallel/tests/test_gpu_faults.py timm_parallel/tests/test_speed.py tests/test_timm_augment.py
ON_THREE := tests/test_equivalence.py timm_parallel/tests/test_fsdp.py tests/test_evaluation.py \
	timm_parallel/tests/promises/test_faults.py timm_parallel/tests/test_sweep.py timm_parallel/tests/test_side_by_side.py timm_parallel/tests/test_warm_server.py
test-simulated: $(VENV)/development ## run the tests that simulated GPUs can show (SIM=<build folder of the simulator>)
	@if ! test -x "$(SIM)/fakegpu-coordinator" -a -f "$(SIMULATOR)/run.sh"; then \
		echo "skipped: no simulator in SIM=$(SIM) with SIMULATOR=$(SIMULATOR)/run.sh"; exit 0; fi; \
	export SIM_NCCL=1; failed=0; \
	for devices in 1 2; do \
		bash $(SIMULATOR)/run.sh $(SIM) $$devices $(PYTEST) -m "gpu and not real_gpu" $(ON_GPUS) $(ARGS) || failed=1; done; \
	bash $(SIMULATOR)/run.sh $(SIM) 3 $(PYTEST) -m "not gpu and not slow and not cpu_only" $(ON_THREE) $(ARGS) || failed=1; \
	exit $$failed

docs: $(VENV)/docs ## build the documentation site: site/index.html (ARGS=<sweep folder> for its sample report)
	$(BIN)/python scripts/maintain/site.py $(ARGS)

docs-outputs: $(VENV)/runtime ## run the commands whose output the pages show, and refresh it (ARGS=docs/resume.md)
	$(BIN)/python scripts/maintain/docs_outputs.py $(ARGS)

fork: ## make this clone your project (NAME=my_project HOLDER="Ada Example" DROP_DEMO=1)
	$(PYTHON) scripts/maintain/fork.py "$(NAME)" $(if $(HOLDER),--holder "$(HOLDER)") $(if $(DROP_DEMO),--drop-demo)

$(VENV)/docs: requirements-docs.txt $(VENV)/runtime
	$(BIN)/python scripts/install.py requirements-docs.txt
	touch $@
