# Two commands do everything: `make demo` and `make test`. Both set up a virtual
# environment in .venv first; PYTHON picks the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One compilation cache for the runs of this checkout; delete .cache to start cold.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0.5

.PHONY: demo test test-bridges check format bench docs clean

demo: $(VENV)/demo.stamp
	$(BIN)/python examples/first_steps.py
	$(BIN)/python examples/picture.py
	$(BIN)/bilevax experiment numerical --seeds 3 --tune 5

# Without the cache: writing to it has crashed jaxlib 0.10 now and then.
test: check
	JAX_ENABLE_COMPILATION_CACHE=false $(BIN)/python -m pytest

# The bridges to cvxpy and PyTorch, which `make test` skips where they are missing.
test-bridges: $(VENV)/bridges.stamp
	JAX_ENABLE_COMPILATION_CACHE=false $(BIN)/python -m pytest tests/bridges

check: $(VENV)/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/dev.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# All code on all pages is executed, warnings are errors; then a browser reads the site.
docs: $(VENV)/docs.stamp
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/sphinx-build -W --keep-going -q \
		-c docs/site . build/site
	$(BIN)/python -m pytest -n 0 tests/site
	@echo "The site is build/site/index.html"

bench: $(VENV)/bench.stamp
	$(BIN)/python -m benchmarks.lower_level

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/demo.stamp: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[cli,plot]"
	touch $@

$(VENV)/dev.stamp: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

$(VENV)/docs.stamp: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	touch $@

# A plain install of torch may bring gigabytes of CUDA. So: the index that TORCH_INDEX
# names, or a build for CPUs among those that pip knows; else its tests are skipped.
TORCH_INDEX ?=
$(VENV)/bridges.stamp: $(VENV)/dev.stamp
	$(BIN)/python -m pip install --quiet -e ".[dev,cvxpy]"
	found=$$($(BIN)/python -m pip index versions torch 2>/dev/null \
		| tr ', ' '\n\n' | grep '+cpu$$' | head -n 1); \
	if $(BIN)/python -c "import torch" 2>/dev/null; then :; \
	elif [ -n "$(TORCH_INDEX)" ]; then \
		$(BIN)/python -m pip install --quiet --index-url "$(TORCH_INDEX)" torch; \
	elif [ -n "$$found" ]; then \
		$(BIN)/python -m pip install --quiet "torch==$$found"; \
	elif [ "$$(uname)" = Darwin ]; then \
		$(BIN)/python -m pip install --quiet torch; \
	else \
		echo "pip knows no build of torch for CPUs, so its tests are skipped;" \
			"TORCH_INDEX=... names an index that has one."; \
	fi
	touch $@

$(VENV)/bench.stamp: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet -e ".[bench]"
	# qpth declares numpy<2 and works with newer ones.
	$(BIN)/python -m pip install --quiet --no-deps qpth==0.0.17
	touch $@

clean:
	rm -rf $(VENV) .cache
