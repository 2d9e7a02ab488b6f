# `make quickstart` and `make test` do all the set-up that they need.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
PYTORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
# Processes that run tests side by side, one file at a time each; more than two cores, since many tests wait for processes.
TEST_WORKERS ?= 4
# A test that fails is run once more, alone: see tests/run_suite.py.
SUITE := $(BIN)/python tests/run_suite.py
PYTEST_OPTIONS = -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations=30 --durations-min=5

# Compute processes share few cores: spinning OpenMP threads slow each other down by an order of magnitude.
export OMP_WAIT_POLICY ?= passive
export GOMP_SPINCOUNT ?= 0

# Services and tests are hundreds of processes, each of which would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

# pip is quiet about what it fetched unless it fails; the +cpu wheel of torch comes from PyTorch's own index where no other has it.
define pip_install_locked
	$(BIN)/pip install -qq --no-deps -r $(1) || \
	$(BIN)/pip install -qq --no-deps --extra-index-url $(PYTORCH_CPU_INDEX) -r $(1)
endef

# An environment aside, filled by the pip of .venv. Most of its modules are never imported: those that are, Python compiles then.
define install_aside
	test -x $(@D)/bin/python || $(PYTHON) -m venv --without-pip $(@D)
	$(BIN)/pip --python $(@D)/bin/python install -qq --no-deps --no-compile -r $<
endef

# The pip that comes with older Pythons takes twice as long, most of it to read the lists of releases.
PIP := 26.3

.PHONY: help install install-dev install-bench install-ecosystem quickstart picture real test test-fast test-ecosystem test-soak test-cluster test-docker test-examples test-gpu gpu-wheels ecosystem-latest client-table chaos adversary fuzz audit lint format references proto proto-check wheels npm-package clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

$(VENV)/.installed: requirements/cpu.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15) and "Sluice needs Python 3.11 to 3.14; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	-$(BIN)/pip install -qq pip==$(PIP)
	$(call pip_install_locked,requirements/cpu.lock)
	$(BIN)/pip install -qq --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements/dev.lock
	$(call pip_install_locked,requirements/dev.lock)
	touch $@

install: $(VENV)/.installed ## create .venv with everything that runs Sluice on a CPU

install-dev: $(VENV)/.installed-dev ## ... and what tests and linters need

install-bench: .venv-bench/.installed ## what `sluice bench trainer`, `sluice bench gateway` and `make test-ecosystem` compare with, apart from .venv

.venv-bench/.installed: requirements/bench.lock | $(VENV)/.installed
	$(BIN)/pip install -qq --no-deps --no-compile --upgrade --target .venv-bench -r requirements/bench.lock
	touch $@

# Virtual environments of packages that do not fit beside each other, and packages of Debian that are unpacked aside.
ECOSYSTEM := agents langchain verifiers verifiers04 environments openenv
ECOSYSTEM += objectstore
ECOSYSTEM += ray skypilot
ECOSYSTEM += kubernetes
ECOSYSTEM += go
DEBIAN := go java rust

# Three at a time: some wait for the network, while pip fills the cores.
install-ecosystem: install-dev ## what `make test-ecosystem` needs of others, apart from .venv
	@$(MAKE) --no-print-directory --output-sync=target -j3 \
		$(ECOSYSTEM:%=.venv-ecosystem-%/.installed) $(DEBIAN:%=.debian-ecosystem-%/.installed) .node-ecosystem/.installed

# requirements/ecosystem-NAME.txt names what tests use, and ecosystem-NAME.lock pins it with all that it needs.
.venv-ecosystem-%/.installed: requirements/ecosystem-%.lock | $(VENV)/.installed
	$(install_aside)
	touch $@

# The nodes of a cluster run Sluice too: this one sees the packages of .venv, and adds what Ray needs.
.venv-ecosystem-ray/.installed: requirements/ecosystem-ray.lock | $(VENV)/.installed-dev
	$(install_aside)
	echo "import site; site.addsitedir('$$(echo $(CURDIR)/$(VENV)/lib/python3*/site-packages)')" > $$(echo $(@D)/lib/python3*/site-packages)/sluice.pth
	touch $@

.venv-ecosystem-kubernetes/.installed: requirements/ecosystem-kubernetes.lock requirements/ecosystem-helm.lock tests/ecosystem/kubernetes_tools.py | $(VENV)/.installed
	$(install_aside)
	$(BIN)/python tests/ecosystem/kubernetes_tools.py $(@D)
	touch $@

.node-ecosystem/.installed: requirements/ecosystem-node/package.json requirements/ecosystem-node/package-lock.json
	mkdir -p $(@D) && cp $^ $(@D)
	if command -v npm >/dev/null; then npm ci --prefix $(@D) --no-audit --no-fund --loglevel=error; else echo "no npm: agents for Node.js are left out"; fi
	touch $@

