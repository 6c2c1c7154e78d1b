# Each target sets itself up in .venv: Python >= 3.10 and make are all it needs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test lint format clean

# The main job: images of Unicode characters and their names. Options: make train ARGS="--processes 2"
train: .venv/train-installed
	$(BIN)/wholebatch train $(ARGS)

# Everything that continuous integration checks.
test: lint
	$(BIN)/python -W error -m pytest $(ARGS)

lint: .venv/dev-installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: .venv/dev-installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "wholebatch needs Python >= 3.10, $(PYTHON) is $$($(PYTHON) --version); try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

# torch first and by its exact pin, so that a CPU build is taken where pip finds one.
.venv/%-installed: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing torch and '.[$*]' into .venv"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$*]'
	touch $@
