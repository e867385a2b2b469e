# The commands of the project. None of them needs root; everything is kept in .venv, build and the cache folder.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
CACHE  := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/offload
REPORT ?= finetune-report
# Processes that share the tests, one more than cores: they wait for drives and for processes of their own; 0: all in one.
WORKERS ?= 3
# For the model's 2.0 GiB of parameters, gradients and states: neither the device nor the host could hold them.
BUDGETS ?= --device cpu --device-memory 1000MiB --activation-memory 860MiB --cpu-memory 400MiB --nvme-memory 3GiB

SOURCES := pyproject.toml constraints.txt CMakeLists.txt scripts/setup_venv.sh scripts/fetch_deb.py \
           $(shell find csrc -type f)
CXX_SOURCES = $(shell find csrc tests/simulated -type f \( -name '*.cc' -o -name '*.cpp' -o -name '*.cu' -o -name '*.h' \))
TYPED := $(wildcard offload swap scripts bench/nvme)
# Tests start many processes: what one of them has compiled, the next ones read.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv test test-oldest simulated wheels gpu-check nightly sanitize finetune docs lint format bench clean distclean

help:             ## what there is
	@sed -n 's/^\([a-z-]*\): .*## /  make \1|/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null || grep '##' $(MAKEFILE_LIST)

venv: $(STAMP)    ## the virtual environment in .venv, with the extensions built

$(STAMP): $(SOURCES)
	@sh scripts/setup_venv.sh "$(PYTHON)" "$(VENV)"
	@touch $@

test: $(STAMP)    ## the tests, in three processes
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile $(ARGS)

test-oldest: $(STAMP) ## the doors' tests with the oldest libraries that pyproject.toml allows, in an environment of their own
	$(BIN)/python scripts/oldest.py $(ARGS)

simulated: $(STAMP) ## build the simulated accelerator of the tests, which the first of them does otherwise
	@$(BIN)/python tests/simulated/build.py

wheels:           ## a source distribution and wheels in dist, tried in new environments (PYTHONS="3.10 3.13", or all)
	$(PYTHON) scripts/wheels.py $(addprefix --python ,$(PYTHONS)) $(ARGS)

gpu-check: $(STAMP) ## tests and measurements on this machine's GPU, in ten minutes; docs/gpu.md
	$(BIN)/python scripts/gpu_check.py $(ARGS)

nightly: $(STAMP) ## the tests with at least 10 000 hypothesis examples each (hours), all wheels, the oldest libraries
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -q --timeout=0 $(ARGS)
	$(MAKE) wheels PYTHONS=all ARGS=
	$(MAKE) test-oldest ARGS=

docs: $(STAMP)    ## the guide and the API reference in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # with --quiet, it would not count warnings

lint: $(STAMP)    ## ruff, mypy --strict and clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)
	@$(if $(CXX_SOURCES),$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES),true)

format: $(STAMP)  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix-only --exit-zero --quiet .
	$(BIN)/ruff format .
	@$(if $(CXX_SOURCES),$(BIN)/clang-format -i $(CXX_SOURCES),true)

bench: $(STAMP)   ## every bench, short; JSON goes to build/bench
	@mkdir -p build/bench
	@set -e; for file in bench/*.py bench/nvme; do case $$file in */_*) continue;; esac; \
	    echo "== $$file"; $(BIN)/python $$file --smoke $(ARGS); done

sanitize: $(STAMP) ## the tests of csrc/aio and swap on ASan+UBSan and TSan builds (ARGS="thread -- -k store")
	$(BIN)/python scripts/sanitize.py $(ARGS)

finetune: $(STAMP) ## fine-tune SmolLM2-135M through device memory, host memory and NVMe
	@$(BIN)/python scripts/prepare.py --cache "$(CACHE)"
	@mkdir -p "$(CACHE)/swap"
	$(BIN)/python -m offload finetune --model "$(CACHE)/smollm2-135m" --text "$(CACHE)/text/corpus.txt" \
	    --nvme-path "$(CACHE)/swap" $(BUDGETS) --steps 32 --lr 1e-4 --output "$(REPORT)" $(ARGS)

clean:            ## remove what the build and the tools left (keeps .venv)
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis finetune-report
	rm -f $(STAMP)
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -print | xargs rm -rf

distclean: clean  ## clean, and remove .venv
	rm -rf $(VENV)
