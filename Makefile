PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
export OMP_NUM_THREADS = 1
export HF_HUB_OFFLINE = 1

.PHONY: demo test lint format clean

demo: $(VENV)/.demo
	$(BIN)/midflight train configs/demo.toml

test: $(VENV)/.dev
	$(BIN)/python -m pytest tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# constraints.txt pins the CPU build of torch: without it pip would bring gigabytes of CUDA.
$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo]'
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,lint]'
	touch $@

clean:
	rm -rf $(VENV) runs build dist
