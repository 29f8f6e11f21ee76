# Everything runs in .venv, which the first target that needs it creates (benchmarks in .venv-peers); nothing else is
# touched.
# Only Python 3.11 or newer with its venv module is needed beforehand.
#
#   make test WORKERS=8 ARGS="-k manifest"      make PYTHON=python3.12 test      make demo ARGS="--help"

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-full pytest lint format bench bench-all bench-docs coverage dist docs clean

# Each candidate is run, since a name on the PATH may be a shim for a version that is not installed, and Debian ships
# venv without ensurepip.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-peers
PEERS_STAMP := $(PEERS)/.installed
PEERS_PIP := $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps
WORKERS ?= 3
ARGS ?=
DATA ?=

help: ## list the targets
	@echo "make TARGET [PYTHON=python3.x] [WORKERS=$(WORKERS)] [ARGS='...']"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard src/penstock/images/*.[ch])
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 with venv found; install python3 and python3-venv," \
		"or say which: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@test -x $(BIN)/python || { echo "creating $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv $(VENV); }
	@echo "installing the development environment into $(VENV) (about a minute the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		-e '.[dev]' -c constraints.txt
	@test -z "$$PYTHONDONTWRITEBYTECODE" || $(BIN)/python -m compileall -q -j 0 -x '/(tests?|testing)/' $(VENV)/lib \
		>/dev/null || true # elsewhere it is done by the first import; pip takes one core for everything
	@touch $@

demo: $(STAMP) ## train on two ranks from real JPEG files, kill, resume; about two minutes
	@$(BIN)/penstock demo $(ARGS)

test: $(STAMP) ## lint, types and all tests; WORKERS=n processes, ARGS for pytest
	@$(MAKE) --no-print-directory -j2 lint pytest

test-full: export PENSTOCK_TEST_FULL := 1
test-full: test ## the same with every combination, spawned workers and long runs; before a release

pytest: $(STAMP)
	@$(BIN)/python tests/run.py -n $(WORKERS) $(ARGS)

lint: $(STAMP) ## ruff and mypy, changing nothing
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(STAMP) ## format the code and mend what ruff can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

$(PEERS_STAMP): benchmarks/peers.txt pyproject.toml setup.py $(wildcard src/penstock/images/*.[ch])
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 with venv found; say which: make PYTHON=..." >&2; exit 1; }
	@test -x $(PEERS)/bin/python || { echo "creating $(PEERS) with $(PYTHON)"; "$(PYTHON)" -m venv $(PEERS); }
	@echo "installing the benchmarks' peers into $(PEERS) (some minutes and 7 GB the first time)"
	@$(PEERS_PIP) -r benchmarks/peers.txt || { echo "not all at once, so one by one:"; \
		sed 's/#.*//' benchmarks/peers.txt | grep . | while read -r peer; do \
			$(PEERS_PIP) "$$peer" >/dev/null 2>&1 || echo "cannot be installed: $$peer" >&2; done; }
	@$(PEERS_PIP) -e .
	@touch $@

bench: $(PEERS_STAMP) ## run the benchmarks beside their peers, a subset, under 15 minutes; results in .bench/
	@$(PEERS)/bin/python benchmarks/run.py $(if $(DATA),--data "$(DATA)") $(ARGS)

bench-all: $(PEERS_STAMP) ## all benchmarks in full, two hours; DATA=folder with imagenet-sample/
	@$(PEERS)/bin/python benchmarks/run.py --all $(if $(DATA),--data "$(DATA)") $(ARGS)

bench-docs: $(STAMP) ## take over the results in .bench/ and write docs/performance.md
	@$(BIN)/python benchmarks/render.py $(if $(wildcard .bench/*.json),--take .bench)

coverage: export COVERAGE_FILE := $(CURDIR)/.coverage
coverage: $(STAMP) ## all tests, lines that they run; fails under 90 %; an hour
	@$(BIN)/python -m coverage erase
	@$(BIN)/python -m coverage run tests/run.py -n $(WORKERS) $(ARGS); tests=$$?; \
		$(BIN)/python -W ignore -m coverage combine --quiet; \
		$(BIN)/python -W ignore -m coverage report && exit $$tests

dist: ## build sdist and wheels for Linux, try them in empty environments, SBOM and audit; into dist/
	@PYTHON="$(PYTHON)" .ci/release

docs: $(STAMP) ## build the documentation into site/ and check it; ARGS=--external tries other sites, too
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site
	@$(BIN)/python tests/docs/check_site.py site $(ARGS)

clean: ## remove .venv and everything else that make created
	rm -rf $(VENV) $(PEERS) .bench .coverage .coverage.* build dist site demo-output .mypy_cache .ruff_cache .pytest_cache \
		.hypothesis src/*.egg-info
	rm -f src/penstock/images/*.so
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
