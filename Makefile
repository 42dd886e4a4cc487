# `make demo` shows what the package does, `make test` checks it, `make docs` renders the pages and builds the site.
# `make attack MINUTES=60` tries to break it for longer, and adds up what it did in results/attack.
PYTHON ?= python3
MINUTES ?= 60
VENV   ?= .venv
BIN     = $(VENV)/bin

.PHONY: demo test lint types pages attack docs env clean

env: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Making the environment in $(VENV) …"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: env
	@$(BIN)/csda demo

# Types and pages need one core each, the tests two. A worker begins with tests of the same files, which share what
# they train, and takes over from the other when it has done its own.
test: env
	@$(MAKE) --no-print-directory --jobs 2 lint types pages
	$(BIN)/pytest -n 2 --dist worksteal

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/mypy

pages: env
	$(BIN)/python docs/render.py --check
	$(BIN)/sphinx-build -c docs -W --keep-going -q . build/site

attack: env
	$(BIN)/python tests/attack/campaign.py --minutes $(MINUTES)

docs: env
	$(BIN)/python docs/reference/generate.py
	$(BIN)/python docs/render.py
	$(BIN)/python tests/attack/campaign.py --page
	$(BIN)/sphinx-build -c docs -W --keep-going -q . build/site
	@echo "Site: build/site/index.html"

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
