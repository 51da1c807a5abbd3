# Everything runs in .venv, which is made from pyproject.toml on first use and again when that changes; each
# target installs what it needs and no more: interlace alone, its tests, or its documentation. The releases of
# torch and Triton are those of constraints/.
# Another torch:    make test TORCH=2.15, which makes and keeps .venv-2.15
# Another Python:   make test PYTHON=python3.12
# Kernels for a GPU's machine, whose Python counts: make gpu-cache PYTHON=python3.12
# Options for pip:  make test PIP_FLAGS="--find-links wheels"
# The site elsewhere: make docs SITE=folder
# A longer soak:      make faults MINUTES=10
# More or less of the thorough tests: make test-all MINUTES=60
# More of torch's tests: make conformance PYTORCH=folder of its repository, of the same release
# Some programs only: make clients CLIENTS="ray_train lightning_ddp"
# PhysicsNeMo's own tests instead: make clients PHYSICSNEMO=folder of its repository, of the same release

# The first Python on PATH that the project supports; python3 if it is one.
SUPPORTED := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))
ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && exit; done; echo python3)
endif
PIP_FLAGS ?=
PINNED := 2.13
TORCH ?= $(PINNED)
CORNERS := 2.11 2.13 2.14 2.15
VENV := .venv$(if $(filter $(PINNED),$(TORCH)),,-$(TORCH))
PY := $(VENV)/bin/python
EXTRAS_test := [test,plot]
EXTRAS_docs := [docs]
EXTRAS_dist := [dist]
EXTRAS_types := [types]
# An empty value lets Python write bytecode, whatever the environment says: workers share it.
PYTEST := PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -q -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
SITE ?= build/site
DIST ?= dist
CLIENTS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-all matrix corner conformance clients faults verify verify-fast lint format docs dist
.PHONY: pictures bench bench-hosts gpu-cache gpu-kernels clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "The first of these makes .venv. pip's default torch brings several GB of CUDA packages; without a"
	@echo "GPU, let PIP_FLAGS name PyTorch's CPU wheels too (--extra-index-url or --find-links)."

demo: $(VENV)/demo  ## run the demonstration; needs no GPU
	@echo "Three fused ops on four simulated ranks: ten seconds on a fast machine, a minute on a slow one."
	$(PY) -m interlace demo

test: $(VENV)/test  ## run the tests; those that need a GPU are skipped without one
	$(PYTEST)

test-all: test $(VENV)/docs $(VENV)/dist $(VENV)/types  ## and those that take long for what they find; 30 minutes
	$(PYTEST) -m thorough --minutes $(or $(MINUTES),30)

matrix:  ## the core of the tests with one torch after another; minutes each, and 6 GB; writes a table
	status=0; for torch in $(CORNERS); do $(MAKE) TORCH=$$torch corner || status=1; done; exit $$status

corner: $(VENV)/test  # a row of that table
	$(PY) tests/repository/corner.py

conformance: $(VENV)/test  ## torch's own tests of process groups, on interlace as a backend; minutes
	$(PY) tests/conformance/run_suite.py $(if $(PYTORCH),--pytorch $(PYTORCH))

clients: .venv-clients/made  ## programs that others wrote, on gloo and on interlace, and their table; minutes, 3 GB
	PYTHONPATH=tests .venv-clients/bin/python -m clients.$(if $(PHYSICSNEMO),physicsnemo_tests \
		$(PHYSICSNEMO),run $(CLIENTS))

faults: $(VENV)/test  ## provoke every fault that docs/explanation/reliability.md is about, and write its table; ten minutes
	PYTHONPATH=tests $(PY) -m faults --minutes $(or $(MINUTES),2)

verify: $(VENV)/test  ## races, schedules, lint and protocols of everything that is shipped; minutes
	$(PY) -m interlace verify all --full --seeds 6 --schedules 60
	$(PY) -m pytest -q -m thorough tests/sim/algorithms/test_determinism.py

verify-fast: $(VENV)/demo  ## less of the same: 2 and 3 ranks, one architecture; a minute on a quiet machine
	$(PY) -m interlace verify all

lint: $(VENV)/test  ## ruff, its formatter in check mode, and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy python/interlace/__init__.py  # has code, which the stub beside it hides

format: $(VENV)/test  ## apply ruff's fixes and formatting
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(VENV)/docs  ## build the documentation site into build/site; needs no network
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --site-dir $(SITE)

dist: $(VENV)/dist  ## sdist and wheel as an index would take them, into dist/; needs no network
	rm -rf $(DIST)
	$(PY) -m build --no-isolation --outdir $(DIST)
	$(PY) -m twine check --strict $(DIST)/*

pictures: $(VENV)/test  ## draw all pictures of the documentation; needs Chromium; a minute
	$(PY) docs/draw.py
	$(PY) benchmarks/report.py --plots

bench: $(VENV)/test  ## run the benchmarks
	$(PY) benchmarks/run.py

bench-hosts: $(VENV)/test  ## the place hosts against gloo, on two hosts in network namespaces; ten minutes
	$(PY) benchmarks/run.py --op hosts --ranks 4,8

gpu-cache:  ## compile what benchmarks/gpu_call.sh runs, before a GPU is there; minutes, and 6 GB for its torch
	$(MAKE) TORCH=2.11 gpu-kernels

gpu-kernels: $(VENV)/demo  # with the torch and the Triton of the machine that has the GPU
	PYTHONPATH=python $(PY) benchmarks/gpu_cache.py

clean:  ## remove .venv and everything that tools leave behind
	rm -rf .venv .venv-* build dist python/*.egg-info *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find kernels runtime python tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

# The stamp is written last, so an install that failed is tried again.
$(VENV)/demo $(VENV)/test $(VENV)/docs $(VENV)/dist $(VENV)/types: $(VENV)/%: pyproject.toml setup.py constraints/torch-$(TORCH).txt
	@if ! "$(PYTHON)" -c '$(SUPPORTED)' 2>/dev/null; then \
		echo "interlace needs Python 3.10 to 3.14. '$(PYTHON)' says:" \
			"$$("$(PYTHON)" --version 2>&1 | head -n 1)" >&2; \
		echo "Name one that will do: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; fi
	@rm -f $@
	"$(PYTHON)" -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check $(PIP_FLAGS) -c constraints/torch-$(TORCH).txt \
		-e ".$(EXTRAS_$*)"
	@touch $@

# DeepSpeed is built with the torch that it finds; what it would compile is for GPUs.
.venv-clients/made: constraints/clients.txt constraints/torch-$(PINNED).txt pyproject.toml
	@rm -f $@
	"$(PYTHON)" -m venv .venv-clients
	.venv-clients/bin/python -m pip install --disable-pip-version-check $(PIP_FLAGS) \
		-c constraints/torch-$(PINNED).txt setuptools wheel ninja -e .
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu .venv-clients/bin/python -m pip install --disable-pip-version-check \
		$(PIP_FLAGS) --no-build-isolation -c constraints/torch-$(PINNED).txt -r constraints/clients.txt
	.venv-clients/bin/python -m pip install --disable-pip-version-check $(PIP_FLAGS) --no-deps \
		nvidia-physicsnemo==2.1.1
	@touch $@
