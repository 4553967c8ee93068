# Each target sets up what it needs; only python3 (>= 3.11), git and make are taken for granted.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RUN    := .venv-run
PROTOS := .venv-protos
PICTURES := .venv-pictures
BINARY := .venv-binary
KREW   := .venv-krew
RAY    := .venv-ray
DIST   := dist
# Tests start the agent many times: without compiled files each start takes half a second longer.
unexport PYTHONDONTWRITEBYTECODE
CHECKED := npu_agent protos tests bench docs packaging
# Tests with targets of their own: they build programs and start containers.
NEED_ROOT := --ignore=tests/conformance --ignore=tests/e2e --ignore=tests/k8s --ignore=tests/packaging
# In CI what fails is run once more, alone, and named (tests/again.py).
PYTEST := $(BIN)/python -m $(if $(CI),tests.again,pytest)
RELEASES := 1.36.3 1.35.4 1.34.4 1.30.14
PACKAGES := binutils chromium debootstrap fish locales patchelf prometheus prometheus-alertmanager systemd zsh

.DEFAULT_GOAL := help
.PHONY: help python check mutants fuzz demo packages test test-pythons newcomer lint format protos protos-check manifests docs recording pictures lock image binary krew wheel chart packaging ray k8s conformance e2e e2e-long e2e-releases chaos bench cluster clean

help: ## this list
	@awk -F ':.*## ' '/^##@ /{print "\n" substr($$0, 5)} /^[a-z0-9-]+:.*## /{printf "  %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.DEFAULT:
	@echo "npu-agent: there is nothing that makes $@: \`make help\` lists the targets" >&2; exit 1

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
		|| { echo "npu-agent needs Python >= 3.11, and $(PYTHON) is older or missing: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "npu-agent needs the venv module, which $(PYTHON) lacks: apt install python3-venv" >&2; exit 1; }
	@test -w . \
		|| { echo "npu-agent makes its environment in $(CURDIR), which you cannot write: clone it to where you can" >&2; exit 1; }

$(VENV)/ready: requirements/dev.txt pyproject.toml | python
	@echo "npu-agent: making an environment with the tools of development in $(VENV): a minute, the first time only"
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# What running needs and nothing else. Not compiled: 900 modules of it are never loaded.
$(RUN)/ready: requirements/run.txt | python
	@echo "npu-agent: making an environment with what it needs in $(RUN), the first time only"
	@$(PYTHON) -m venv --clear $(RUN)
	@$(RUN)/bin/python -m pip install --disable-pip-version-check --no-compile --require-hashes \
		-r requirements/run.txt
	@$(RUN)/bin/python docs/runbook.py
	@printf '#!%s\nimport sys\n\nsys.path.insert(0, "%s")\nfrom npu_agent.cli.main import main\n\nsys.exit(main())\n' \
		'$(CURDIR)/$(RUN)/bin/python' '$(CURDIR)' > $(RUN)/bin/npu-agent
	@chmod +x $(RUN)/bin/npu-agent
	@touch $@

##@ Try it

demo: $(RUN)/ready ## the whole agent on simulated cards with stand-ins for kubelet and API server (ARGS=--once ends after the tour)
	@$(RUN)/bin/npu-agent demo $(ARGS)

##@ Set up

packages: ## install from Debian what some tests need: a browser, Prometheus, shells, systemd (root)
	@dpkg -s $(PACKAGES) >/dev/null 2>&1 || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
		apt-get install -y -qq --no-install-recommends $(PACKAGES) >/dev/null; }

##@ Change it

check: ## format, lint, types and tests of one file, in seconds (FILE=npu_agent/core/pool.py; none: the changed ones)
	@if [ -z "$(FILE)$$(git status --porcelain)" ]; then \
		echo "make check: nothing differs from the last commit: FILE=... names a file"; \
	else $(MAKE) --no-print-directory $(VENV)/ready && $(BIN)/python -m tests.check $(FILE); fi

