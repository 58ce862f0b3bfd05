# What a person types. Everything runs from .venv, which `make setup` builds with Python >= 3.11 and the package registry.
#
#   make setup        create .venv and install the package with its development tools
#   make demo         serve the tiny pair on port 30000 and show it at work; ONCE=1 leaves when it has been shown
#   make test         kernels, unit tests and a few servers, in minutes
#   make test-ci      more servers: what continuous integration runs
#   make test-full    the `full` battery too
#   make soak         the long-running battery
#   make test-vllm    what vLLM makes of our drafts; installs its CPU build, about 6 GB, into .run/vllm
#   make lint         ruff and mypy
#   make clean        remove .venv and what runs left behind

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-ci test-full soak test-vllm lint clean

VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.installed
PORT ?= 30000
# SGLang's packages take 15 s to import and, without stored bytecode, 38: per process, and a server is three.
unexport PYTHONDONTWRITEBYTECODE
# One thread per process: on a few busy cores more threads only wait for one another.
export OMP_NUM_THREADS ?= 1

help:
	@sed -n 's/^#   //p' Makefile

setup: $(READY)
	@echo "make setup: $(VENV) is ready"

# Bytecode of the largest packages is compiled here: otherwise the first processes each do it, for 20 s and more. Some of
# their files are templates, which do not compile.
# The stamp is newer than what it was installed from, or the installation runs again.
$(READY): pyproject.toml $(wildcard env/constraints.txt)
	@python=; for candidate in $(PYTHON) python3 python3.11 python3.12 python3.13; do \
		if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo "make setup: needs Python 3.11 or newer and found none; install it, or name it: make setup PYTHON=/path/to/python3" >&2; \
		exit 1; \
	fi; \
	echo "make setup: $$($$python --version) into $(VENV)"; \
	$$python -m venv $(VENV)
	@$(RUN) -m pip install --quiet uv
	@$(RUN) -m uv pip install --python $(RUN) $(addprefix --constraint ,$(wildcard env/constraints.txt)) --editable '.[dev]'
	@cd $(VENV)/lib/python3*/site-packages && $(CURDIR)/$(RUN) -m compileall -q -j 0 sglang torch transformers >/dev/null || true
	@touch $@

demo: $(READY)
	@$(RUN) -m sglang_dflash demo --port $(PORT) $(if $(filter-out 0,$(ONCE)),--once)

# The kernels' tests need Triton imported as an interpreter, so they run in processes of their own, first.
test: $(READY)
	@$(call pytest,-m "not full and not ci")

test-ci: $(READY)
	@$(call pytest,-m "not full")

# Continues where an interrupted run at this commit has ended, if no file has changed since.
test-full: export TESTS_PASSED = $(if $(shell git status --porcelain 2>&1),,.run/passed/$(shell git rev-parse HEAD))
test-full: $(READY)
	@$(if $(TESTS_PASSED),,unset TESTS_PASSED;) $(call pytest,-m "not soak")

pytest = status=0; \
	$(RUN) -m pytest -n 2 $(1) tests/kernels || status=1; \
	$(RUN) -m pytest -n 2 --durations=20 $(1) --ignore=tests/kernels || status=1; \
	exit $$status

soak: $(READY)
	$(RUN) -m pytest -m soak tests/server

test-vllm: $(READY)
	$(RUN) -m pytest tests/engines/vllm_checks.py

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

clean:
	rm -rf $(VENV) .run .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
