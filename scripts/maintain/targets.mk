.PHONY: bench size gpu-wheels gpu-check docs docs-outputs fork

bench: $(VENV)/runtime ## measure train.py against a hand-written loop on the CPU of this machine
	$(BIN)/python scripts/maintain/bench.py

size: ## print the number of statements of each folder
	$(PYTHON) scripts/maintain/size.py

gpu-wheels: $(VENV)/development ## copy to .gpu-wheels/ the packages that a GPU machine without a package index may lack
	$(BIN)/python scripts/maintain/gpu_wheels.py

gpu-check: ## check what needs a CUDA device, in 10 minutes (BIN=/usr/bin: its python has torch; FULL=1: all)
	PYTHONPATH=$(CURDIR)/.gpu-wheels:$(PYTHONPATH) $(firstword $(wildcard $(BIN)/python $(BIN)/python3) $(PYTHON)) \
		scripts/maintain/gpu_check.py

docs: $(VENV)/docs ## build the documentation site: site/index.html (ARGS=<sweep folder> for its sample report)
	$(BIN)/python scripts/maintain/site.py $(ARGS)

docs-outputs: $(VENV)/runtime ## run the commands whose output the pages show, and refresh it (ARGS=docs/resume.md)
	$(BIN)/python scripts/maintain/docs_outputs.py $(ARGS)

fork: ## make this clone your project (NAME=my_project HOLDER="Ada Example" LIBRARY=source DOCS=1 FROM=<its URL>)
	$(OWN_PYTHON) scripts/maintain/fork.py "$(NAME)" $(if $(HOLDER),--holder "$(HOLDER)") $(if $(LIBRARY),--library "$(LIBRARY)") \
		$(if $(DOCS),--docs) $(if $(FROM),--from "$(FROM)")

$(VENV)/docs: requirements-docs.txt $(VENV)/runtime
	$(BIN)/python scripts/install.py requirements-docs.txt
	touch $@
