# Two commands do everything on a fresh machine: `make search` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0

.PHONY: search test lint schema figure clean

# The main job: install, then search a recipe for the bundled demo model.
search: $(VENV)/.installed
	$(BIN)/autoq search --budget 4.5bits

# Everything that is checked: style, types, tests.
test: $(VENV)/.installed-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix . && $(BIN)/ruff format . && $(BIN)/mypy

# The JSON Schema of recipe.yaml, from the pydantic classes.
schema: $(VENV)/.installed
	$(BIN)/python -m autoq.recipe_schema

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