test: $(VENV)/ready ## unit and scenario tests, no root, no cluster
	$(PYTEST) -n2 $(NEED_ROOT) $(ARGS)

test-pythons: $(VENV)/ready ## the same on every supported Python that is installed, at the same time
	$(BIN)/python tests/pythons.py $(NEED_ROOT) $(ARGS)

newcomer: $(VENV)/ready ## README's two commands in a clean Debian 13, as a user without root and without kubectl (root, make packages; ARGS=bookworm for Debian 12)
	$(BIN)/python -m tests.newcomer $(ARGS)

lint: $(VENV)/ready protos-check ## ruff, mypy, layers of the packages, plain words, statements per room, generated code
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/mypy
	$(BIN)/mypy packaging/sbom.py packaging/entry.py packaging/hatch.py packaging/provenance.py
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.words
	$(BIN)/python -m tests.budgets

format: $(VENV)/ready ## format the code, and fix what ruff can fix
	$(BIN)/ruff format $(CHECKED)
	$(BIN)/ruff check --fix $(CHECKED)

##@ Files made from others

$(PROTOS)/ready: requirements/protos.txt
	$(PYTHON) -m venv --clear $(PROTOS)
	$(PROTOS)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/protos.txt
	@touch $@

protos: $(PROTOS)/ready ## generate npu_agent/kubelet/wire from protos/
	PATH=$(CURDIR)/$(PROTOS)/bin:$$PATH $(PROTOS)/bin/python protos/generate.py npu_agent/kubelet/wire

protos-check: $(PROTOS)/ready ## check that npu_agent/kubelet/wire is what protos/ generates
	@PATH=$(CURDIR)/$(PROTOS)/bin:$$PATH $(PROTOS)/bin/python protos/generate.py --check npu_agent/kubelet/wire

manifests: $(VENV)/ready ## rewrite k8s/npu-agent.yaml and the chart's copies (builds kubectl the first time)
	$(BIN)/python -m tests.k8s.manifests

docs: $(VENV)/ready ## rewrite the parts of docs/ that are derived from the code
	$(BIN)/python -B docs/generate.py

recording: $(VENV)/ready ## record the tour of make demo again, for the READMEs (half a minute)
	$(BIN)/python -m docs.record

$(PICTURES)/ready: $(VENV)/ready requirements/pictures.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		--upgrade --target $(PICTURES) -r requirements/pictures.txt
	@touch $@

pictures: $(PICTURES)/ready ## take those of the status page, and draw a dashboard from a real Prometheus (three minutes; make packages)
	$(BIN)/python -m docs.images.make
	PYTHONPATH=$(PICTURES) $(BIN)/python -m docs.images.dashboards

lock: $(VENV)/ready ## rewrite requirements/*.txt from pyproject.toml (UPGRADE=--upgrade for newer versions)
	sh requirements/lock.sh $(BIN)/uv $(UPGRADE)

##@ Build it

image: ## the container image by buildah, podman or docker (TOOL, BASE, IMAGE, SOURCE, FLAGS: docs/packaging.md)
	@TOOL='$(TOOL)' BASE='$(BASE)' IMAGE='$(IMAGE)' SOURCE='$(SOURCE)' FLAGS='$(FLAGS)' sh packaging/image.sh

$(BINARY)/ready: requirements/run.txt requirements/binary.txt
	$(PYTHON) -m venv --clear $(BINARY)
	$(BINARY)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		-r requirements/run.txt -r requirements/binary.txt
	@touch $@

binary: $(BINARY)/ready ## dist/npu-agent: the agent as one file, for hosts without Python
	sh packaging/binary.sh $(BINARY)/bin/python

$(KREW)/ready: requirements/kubectl.txt requirements/binary.txt
	$(PYTHON) -m venv --clear $(KREW)
	$(KREW)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		-r requirements/kubectl.txt -r requirements/binary.txt
	@touch $@

