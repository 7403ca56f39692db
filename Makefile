# Everything runs in a virtual environment of the checkout's own; nothing else has to be installed but Python.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# pip would compile every module of a package, most of which nobody imports. Those that are, Python compiles once, unless
# it is told not to write bytecode, when each of the many processes that tests start would do it again.
export PIP_COMPILE := 0
export PYTHONDONTWRITEBYTECODE :=
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-fast test-all test-deploy test-hosts test-hosts-fast test-verl test-verl-fast test-verl-requests test-verl-rollouts test-vllm lint grpo ppo soak fuzz simulate mutants bench bench-verl bench-rlhf bench-requests bench-engines bench-hosts dist docs clean

demo: $(VENV)/.base  ## install the base package and run the quickstart
	$(BIN)/python examples/quickstart.py

# Tests wait for a part of the time, so at least three processes run them. TEST_OPTIONS='-k mesh -n 0' chooses both.
TEST_PROCESSES ?= $(shell n=$$(nproc); echo $$((n > 3 ? n : 3)))
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES)

test: $(VENV)/.dev  ## install everything, check the code, and run the tests of all that a change can break in five minutes
	$(MAKE) --no-print-directory --jobs=2 lint test-fast

test-fast: $(VENV)/.dev
	$(PYTEST) -m "not slow" $(TEST_OPTIONS)

test-all: test  ## and the slow rest: tutorials, examples, benchmarks, soak, random programs, several hosts, verl's own tests
	$(PYTEST) -m slow $(TEST_OPTIONS)
	$(MAKE) --no-print-directory --jobs=2 test-hosts-fast test-verl-fast fuzz simulate $(if $(CI),$(SHORTER))

# What anybody runs by hand goes on for a minute each time, with other seeds.
SHORTER := FUZZ_OPTIONS="--minutes 0.5 --seed 1" SIMULATION_OPTIONS="--minutes 0.5 --seed 1"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Reinforcement learning of a language model with three seeds, a frozen policy and a supervised ceiling, and its curves.
grpo ppo: $(VENV)/.rlhf
	$(BIN)/python examples/rlhf/curves.py $@ --plot runs/$@.svg $(RLHF_OPTIONS)

soak: $(VENV)/.dev  ## random groups, calls and faults for ten minutes; SOAK_OPTIONS='--minutes 60 --seed 7'
	$(BIN)/python tests/soak.py $(SOAK_OPTIONS)

fuzz: $(VENV)/.dev  ## random programs against an oracle for a minute; FUZZ_OPTIONS='--minutes 60 --backends local,ray --seed 7'
	PYTHONPATH=tests $(BIN)/python -m fuzz $(FUZZ_OPTIONS)

simulate: $(VENV)/.dev  ## threads, calls and ranks of a simulated world, for a minute; SIMULATION_OPTIONS='--minutes 60 --seed 7'
	PYTHONPATH=tests $(BIN)/python -m simulation $(SIMULATION_OPTIONS)

mutants: $(VENV)/.dev  ## small changes to the path, each of which the simulated world must notice within a minute
	PYTHONPATH=tests $(BIN)/python -m mutants $(MUTANTS_OPTIONS)

# On several hosts, which are namespaces of this machine with networks of their own: needs root, else it says so.
HOST_TESTS := $(addprefix tests/test_,$(addsuffix .py,contract handles laws streams turns colocation callers request_streams seeds)) \
	-k "(ray or seeds) and not Roles"

test-hosts: $(VENV)/.dev  ## faults of whole hosts, and what groups do whose ranks are on other hosts
	$(BIN)/python -m pytest tests/test_hosts.py tests/test_bench_hosts.py
	$(BIN)/python tests/on_hosts.py $(HOST_TESTS)

test-hosts-fast: $(VENV)/.dev  ## of these, the faults, and the contract of a backend
	$(BIN)/python -m pytest tests/test_hosts.py
	$(BIN)/python tests/on_hosts.py tests/test_contract.py -k "TestRay and not Roles"

