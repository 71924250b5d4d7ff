# make demo   install into .venv and generate text with the bundled model
# make test   install into .venv and run lint, type check and tests
# make test-all   the same, with every case of the tests that are products, and those that others show
# make test-gpu   the tests that need an NVIDIA GPU; every case of those that are products: make test-gpu PYTEST_OPTIONS=--all
# Needs only Python 3.11 or newer, make and a C++ compiler (g++).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Without an NVIDIA driver the CPU build is enough; with one, take the newest CUDA build that is supported.
TORCH := $(shell if command -v nvidia-smi >/dev/null 2>&1 || [ -e /proc/driver/nvidia/version ]; then echo 'torch>=2.11,<2.16'; else echo 'torch==2.13.0'; fi)

# Three processes, that take files in the order of tests/conftest.py: two cores are enough for them, since tests wait for
# processes and timers a third of their time. Tests of a GPU would get in each other's way, so with one they run one after
# the other.
PARALLEL := $(shell if command -v nvidia-smi >/dev/null 2>&1 || [ -e /proc/driver/nvidia/version ]; then :; else echo '-n 3 --dist loadfile --no-loadscope-reorder'; fi)

.PHONY: demo test test-all test-gpu lint typecheck bytecode unit clean

demo: $(VENV)/.installed
	$(BIN)/compiled-engine demo

# Types are checked by one process: meanwhile another core reads the tests, once for all processes that run them.
test: $(VENV)/.installed
	$(MAKE) -j2 lint typecheck bytecode
	$(MAKE) unit

# With every case of the tests that are products, of which `test` runs a few, and those that others show.
test-all:
	$(MAKE) test PYTEST_OPTIONS=--all

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Against an installed wheel, which has the layout that users get.
typecheck: $(VENV)/.installed
	rm -rf build .build
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --target .build/site .
	cd .build && MYPYPATH=site ../$(BIN)/mypy --config-file ../pyproject.toml -p compiled_engine
	rm -rf build .build

# pytest rewrites the asserts of each file, which takes longer than to import it.
bytecode: $(VENV)/.installed
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only --quiet >/dev/null || true  # `unit` says why

# Tests start some hundred processes. Each would compile our modules once more where Python may keep no bytecode.
unit: $(VENV)/.installed
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) $(PYTEST_OPTIONS)

test-gpu: $(VENV)/.installed
	$(BIN)/python tests/gpu_tests.py -- $(PYTEST_OPTIONS)

# pip would compile all modules, one after the other. Python compiles the few that it imports.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; found $$($(PYTHON) --version). Try: make PYTHON=python3.12 ..."; exit 1; }
	@command -v g++ >/dev/null || { echo "g++ is needed: the compiler writes C++ on a CPU"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip 'setuptools>=77' wheel
	$(BIN)/python -m pip install --quiet --no-compile '$(TORCH)'
	$(BIN)/python -m pip install --quiet --no-compile --no-build-isolation --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build .build *.egg-info
