# make up       a cluster on this machine, from nothing: virtual environment, packages, model, start (Ctrl-C stops it)
# make test     the quick test suites        make check   ruff and mypy
# make install  the environment only         make down    stop a cluster that runs in the background
# make compiled the simulator's scheduling code, compiled anew after changes to it
# make references  the pages under docs/reference, written anew from the code
# make clean    remove all that these made

PYTHON ?= python3
MODEL ?= smollm2-135m
# Test files that run side by side.
WORKERS ?= 2
# More for `tsukimi up`, e.g. make up ARGS="--prefill 2 --decode 2 --port 8080"
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install
COMPILE := $(BIN)/python -m tsukimi.compiled.build
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed

.PHONY: install up down test check compiled references clean
.DELETE_ON_ERROR:

install: $(RUNTIME)

up: $(RUNTIME)
	@exec $(BIN)/tsukimi up --model $(MODEL) $(ARGS)

down: $(RUNTIME)
	@exec $(BIN)/tsukimi down

# All that runs in minutes on two cores, the small real model's suites included; .ci/run runs the rest.
test: $(DEV)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not compose and not gpu"

compiled: $(RUNTIME)
	@$(COMPILE)

references: $(DEV)
	$(BIN)/python -m tests.references

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	@if [ -x $(BIN)/tsukimi ]; then $(BIN)/tsukimi down; fi
	rm -rf $(VENV) .run .mypy_cache .ruff_cache .hypothesis build dist *.egg-info

# The stamps make a second run a matter of a second; a change of pyproject.toml installs again.
$(RUNTIME): pyproject.toml
	@PYTHON="$(PYTHON)" sh .ci/prerequisites
	@[ -x $(BIN)/pip ] || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing Tsukimi and what it needs into $(VENV) (minutes the first time) ..."
	@$(PIP) --editable ".[compiled]"
	@$(COMPILE) & $(PIP) --editable ".[compiled,engine,model,local]"; status=$$?; wait; exit $$status
	@touch $@

$(DEV): $(RUNTIME)
	@echo "Installing what the tests and checks need ..."
	@$(PIP) --editable ".[compiled,engine,model,local,dev]"
	@touch $@