test-deploy: $(VENV)/.dev  ## the recipes of docs/deploy/ (10 minutes), those for which Slurm, OpenSSH's server or ray[default] are installed
	$(BIN)/python -m pytest tests/deploy/test_on_hosts.py tests/deploy/test_ray_job.py

# Every peer in an environment of its own, torch first in each; one that cannot be installed is reported as absent.
BENCH := .bench
BENCH_ENVIRONMENTS := $(addprefix $(BENCH)/.,bandmaster monarch verl)

bench: $(BENCH_ENVIRONMENTS)  ## measure everything side by side; the dated page goes to benchmarks/results/
	$(BENCH)/bandmaster/bin/python benchmarks/run_all.py $(BENCH_OPTIONS)

$(BENCH)/.bandmaster: pyproject.toml constraints.txt benchmarks/requirements-torch.txt benchmarks/requirements-bandmaster.txt
	$(call bench_install,bandmaster,--requirement benchmarks/requirements-torch.txt)
	$(call bench_install,bandmaster,--editable '.[ray]' --requirement benchmarks/requirements-bandmaster.txt)
	touch $@

$(BENCH)/.monarch: constraints.txt benchmarks/requirements-torch.txt benchmarks/requirements-monarch.txt
	-$(call bench_install,monarch,--requirement benchmarks/requirements-torch.txt) && \
	$(call bench_install,monarch,--requirement benchmarks/requirements-monarch.txt) && touch $@

$(BENCH)/.verl: constraints.txt benchmarks/requirements-torch.txt $(wildcard benchmarks/requirements-verl*.txt)
	-$(call bench_install,verl,--requirement benchmarks/requirements-torch.txt) && \
	$(call bench_install,verl,--requirement benchmarks/requirements-verl.txt) && \
	$(call bench_install,verl,--no-deps --requirement benchmarks/requirements-verl-itself.txt) && touch $@

bench_install = $(PYTHON) -m venv $(BENCH)/$(1) && $(BENCH)/$(1)/bin/python -m pip install --quiet \
	--disable-pip-version-check --constraint constraints.txt $(2)

# verl's own tests, unchanged, on bandmaster. VERL_TESTS="test_x test_y" chooses, ON=verl runs them on verl itself.
VERL := .verl
ON ?= bandmaster

test-verl: $(VERL)/.ready
	$(VERL)/bin/python tests/verl/run.py $(VERL) $(ON) $(VERL_TESTS)

test-verl-requests: $(VERL)/.trainers
	PYTHONPATH=src:tests/verl $(VERL)/bin/python -m pytest -q --noconftest -p no:cacheprovider -c /dev/null \
		--rootdir tests/verl tests/verl/rollout_requests.py

test-verl-rollouts: test-verl-requests  ## verl's own trainers with a group of engines as their rollout, of which a replica dies in each run
	$(VERL)/bin/python tests/verl/rollouts.py $(ROLLOUTS)

$(VERL)/.trainers: $(VERL)/.ready tests/verl/requirements-trainers.txt
	$(VERL_PIP) install --constraint constraints.txt --requirement tests/verl/requirements-trainers.txt
	touch $@

# Those of them that take less than half a minute each on an idle machine.
FAST_VERL_TESTS := test_get_set_dispatch_collect_cpu test_fused_workers_on_cpu test_driverfunc_to_worker \
	test_auto_padding_on_cpu test_ray_local_envs_on_cpu

test-verl-fast: test-verl-requests
	$(MAKE) test-verl VERL_TESTS="$(FAST_VERL_TESTS)"

# vLLM's own code built for CPUs, in an environment of its own: 3.5 GB. torchvision, torchaudio and torchcodec of the
# registry are built for CUDA, and break its import where there is none; models of text do not need them.
VLLM := .vllm
AGENTS := .agents
VLLM_PIP = $(VLLM)/bin/python -m pip --quiet --disable-pip-version-check

test-vllm: $(VLLM)/.ready $(AGENTS)/.ready  ## rl.VLLM against a real vLLM on CPUs; TEST_OPTIONS='-k stream' chooses tests
	$(VLLM)/bin/python -m pytest tests/vllm $(TEST_OPTIONS)

