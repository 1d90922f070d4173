# The targets share an environment in .venv. It is set up when it is missing or older than pyproject.toml.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PYTEST_ARGS ?= -n logical --dist worksteal
BIN := $(VENV)/bin

.PHONY: demo app browser test test-all quality format docs wheel-check env clean
.DEFAULT_GOAL := env

env: $(VENV)/.ready

# torch comes first, because a later step that needs any torch would install the newest build with its CUDA packages.
$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; call make PYTHON=/path/to/python3.11")'
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV), once, which takes minutes: first $(TORCH), then everything else."
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[train,dev,docs]"
	@touch $@

demo: env
	$(BIN)/python -m hf_specheads demo

app: env
	@$(BIN)/python -c 'import gradio' 2>/dev/null || $(BIN)/python -m pip install --quiet --editable ".[app]"
	$(BIN)/python -m hf_specheads app

# Installs what tests/app/test_browser.py needs, on Debian and Ubuntu. Without it, that test is skipped.
browser: env
	@$(BIN)/python -c 'import gradio, selenium' 2>/dev/null || $(BIN)/python -m pip install --quiet --editable ".[app]" "selenium>=4.20"
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
		apt-get install --yes --no-install-recommends chromium chromium-driver

test: env
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Also runs the slow tests: every case of every test, real compilations, several processes. Takes hours on two cores.
test-all: env
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not gpu"

quality: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: env
	$(BIN)/python docs/build.py
	@echo "open build/site/index.html"

# Checks that the built wheel works on its own, when installed with its dependencies into an empty environment.
wheel-check: env
	rm -rf build/wheel-check && mkdir -p build/wheel-check
	$(BIN)/python -m build --wheel --outdir build/wheel-check .
	$(PYTHON) -m venv build/wheel-check/env
	build/wheel-check/env/bin/python -m pip install --quiet "$(TORCH)"
	build/wheel-check/env/bin/python -m pip install --quiet build/wheel-check/*.whl
	cd build/wheel-check && env/bin/specheads demo --limit 1 --max-new-tokens 32

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
