# make demo    set up, then run the main job on generated data: parts -> layout -> statistics -> training -> loss curve
# make test    set up, then lint, type checks and all tests
# make lint    lint and type checks alone
# make clean   remove what demo and tests left; make distclean removes the virtual environment too
#
# Variables: PYTHON (3.10 to 3.13), VENV, DEMO (folder of the demo), STEPS (of its training), JOBS (test processes),
# TORCH (what pip installs as PyTorch), TORCH_INDEX (where CPU builds of it lie; empty: only pip's own index).

SHELL := /bin/bash
VENV ?= .venv
DEMO ?= demo
STEPS ?= 200
JOBS ?= 2
TORCH ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3.10 python3 python; do \
	"$$name" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null && echo "$$name" && break; done)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

.PHONY: demo test lint clean distclean setup

demo: $(VENV)/.ready-train
	@VENV=$(VENV) STEPS=$(STEPS) scripts/demo.sh $(DEMO)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy data_schemas/dm05_schemas prep/dm05_prep train/dm05_train

setup: $(VENV)/.ready-dev

$(BIN)/python:
	@[ -n "$(PYTHON)" ] || { echo "make: no Python 3.10 to 3.13 found. Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "setup: $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# PyTorch first and by itself: its default build for Linux brings gigabytes of GPU libraries that a CPU has no use for.
$(VENV)/.ready-train: pyproject.toml | $(BIN)/python
	@echo "setup: PyTorch for the CPU and the packages of training (about 400 MB to download the first time)"
	@$(PIP) $(TORCH) $$($(BIN)/python tools/torch_index.py "$(TORCH_INDEX)")
	@$(PIP) -e '.[train]'
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready-train
	@echo "setup: the packages of development"
	@$(PIP) -e '.[train,video,dev]'
	@touch $@

clean:
	rm -rf $(DEMO) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find data_schemas prep train tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