# A framework for agents, which calls the endpoint as it stands, in an environment of its own.
$(AGENTS)/.ready: tests/vllm/requirements-agents.txt
	$(PYTHON) -m venv $(AGENTS)
	$(AGENTS)/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

$(VLLM)/.ready: pyproject.toml constraints.txt tests/vllm/requirements.txt benchmarks/requirements-torch.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM_PIP) install --constraint constraints.txt --requirement benchmarks/requirements-torch.txt
	$(VLLM_PIP) install --requirement benchmarks/requirements-torch.txt --requirement tests/vllm/requirements.txt
	$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	$(VLLM_PIP) install --no-deps --editable .
	touch $@

bench-verl: $(VERL)/.trainers  ## calls of verl's trainers, and requests of its agent loops, on verl and on bandmaster, in turn
	$(VERL)/bin/python tests/verl/figures.py
	PYTHONPATH=src $(VERL)/bin/python tests/verl/hot_path.py

bench-rlhf: $(VERL)/.ready  ## a step of GRPO on bandmaster, plain Ray and verl, in turn
	$(VERL)/bin/python benchmarks/rlhf/grpo_step.py $(BENCH_OPTIONS)

bench-requests: $(VENV)/.dev  ## requests to single replicas, many at a time, and from workers; with Monarch if `make bench` has installed it
	$(BIN)/python benchmarks/many_requests.py $(BENCH_OPTIONS)
	$(BIN)/python benchmarks/requests_under_load.py $(BENCH_OPTIONS)

bench-engines: $(VLLM)/.ready  ## what batches, requests and the endpoint cost beside vLLM itself
	HF_HUB_OFFLINE=1 $(VLLM)/bin/python benchmarks/engines.py $(BENCH_OPTIONS)
	HF_HUB_OFFLINE=1 $(VLLM)/bin/python benchmarks/serve.py $(BENCH_OPTIONS)

bench-hosts: $(VENV)/.dev  ## calls and rows to ranks on other hosts, which are namespaces; needs root, else it says so
	$(BIN)/python benchmarks/hosts.py $(BENCH_OPTIONS)

# What the environment of the checkout has is not installed once more: torch, Ray, and most of what verl needs.
$(VERL)/.ready: constraints.txt tests/verl/requirements.txt benchmarks/requirements-verl-itself.txt $(VENV)/.dev
	$(PYTHON) -m venv $(VERL)
	echo $(realpath $(VENV))/lib/python3*/site-packages > $$(echo $(VERL)/lib/python3*/site-packages)/checkout.pth
	$(VERL_PIP) install --constraint constraints.txt --requirement tests/verl/requirements.txt
	$(VERL_PIP) install --no-deps --requirement benchmarks/requirements-verl-itself.txt
	$(VERL_PIP) download --no-deps --dest $(VERL) --requirement benchmarks/requirements-verl-itself.txt
	touch $@

VERL_PIP = $(VERL)/bin/python -m pip --quiet --disable-pip-version-check

# Built and tried on every supported Python that is at hand, in environments of their own.
DIST_TOOLS := .dist

dist: $(DIST_TOOLS)/.ready  ## build sdist and wheel into dist/, check them, and try the wheel
	$(DIST_TOOLS)/bin/python tools/dist.py

$(DIST_TOOLS)/.ready: constraints.txt tools/requirements-dist.txt
	$(PYTHON) -m venv $(DIST_TOOLS)
	$(DIST_TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--requirement tools/requirements-dist.txt
	touch $@

# The documentation site, in site/: fails for broken links, and for public names without a page.
DOCS := .docs

docs: $(DOCS)/.ready  ## build the documentation site into site/
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

$(DOCS)/.ready: constraints.txt tools/requirements-docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable . \
		--requirement tools/requirements-docs.txt
	touch $@

clean:
	rm -rf $(VENV) $(VERL) $(AGENTS) $(DIST_TOOLS) $(DOCS) site build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable .
	touch $@

$(VENV)/.rlhf: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[rlhf]'
	touch $@ $(VENV)/.base

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[dev]'
	touch $@ $(VENV)/.base
