PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
export OMP_NUM_THREADS = 1
export HF_HUB_OFFLINE = 1

.PHONY: demo test test-clients lint format clean

demo: $(VENV)/.demo
	$(BIN)/midflight train configs/demo.toml

test: $(VENV)/.dev
	$(BIN)/python -m pytest tests

# Unmodified clients of other people, in environments of their own: they want different versions of one SDK.
test-clients: $(VENV)/.dev $(VENV)-clients/.done $(VENV)-clients-openai2/.done
	for clients in $(VENV)-clients $(VENV)-clients-openai2; do \
	    MIDFLIGHT_PYTHON=$(CURDIR)/$(BIN)/python $$clients/bin/python -m pytest -q -p no:cacheprovider \
	        -c /dev/null --rootdir tests/clients --confcutdir tests/clients tests/clients || exit 1; \
	done

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

$(VENV)-clients/.done: tests/clients/requirements.txt constraints.txt
$(VENV)-clients-openai2/.done: tests/clients/requirements-openai2.txt constraints.txt
$(VENV)-clients/.done $(VENV)-clients-openai2/.done:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r $<
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-clients $(VENV)-clients-openai2 runs build dist
