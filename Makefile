# Two commands: `make demo` shows what it does, `make test` shows that it works.
# Both set up everything they need in .venv on a fresh machine.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Two busy cores make OpenMP crawl when every process takes all of them.
export OMP_NUM_THREADS ?= 2

.PHONY: venv demo test test-all lint docs docs-recipes clean

venv: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0 hatchling editables
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev,svhn]'
	touch $@

demo: venv
	$(BIN)/python -m generalist.demo --out runs/demo

lint: venv
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest

test-all: venv
	$(BIN)/python -m pytest -m slow

# The site, for a browser: build/site/index.html. Warnings (a link that leads nowhere) are errors; nothing is fetched.
docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir build/site

docs-recipes: venv
	$(BIN)/python -m generalist.recipe_docs > docs/recipes.md

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
