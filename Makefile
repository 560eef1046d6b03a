# Every target sets up what it needs: a Python, .venv, the pinned dependencies, Torpor itself. Set-up is done
# once and again whenever pyproject.toml or constraints.txt change. Choose the Python with PYTHON=/path/to/python.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?=
ARGS ?=
# Tests that run beside each other; some start up to four processes of one thread.
JOBS ?= 2

.PHONY: demo test test-matrix test-gpu lint format clean
.DEFAULT_GOAL := demo

demo: $(STAMP)
	$(BIN)/torpor demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

# Every model at every layout; `make test` runs a part in which every pair of choices meets.
test-matrix: $(STAMP)
	$(BIN)/python -m pytest tests/matrix -m "matrix or not matrix" -n $(JOBS) $(ARGS)

# On a machine with a CUDA device; `make test` leaves those out and hides the device from the others.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest tests/gpu $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A .venv that no longer runs (its Python was removed, the folder was moved) is made again.
$(STAMP): pyproject.toml constraints.txt
	@python="$$(scripts/find_python.sh "$(PYTHON)" "$(firstword $(MAKECMDGOALS))")" || exit 2; \
	if ! scripts/find_python.sh $(BIN)/python >/dev/null 2>&1; then \
	    echo "Making $(VENV) with $$python ($$($$python --version))" >&2; \
	    "$$python" -m venv --clear $(VENV); \
	fi
	@echo "Installing the pinned dependencies into $(VENV): several GB, once" >&2
	$(BIN)/python -m pip install --quiet --no-input --disable-pip-version-check \
	    --constraint constraints.txt --editable ".[dev]"
	@touch $@
