# Sets up an environment in .venv and runs what the README promises. `make PYTHON=python3.12 test` picks another Python.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test test-slow check golden docs clean

demo: $(READY)  ## train a small GPT on real text with four schedules, and compare
	$(BIN)/zerobubble demo $(ARGS)

test: check  ## everything that runs in an everyday test run
	$(BIN)/pytest $(ARGS)

test-slow: $(READY)  ## the tests that take longer
	$(BIN)/pytest -m slow --timeout 1800 $(ARGS)

check: $(READY)  ## style, types, imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check

docs: $(READY)  ## rewrite the generated tables and pictures
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/images/make.py

golden: $(READY)  ## rewrite the golden grids of the generators
	$(BIN)/pytest tests/test_generators.py --update-golden

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[train,plot,solver,dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
