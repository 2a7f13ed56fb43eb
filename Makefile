# Verbs of the project. Each makes .venv, installs what it needs, and can be run again; a stamp file keeps that quick.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where models that the demo and the real-model tests need are kept.
H3STORE_CACHE ?= $(CURDIR)/demo-data
export H3STORE_CACHE
CC ?= cc
PYTEST_FLAGS ?=
ASV_FLAGS ?= --quick

BUILD_INPUTS := pyproject.toml setup.py constraints.txt $(wildcard native/*.c native/*.h native/*.py)
# torch is named with its exact version: that is what makes pip take the CPU build.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0

.PHONY: help demo test test-all lint type sanitize bench bench-html bench-peers docs clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       the main job on a real model: a long document in, answers out"
	@echo "make test       the fast tests and the real-model tests"
	@echo "make test-all   the same with the slow tests"
	@echo "make lint       ruff;  make type: mypy;  make sanitize: C tests under ASan, UBSan and TSan"
	@echo "make bench      asv benchmarks (ASV_FLAGS=--quick);  make bench-html: their pages"
	@echo "make bench-peers  the table of docs/benchmarks.md: h3store and what people use today, about 8 minutes"
	@echo "make docs       reference pages in build/docs"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "h3store needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Set PYTHON=..." >&2; exit 2; }
	@command -v $(CC) >/dev/null || \
	  { echo "h3store compiles its native part and found no C compiler ($(CC)). Install gcc, or set CC=..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-%: $(BUILD_INPUTS) | $(BIN)/python
	@echo "installing h3store[$*] into $(VENV)"
	$(INSTALL) -e '.[$*]'
	@touch $@

demo: $(VENV)/.stamp-gguf
	$(BIN)/h3store demo --store $(H3STORE_CACHE)/demo-store.h3 $(DEMO_FLAGS)

test: $(VENV)/.stamp-test
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_FLAGS)

test-all: $(VENV)/.stamp-test
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .

type: $(VENV)/.stamp-dev
	$(BIN)/mypy

sanitize: $(VENV)/.stamp-test
	$(MAKE) -C native/tests run PYTHON=$(abspath $(BIN)/python)

# asv runs in its own folder; the package and the benchmarks are imported from here.
ASV := cd asv_bench && PYTHONPATH=$(CURDIR) ASV_PYTHONPATH=$(CURDIR) ../$(BIN)/asv

bench: $(VENV)/.stamp-bench
	$(ASV) machine --yes >/dev/null
	$(ASV) run --python=same --set-commit-hash $$(git rev-parse HEAD) --show-stderr $(ASV_FLAGS)

bench-html: $(VENV)/.stamp-bench
	$(ASV) publish
	@echo "pages (they load scripts from the network) in asv_bench/html: $(BIN)/python -m http.server -d asv_bench/html"

bench-peers: $(VENV)/.stamp-bench
	$(BIN)/python -m asv_bench.benchmarks.peers --docs $(PEERS_FLAGS)

docs: $(VENV)/.stamp-test
	mkdir -p build/docs
	cd build/docs && ../../$(BIN)/python ../../tests/tools/reference_pages.py

clean:
	rm -rf build *.egg-info h3store/_native*.so h3store/_native.c $(VENV)/.stamp-*
