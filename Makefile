# `make demo` trains the embedded demo; `make test` runs all tests. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check setup clean

demo: $(VENV)/.installed
	$(BIN)/weft demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

setup: $(VENV)/.installed-dev

# torch goes first, pinned to its CPU build: packages that only ask for "torch" then take what is there.
$(VENV)/.torch: constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints-cpu.txt torch numpy
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet -c constraints-cpu.txt -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed pyproject.toml
	$(BIN)/python -m pip install --quiet -c constraints-cpu.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) runs