# Stubs for other languages are compiled with the libraries that Debian packages: suite, which of what they depend on is needed, packages.
DEBIAN_go := trixie '^(golang-(google-(grpc|protobuf|genproto)|golang-x-(net|sys|text)|github-golang-protobuf)|protoc-gen)' golang-google-grpc-dev protoc-gen-go protoc-gen-go-grpc
DEBIAN_java := bookworm 'java|proto' libgeronimo-annotation-1.3-spec-java libgrpc-java libguava-java libprotobuf-java protobuf-compiler protobuf-compiler-grpc-java-plugin
DEBIAN_rust := trixie '^librust-' librust-tonic-dev librust-tonic-build-dev

.debian-ecosystem-%/.installed: tests/ecosystem/unpack_debian.sh
	if sh $< $(@D) $(DEBIAN_$*); then touch $@; else echo "the libraries of $* cannot be unpacked here: its test is skipped"; rm -rf $(@D); fi

ecosystem-latest: install-dev ## pin the newest releases of what `make test-ecosystem` runs against, print what changed, and run it
	$(BIN)/python tests/ecosystem/lock_ecosystem.py
	$(MAKE) test-ecosystem

quickstart: install ## train a small model by RL from nothing, with vLLM, in minutes (SEED=1, LR=0)
	$(BIN)/sluice quickstart --seed $(SEED) $(if $(LR),--lr $(LR))

picture: install ## run the quickstart, and draw docs/images/quickstart.svg and reward.png from it
	$(BIN)/python docs/images/draw_quickstart.py --seed $(SEED)

real: install ## train a real pretrained model (SmolLM2-135M) on sums, in a quarter of an hour (SEED=1, LR=0)
	$(BIN)/sluice quickstart --task sums --seed $(SEED) $(if $(LR),--lr $(LR))

# Workers share the cores: one thread each.
test test-fast test-ecosystem test-soak test-cluster test-docker test-examples: export OMP_NUM_THREADS ?= 1

# Tests that have a target of their own.
ELSEWHERE := ecosystem or examples or fuzz or docker or soak

test: install-dev ## run every test that needs nothing but .venv
	$(SUITE) "not ($(ELSEWHERE))" tests -- $(PYTEST_OPTIONS)

test-fast: install-dev ## run the tests that take seconds
	$(SUITE) "not (slow or gpu or $(ELSEWHERE))" tests -- $(PYTEST_OPTIONS) --hypothesis-profile=fast

test-ecosystem: TEST_WORKERS = 3
test-ecosystem: install-dev install-bench install-ecosystem ## run the tests against what others publish, such as the chat templates that TRL ships
	$(SUITE) "ecosystem and not soak" tests -- $(PYTEST_OPTIONS)

test-soak: install-dev install-bench install-ecosystem ## run the cases of matrices and the long runs of which the other targets do one of each kind
	$(SUITE) "soak and not (gpu or docker)" tests -- $(PYTEST_OPTIONS)

CLUSTERS := $(addprefix tests/ecosystem/test_,slurm.py ray.py helm_chart.py helm_pods.py two_machines.py rotation_in_a_run.py)

test-cluster: install-dev install-ecosystem ## run everything on Slurm, Ray and pods, of which test-ecosystem does one of each kind
	$(SUITE) "ecosystem or soak" $(CLUSTERS) -- -n 0 -s

test-docker: install-dev ## run the tests that build images and start containers; needs a Docker engine with compose v2
	$(SUITE) docker tests/integration/test_compose*.py -- -n 0

test-examples: install-dev install-ecosystem ## follow the README of each example, and check that the model has learned: half an hour
	$(SUITE) examples tests/ecosystem/test_examples.py -- -n 2 --dist worksteal

# Where a device is, PyTorch for it may be too, and no .venv: then any Python that has it.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
INTO ?= outputs/gpu.json

test-gpu: ## measure a CUDA device, each part that is not in INTO yet (PART=2, PART="speed memory", INTO=outputs/h100.json)
	$(GPU_PYTHON) -m benchmarks.gpu --into $(INTO) $(PART:%=--part %)

# pip matches a platform exactly: those that wheels of the packages are built for.
WHEEL_PLATFORMS := $(foreach version,_2_28 _2_27 _2_24 _2_17 2014 1,--platform manylinux$(version)_x86_64)
GPU_PYTHON_VERSION ?= 3.12

gpu-wheels: install-dev ## download into .gpu-wheels what `make test-gpu` needs on a machine that has PyTorch and transformers but no network
	rm -rf .gpu-wheels
	$(BIN)/pip download -q --no-deps --only-binary=:all: --implementation cp --python-version $(GPU_PYTHON_VERSION) $(WHEEL_PLATFORMS) \
		-d .gpu-wheels -c requirements/cpu.lock -c requirements/dev.lock -r requirements/gpu.txt

