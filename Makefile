# One virtual environment, one command for each thing. `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# A build for "this very processor" breaks where a virtual machine shows instructions that it does not allow, or when a cached
# wheel meets another processor: on x86-64 build for AVX2, which runs everywhere.
ifneq (,$(filter x86_64 amd64,$(shell uname -m)))
export CMAKE_ARGS ?= -DGGML_NATIVE=OFF
endif

.DEFAULT_GOAL := help
.PHONY: help install demo test check format bench fuzz soak clean

help: ## show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/'

install: $(VENV)/.installed ## make the virtual environment with everything

$(VENV)/.installed: pyproject.toml tests/engine_runs.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "installing; the first time llama.cpp is compiled, which takes some minutes"
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable '.[all]'
	$(BIN)/python tests/engine_runs.py || $(BIN)/python -m pip install --force-reinstall --no-deps --no-cache-dir llama-cpp-python
	$(BIN)/python tests/engine_runs.py
	@touch $@

demo: install ## run the whole story on a real model
	$(BIN)/llama-ckpt demo

test: install ## run the tests
	$(BIN)/python -m pytest -n auto --dist loadfile --max-worker-restart 0

check: install ## all checks: format, lint, types, import contracts, tests, migrations in step
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory test

format: install ## put the code into shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install ## measure, as ratios in one run; FULL=1: all sizes; CHECK=1: fail where a bar is missed
	$(BIN)/python -m benchmarks run $(if $(FULL),--full) $(if $(CHECK),--check)

FUZZ_SECONDS ?= 60

fuzz: install ## look for bytes that break a reader, FUZZ_SECONDS long (coverage-guided where atheris installs)
	$(BIN)/python -m pip install --quiet atheris || echo "no atheris for this Python: random changes instead"
	$(BIN)/python tests/fuzz/fuzz_formats.py --seconds $(FUZZ_SECONDS)

SECONDS ?= 90

soak: install ## let processes work and be killed at random, SECONDS long on each database, then check everything
	cd tests && ../$(BIN)/python -m support.soak --seconds $(SECONDS)

clean: ## remove the virtual environment and what tools left
	rm -rf $(VENV) build dist .fuzz .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
