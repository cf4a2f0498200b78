.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install demo unit test sim fuzz check format bench docs clean

help: ## Show what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## Create .venv and install everything into it

$(STAMP): pyproject.toml src/headwater/__init__.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable ".[all]" --group dev
	@touch $@

demo: install ## Open a small shop in the browser: PostgreSQL, gateway and Spark at work
	$(BIN)/headwater demo

unit: install ## Run the tests that need no server: no PostgreSQL, Spark, Node or browser
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses 2 -q -p no:schemathesis src/headwater tests/unit $(ARGS)

# They start hundreds of programs, each of which would compile all it imports.
test: install ## Run every test, several files at a time (ARGS="-n 0 -k word" for one after the other)
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses 5 $(ARGS)

sim: install ## Repeat the crash simulation (SEED=8123 SECONDS=60)
	SEED=$(SEED) SECONDS=$(SECONDS) $(BIN)/python -m pytest tests/simulation -s

fuzz: install ## Run every generator at its full size (SEED=… for another first seed, ARGS="-k capture" for some)
	HEADWATER_FUZZ=1 SEED=$(SEED) $(BIN)/python -m pytest -s $$(grep -rlE "from tests.support.generators.(sizes|faults) import" tests --include="test_*.py") $(ARGS)

check: install ## Lint, format check and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install ## Rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install ## Run the benchmarks (ARGS="--large" for the full size)
	$(BIN)/python -m benchmarks $(ARGS)

docs: install ## Build the documentation as a site: build/docs/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