client-table: install-dev install-ecosystem ## play each client of agents through a gateway, and print the table of docs/gateway.md
	$(BIN)/python tests/ecosystem/client_table.py

PIP_AUDIT := 2.10.1

SEEDS ?= 1
FIRST_SEED ?= 0

chaos: install ## kill, stop and starve the services of a run at random moments (SEEDS=10, FIRST_SEED=3)
	$(BIN)/sluice bench chaos --seeds $(SEEDS) --first-seed $(FIRST_SEED)
	$(BIN)/sluice bench capture --episodes 12 --updated 12 --kills 1 --seed $(FIRST_SEED)

SECONDS ?= 300

adversary: install ## honest agents beside an adversary at a gateway: what they notice, and the memory of each process (SECONDS=30)
	$(BIN)/sluice bench adversary --seconds $(SECONDS)

audit: requirements/cpu.lock requirements/dev.lock ## ask the advisory databases about every pinned package; needs the network
	test -x .venv-audit/bin/pip-audit || { $(PYTHON) -m venv .venv-audit && .venv-audit/bin/pip install --quiet pip-audit==$(PIP_AUDIT); }
	for service in pypi osv; do .venv-audit/bin/pip-audit --strict --no-deps --disable-pip --vulnerability-service $$service \
	  --requirement requirements/cpu.lock --requirement requirements/dev.lock || exit 1; done

fuzz: install-dev .venv-ecosystem-fuzz/.installed ## hostile input for every RPC, HTTP route and parser, and hostile clients (SEED=1)
	$(BIN)/pytest -q -m fuzz tests/ecosystem/test_fuzz.py
	$(BIN)/sluice bench fuzz --seed $(SEED)

lint: install-dev ## formatters, linters, types, contracts and generated pages, changing nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tests/lint_waits.py
	$(BIN)/mypy
	$(BIN)/buf lint proto
	$(BIN)/buf breaking proto --against proto/baseline.binpb
	$(BIN)/sluice config docs --output docs/configuration.md --check
	$(BIN)/python docs/write_references.py --check
	for system in trl verl prime-rl areal; do $(BIN)/sluice config docs --system $$system --output docs/coming-from/$$system.md --check || exit 1; done

references: install-dev ## write docs/rpc-reference.md and docs/cli.md from the contracts and the commands
	$(BIN)/python docs/write_references.py

format: install-dev ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# protoc-gen-mypy is found on the path.
PROTOC = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iproto \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(sort $(wildcard proto/sluice/v1/*.proto))

proto: install-dev ## write the stubs in sluice/v1 from proto/
	$(call PROTOC,.)

proto-check: install-dev ## prove that the stubs are fresh
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && $(call PROTOC,"$$fresh") && \
	diff -r --exclude=__pycache__ --exclude=__init__.py "$$fresh/sluice/v1" sluice/v1 && echo "stubs are fresh" || \
	{ echo "sluice/v1 differs from proto/: run 'make proto' and commit the result" >&2; exit 1; }

wheels: install ## build dist/sluice-*.whl, and dist/sluice_client-*.whl, which needs no torch
	rm -rf build sdk/python/build
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist . sdk/python
	rm -rf build sdk/python/build

# The messages of google.rpc, which errors carry, are those of googleapis-common-protos.
GOOGLEAPIS = $(shell $(BIN)/python -c 'import google.rpc; print(*google.rpc.__path__)')

npm-package: install-dev ## build dist/sluice-proto-*.tgz, the contracts for TypeScript
	npm install --prefix sdk/typescript --no-audit --no-fund --loglevel=error
	rm -rf sdk/typescript/gen && mkdir -p sdk/typescript/gen dist
	$(BIN)/python -m grpc_tools.protoc -Iproto -I$(GOOGLEAPIS)/../.. --plugin=sdk/typescript/node_modules/.bin/protoc-gen-es \
		--es_out=sdk/typescript/gen --es_opt=target=js+dts,import_extension=js $(sort $(wildcard proto/sluice/v1/*.proto)) google/rpc/error_details.proto
	cp LICENSE sdk/typescript/  # npm packs no links
	npm pack --silent --pack-destination dist ./sdk/typescript

clean: ## remove the environment and caches; outputs stay
	rm -rf $(VENV) .gpu-wheels .venv-audit .venv-bench .venv-ecosystem-* .debian-ecosystem-* .node-ecosystem build dist sdk/python/*.egg-info sdk/typescript/gen sdk/typescript/node_modules ./*.egg-info .pytest_cache .mypy_cache .ruff_cache
