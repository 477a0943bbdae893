# make demo        set up, train a small decoder, explain the memory
# make chat        set up, fine-tune a chat model by QLoRA, compare its answers before and after
# make test        set up, test each behavior once
# make test-all    the tests of make test and all others
# make mutations   plant faults, run the tests that must notice them
# make lint        ruff, mypy, words, generated pages, planned figures
# make docs        the documentation as a site in build/site; a dead link ends it
# make clean       remove what these made
# Needs Python 3.11 or newer; another one than the first found: make PYTHON=/path/to/python demo

ifndef PYTHON
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v "$$p" && break; done)
endif
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
INSTALL := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check

.PHONY: demo chat test test-all mutations lint docs clean

demo: $(VENV)/installed
	@$(BIN)/jaxmem train configs/demo.yaml --simulate 2
	@$(BIN)/python scripts/demo.py

chat: $(VENV)/installed-gguf
	@$(BIN)/python scripts/chat.py

test: $(VENV)/installed-dev
	@$(PYTEST) -m 'not exhaustive'

test-all: $(VENV)/installed-dev
	@$(PYTEST)

mutations: $(VENV)/installed-dev
	@$(BIN)/python -m tests.support.mutations

lint: $(VENV)/installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python tests/support/check_words.py
	@$(BIN)/python scripts/config_reference.py --check
	@$(BIN)/python tests/support/check_numbers.py
	@$(BIN)/mypy

docs: $(VENV)/installed-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

clean:
	rm -rf $(VENV) build *.egg-info .*_cache .hypothesis

$(VENV)/made:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found; make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@echo "Setting up $(VENV) with $(PYTHON), about a minute ..."
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "error: $(PYTHON) cannot make an environment"; exit 1; }
	@touch $@

$(VENV)/installed: $(VENV)/made pyproject.toml
	@$(INSTALL) -e .
	@touch $@

$(VENV)/installed-gguf: $(VENV)/made pyproject.toml
	@$(INSTALL) -e '.[gguf]'
	@touch $@ $(VENV)/installed

$(VENV)/installed-dev: $(VENV)/made pyproject.toml
	@$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/installed

$(VENV)/installed-docs: $(VENV)/made pyproject.toml
	@$(INSTALL) -e '.[docs]'
	@touch $@ $(VENV)/installed
