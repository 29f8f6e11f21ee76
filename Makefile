# Everything runs in .venv, which the first target that needs it creates; nothing else is touched.
# Only Python 3.11 or newer with its venv module is needed beforehand.
#
#   make test WORKERS=8 ARGS="-k manifest"      make PYTHON=python3.12 test      make demo ARGS="--help"

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint format bench docs clean

# Each candidate is run, since a name on the PATH may be a shim for a version that is not installed, and Debian ships
# venv without ensurepip.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
ARGS ?=

help: ## list the targets
	@echo "make TARGET [PYTHON=python3.x] [WORKERS=$(WORKERS)] [ARGS='...']"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt setup.py src/penstock/images/_jpeg.c
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 with venv found; install python3 and python3-venv," \
		"or say which: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@test -x $(BIN)/python || { echo "creating $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv $(VENV); }
	@echo "installing the development environment into $(VENV) (about a minute the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@touch $@

demo: $(STAMP) ## train on two ranks from real JPEG files, kill, resume; about two minutes
	@$(BIN)/penstock demo $(ARGS)

test: lint ## lint, types and all tests; WORKERS=n processes, ARGS for pytest
	@$(BIN)/python tests/run.py -n $(WORKERS) $(ARGS)

lint: $(STAMP) ## ruff and mypy, changing nothing
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(STAMP) ## format the code and mend what ruff can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(STAMP) ## run every benchmark, one after the other; tables also in .bench/
	@mkdir -p .bench; failed=; set -o pipefail; \
	for script in benchmarks/[!_]*.py; do \
		echo "== $$script"; \
		$(BIN)/python "$$script" $(ARGS) 2>&1 | tee ".bench/$$(basename "$$script" .py).txt" || failed="$$failed $$script"; \
	done; \
	test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

docs: $(STAMP) ## check the links of README and docs, run their code blocks
	@$(BIN)/python -m pytest tests/docs $(ARGS)

clean: ## remove .venv and everything else that make created
	rm -rf $(VENV) .bench build dist demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	rm -f src/penstock/images/*.so
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