krew: $(KREW)/ready ## dist/furiosa-npu.yaml and its archive: `kubectl furiosa-npu` by krew (RELEASE: docs/packaging.md)
	@RELEASE='$(RELEASE)' sh packaging/krew.sh $(KREW)/bin/python $(DIST)

wheel: $(VENV)/ready ## dist/*.whl, its source archive and SBOM, for pipx and `uv tool install`
	@sh packaging/wheel.sh $(BIN) $(DIST)

chart: ## dist/npu-agent-VERSION.tgz, the Helm chart (HELM, SOURCE: docs/packaging.md)
	@HELM='$(HELM)' SOURCE='$(SOURCE)' sh packaging/chart.sh $(DIST)

packaging: $(VENV)/ready ## build image and binary and run them in containers (root, Debian; about 4 minutes, then seconds)
	$(PYTEST) tests/packaging $(ARGS)

##@ Test it on real kubelets, and measure it

# Its versions are Ray's own: an environment apart from the tools of development.
$(RAY)/ready: requirements/ray.txt | python
	$(PYTHON) -m venv --clear $(RAY)
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/ray.txt
	@touch $@

ray: $(VENV)/ready $(RAY)/ready ## what the real Ray makes of a container's environment (a minute; the first run installs Ray)
	NPU_AGENT_RAY=$(CURDIR)/$(RAY) $(PYTEST) -n0 tests/ray $(ARGS)

mutants: $(VENV)/ready ## put 200 random faults into copies and print those that no test notices (about an hour; ARGS="--count 20 npu_agent/core")
	$(BIN)/python -m tests.mutants $(ARGS)

fuzz: $(VENV)/ready ## broken input for all that reads what others write, 10 s each (SECONDS=60 ARGS="-k config"); what fails is kept
	FUZZ_SECONDS=$(or $(SECONDS),10) $(BIN)/pytest -q tests/fuzz $(ARGS)

k8s: $(VENV)/ready ## check k8s/ with kustomize, Helm, schemas, linters and OPA (the first run builds them, about 10 minutes)
	$(PYTEST) tests/k8s $(ARGS)

conformance: $(VENV)/ready ## judge our DRA driver, and an example of others (the first run builds it and Kubernetes, about 10 minutes)
	$(PYTEST) -n2 tests/conformance $(ARGS)

# Clusters at the same time, three of them: tests/e2e/conftest.py.
e2e: $(VENV)/ready ## scenarios on a real Kubernetes with real kubelets (root; the first run builds it, about 16 minutes)
	$(BIN)/python -m tests.cluster build
	$(PYTEST) tests/e2e -n3 $(ARGS)

e2e-long: $(VENV)/ready ## the scenarios that take many minutes, with what they measure (root)
	$(BIN)/python -m tests.cluster build
	$(PYTEST) tests/e2e tests/test_lasting.py -m long -rP $(ARGS)
	$(MAKE) e2e-releases

e2e-releases: $(VENV)/ready ## the main road and claims on older releases, control plane and kubelet (root; about 40 minutes more to build them)
	for release in $(RELEASES); do NPU_AGENT_KUBERNETES=$$release \
		$(PYTEST) -n0 tests/e2e/test_main_road.py tests/e2e/dra $(ARGS) || exit 1; done

cluster: $(VENV)/ready ## start a one-node Kubernetes for manual tests (root)
	$(BIN)/python -m tests.cluster up

chaos: $(VENV)/ready ## run the fault-injection tests on a running agent (root; 15 minutes; ARGS=--short for those of CI)
	$(BIN)/python -m tests.chaos $(ARGS)

bench: $(VENV)/ready ## measure on this machine, and write the figures into docs/benchmarks.md and the READMEs (5 minutes; ARGS="--against REV" compares two commits)
	$(BIN)/python -m bench $(ARGS)

##@ Tidy up

clean: ## remove what the targets made in this folder
	rm -rf $(VENV) $(RUN) $(PROTOS) $(PICTURES) $(BINARY) $(RAY) dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
