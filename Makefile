# make train: from a bare checkout to a GPT that trains with BitPipe. Needs Python 3.11 or newer with its headers,
# and g++; no root. Apart from pip's cache nothing is written outside this directory.

PYTHON ?= python3
VENV ?= .venv
RANKS ?=
CONFIG ?=
# The script and the data that the configuration is for: BERT's are called bert_*.json.
model := $(if $(findstring bert,$(notdir $(CONFIG))),bert,gpt)
# A port that nobody listens at: the launcher's own default may be another job's.
PORT ?= $(shell $(bin)/python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
PYTEST_FLAGS ?=
# Processes that run tests at the same time; each has up to eight ranks.
TEST_WORKERS ?= 2

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup data docs train test test-all test-rdma test-hosts test-gpu test-sanitizers fuzz attack wheel release check clean

bin := $(abspath $(VENV))/bin
stamp := $(VENV)/.ds_ext-installed
gpt_corpus := data/stdlib/meta.json
bert_corpus := data/stdlib_bert/meta.json
corpus := $($(model)_corpus)
native := $(wildcard kernels/*/*.cpp kernels/*/*.hpp)
native_tests := $(wildcard tests/native/*.cpp)
workers := -n $(TEST_WORKERS) --dist worksteal
spelled := $(wildcard *.py *.md Makefile ds_ext benchmarks tests kernels configs docs examples)

# The launcher, ninja and the ranks are looked up in PATH; whatever is compiled at run time stays in the environment.
export PATH := $(bin):$(PATH)
export TORCH_EXTENSIONS_DIR ?= $(abspath $(VENV))/torch_extensions
export PYRIGHT_PYTHON_CACHE_DIR ?= $(abspath $(VENV))/pyright

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 17

setup: $(stamp)  ## virtual environment, pinned dependencies, native build

# torch comes first and alone, so that an installed or locally preferred build of the pinned version is kept.
$(stamp): setup.py pyproject.toml constraints.txt $(native)
	@command -v g++ >/dev/null || { echo "g++ is missing: install it (Debian, Ubuntu: apt install g++)" >&2; exit 1; }
	@if [ ! -x $(bin)/python ]; then \
	  for python in $(PYTHON) python3.14 python3.13 python3.12 python3.11; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	  done; \
	  [ -n "$${found:-}" ] || { echo "Python 3.11 or newer is missing; if it is not in PATH: make PYTHON=/path/to/python3" >&2; exit 1; }; \
	  $$found -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' || \
	    { echo "The C headers of $$found are missing: install them (Debian, Ubuntu: apt install python3-dev)" >&2; exit 1; }; \
	  $$found -m venv $(VENV) || \
	    { rm -rf $(VENV); echo "$$found cannot make virtual environments (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }; \
	fi
	@echo "Installing torch, DeepSpeed and the tools into $(VENV) and building ds_ext: one to five minutes, 1.5 GB."
	@$(bin)/python -m pip install -qq --disable-pip-version-check -c constraints.txt torch numpy
	@$(bin)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[data,solve,dev]'
	@touch $@

data: $(corpus)  ## the text that `make train` trains on: Python's own sources, no download

$(bert_corpus): tokenizer := wordpiece
$(gpt_corpus): tokenizer := bpe
$(gpt_corpus) $(bert_corpus): $(stamp)
	@echo "Preparing Python's own sources as training text in $(@D): about 15 seconds."
	@$(bin)/python -m ds_ext prepare --source stdlib --tokenizer-type $(tokenizer) --output $(@D)

# As many ranks as GPUs or cores, at most 4. Hosts with fewer GPUs than ranks train on the CPU, one thread per rank.
train: $(stamp) $(corpus)  ## train a GPT, then compare 2 x 12 steps with 1f1b; CONFIG=configs/bert_bitpipe.json RANKS=4 PORT=...
	@exec $(bin)/python -m benchmarks.first_run $(CONFIG) $(if $(RANKS),--ranks $(RANKS)) --port $(PORT)

test: $(stamp)  ## the whole test suite; PYTEST_FLAGS="-m 'not slow'" for a quick one
	$(bin)/python -m pytest $(workers) $(PYTEST_FLAGS)

test-all: $(stamp)  ## the tests with the whole matrices, some hours: schedule x precision x ZeRO x parallelism x recomputation
	DS_EXT_TEST_ALL=1 $(bin)/python -m pytest $(workers) $(PYTEST_FLAGS)

test-rdma: $(stamp)  ## RDMA over real verbs, in guests emulated by qemu; skipped with the reason where none can be started
	DS_EXT_TEST_RDMA=1 $(bin)/python -m pytest -rs tests/rdma $(PYTEST_FLAGS)

test-hosts: $(stamp)  ## launches and failures over several hosts, made of namespaces with sshd; needs root, sshd and pdsh
	DS_EXT_TEST_HOSTS=1 $(bin)/python -m pytest -rs $(workers) tests/hosts $(PYTEST_FLAGS)

test-gpu: $(stamp)  ## tests and benchmarks on one GPU, 25 minutes; writes build/gpu_report.md; without a GPU: nothing
	$(bin)/python -m tests.gpu

wheel: $(stamp)  ## sdist and manylinux wheel in dist/, installed and tested in an empty environment without a compiler
	rm -rf dist build/wheel
	$(bin)/python -m build -q --outdir build/wheel .
	$(bin)/python -m auditwheel repair -w dist build/wheel/*.whl
	mv build/wheel/*.tar.gz dist
	PYTHON=$(bin)/python tests/wheel.sh dist/*.whl

release: $(stamp)  ## tests the wheel in fresh environments and tags the version; refuses a tree with changes
	PYTHON=$(bin)/python .ci/release

# The thread sanitizer sees one process only, so both ends of a link are threads there; gcc has no libFuzzer.
sanitized := build/sanitizers
sanitize = g++ -std=c++17 -O1 -g -Wall -Wextra -Ikernels/transport -pthread
FUZZ_SECONDS ?= 20

test-sanitizers: $(stamp)  ## native code under the address, undefined and thread sanitizers, and fuzzers: FUZZ_SECONDS=60
	mkdir -p $(sanitized)
	$(sanitize) -fsanitize=thread -Wno-tsan tests/native/links.cpp -o $(sanitized)/links_thread
	$(sanitize) -fsanitize=address,undefined -fno-sanitize-recover=all tests/native/links.cpp -o $(sanitized)/links_address
	$(sanitize) -fsanitize=address,undefined -fno-sanitize-recover=all tests/native/fuzz.cpp -o $(sanitized)/fuzz
	TSAN_OPTIONS=halt_on_error=1 timeout 600 $(sanitized)/links_thread 1000
	timeout 600 $(sanitized)/links_address 2000
	ASAN_OPTIONS=allocator_may_return_null=1 $(sanitized)/fuzz $(FUZZ_SECONDS)
	$(bin)/python -m tests.native.fuzz_handshake $(FUZZ_SECONDS)
	CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -g" $(bin)/python setup.py -q build_ext \
	  --build-lib $(sanitized)/module --build-temp $(sanitized)/objects
	DS_EXT_NATIVE_DIR=$(sanitized)/module ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  $(bin)/python -m pytest -p tests.native.sanitized $(PYTEST_FLAGS) -k "not leaves_nothing and not refused_memory and not runs_out" \
	  $(addprefix tests/unit/comm/test_,$(addsuffix .py,descriptor shm tcp tcp_thread peers))

FUZZ_MINUTES ?= 30

fuzz: $(stamp)  ## random models and jobs, whose numbers are compared with one process; FUZZ_MINUTES=30
	$(bin)/python -m tests.fuzz --minutes $(FUZZ_MINUTES)

ATTACK_MINUTES ?= 60
ATTACK_FLAGS ?=

attack: $(stamp)  ## kills and broken folders at random moments of small jobs; ATTACK_MINUTES=60 ATTACK_FLAGS=--hosts
	$(bin)/python -m tests.attack --minutes $(ATTACK_MINUTES) $(ATTACK_FLAGS)

docs: $(stamp)  ## the documentation as a site in build/docs; fails for a broken link or anchor
	NO_MKDOCS_2_WARNING=1 $(bin)/python -m mkdocs build --strict -d build/docs

check: $(stamp)  ## formatting, lint, types, spelling and wording
	$(bin)/ruff format --check .
	$(bin)/ruff check .
	$(bin)/pyright
	$(bin)/clang-format --dry-run -Werror $(native) $(native_tests)
	$(bin)/codespell $(spelled)
	$(bin)/python -m tests.prose

clean:  ## remove what was built, but not the virtual environment, data or checkpoints
	rm -rf build *.egg-info .pytest_cache .ruff_cache .hypothesis ds_ext/comm/_native.*.so $(stamp)
	find ds_ext benchmarks tests -name __pycache__ -prune -exec rm -rf {} +
