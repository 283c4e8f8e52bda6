# `make train` and `make test` set up everything they need on a machine with Python 3.12, make, git and a C++ compiler.
# Set PYTHON to choose the interpreter, ARGS to pass arguments on: `make train ARGS="--steps 100"`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
BIN := .venv/bin
LATEST := .venv-latest/bin
WITH_HOSTS := .venv-hosts/bin
OLDEST := .venv-oldest/bin
OLDEST_JAX := .venv-oldest-jax/bin
INSTALL := pip install --quiet --disable-pip-version-check --retries 10
# The parts of JAX's CUDA plugin that compile for a GPU that is not present. They are outside the environment, because
# JAX would look for a driver there.
GPU_COMPILER := jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-nvvm
# Hosts that need other versions of some packages than the tests: their files are read or imported without these.
HOSTS := verl==0.9.1 torchtitan==0.3.0 spmd_types==0.2.3 megatron-core==0.19.2 liger-kernel==0.8.5
HOSTS += google-tunix==0.1.7 maxtext==0.2.5 marin-levanter==0.2.227.dev40316220070 equinox==0.13.8
# What the files that the tests import need beside the packages of `dev` and `hosts`. The rest of these hosts is not
# imported.
OF_JAX_HOSTS := jaxtyping==0.3.11 wadler-lindig==0.1.8 typeguard==2.13.3 einops==0.8.2
OF_JAX_HOSTS += clu==0.0.12 google-metrax==0.2.4 ml_collections==1.1.0 perfetto==0.59.1 qwix==0.1.8 sentencepiece==0.2.3
OF_JAX_HOSTS += antlr4-python3-runtime==4.13.2 aqtp==0.9.0 drjax==0.2.1 einshape==1.0 fastapi==0.165.0
OF_JAX_HOSTS += immutabledict==4.3.1 omegaconf==2.4.0 opentelemetry-api==1.45.2 pathwaysutils==0.1.13 starlette==1.10.0
OF_JAX_HOSTS += tiktoken==0.14.0 tokamax==0.0.12 uvicorn==0.54.0 wrapt==2.5.2 braceexpand==0.1.7
# Python keeps its compiled files even where the environment forbids it: without them pytest rewrites every test file.
TEST_ENV := JAX_PLATFORMS=cpu OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
WORKERS ?= 2
# constraints-oldest.txt also has versions for Python 3.11: `make test-oldest-torch OLDEST_PYTHON=3.11`.
OLDEST_PYTHON ?= 3.10
# The packages that run with Python 3.10. JAX 0.11 needs Python 3.12, so other tests cannot run there.
OLDEST_TESTS := $(wildcard tests/test_core_triton_*.py) $(patsubst %,tests/test_%.py,cases math reference rounding spec)
# The packages that run with JAX and without PyTorch. What the files *_compile.py import needs PyTorch.
OLDEST_JAX_TESTS := $(filter-out %_compile.py,$(wildcard tests/test_jax_pallas_*.py tests/test_flax_*.py))
OLDEST_JAX_TESTS += $(patsubst %,tests/test_%.py,cases examples hosts_jax math spec)
ARGS ?=

# $(call find_python,3.12): python3.12 on PATH may be a shim that does not run, so each candidate is run.
define find_python
for candidate in "$${PYTHON:-}" python$(1) python3 python python3.13 \
    "$$(pyenv root 2>/dev/null)"/versions/$(1)*/bin/python "$$HOME"/.pyenv/versions/$(1)*/bin/python; do \
  [ -n "$$candidate" ] && \
    "$$candidate" -c 'import sys, venv, ensurepip; sys.exit("%d.%d" % sys.version_info[:2] != "$(1)")' \
    >/dev/null 2>&1 && echo "$$candidate" && exit 0; \
done; echo "no Python $(1) that runs was found; set PYTHON=/path/to/python$(1)" >&2; exit 1
endef

.PHONY: help train test test-slow test-latest test-oldest test-oldest-torch test-oldest-jax test-hosts test-mutations
.PHONY: lint format docs parity clean

help:
	@echo "make train        set up, then train the tiny language model on the standard library's sources"
	@echo "make test         set up, then run the quick CPU tests (8 to 16 minutes of CPU time)"
	@echo "make test-slow    the cases that make test leaves out and that need no GPU"
	@echo "make test-latest  the quick CPU tests with the newest torch, triton, jax and NumPy"
	@echo "make test-hosts   the tests of the adapters with the released packages of their hosts"
	@echo "make test-oldest  the quick CPU tests with the oldest versions: test-oldest-torch and test-oldest-jax"
	@echo "make test-oldest-torch  those of core_triton with the oldest Python, torch, triton and NumPy"
	@echo "make test-oldest-jax    those of jax_pallas and flax_models with the oldest JAX, flax, optax and others"
	@echo "make test-mutations  break the code in some 700 places, one at a time: the quick tests must notice each"
	@echo "make parity       run the parity table on this machine"
	@echo "make lint         ruff and pyright;  make format: let ruff rewrite"
	@echo "make docs         set up, then build the documentation site in build/site; a broken link is an error"

.venv/bin/python:
	@python=$$($(call find_python,3.12)); echo "setting up .venv with $$("$$python" --version)"; "$$python" -m venv .venv

.venv/.train: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing what training needs (about a minute)"
	@$(BIN)/$(INSTALL) --constraint constraints.txt --editable ".[flax]"
	@touch $@

.venv/.dev: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing what the tests need (two minutes and 6 GB: PyTorch comes with its CUDA libraries)"
	@$(BIN)/$(INSTALL) --constraint constraints.txt --editable ".[dev]"
	@$(BIN)/$(INSTALL) --constraint constraints.txt --no-deps --upgrade --target .venv/gpu-compiler $(GPU_COMPILER)
	@touch $@ .venv/.train

.venv-latest/.dev: pyproject.toml .venv/bin/python
	@python=$$($(call find_python,3.12)); rm -rf .venv-latest; "$$python" -m venv .venv-latest
	@$(LATEST)/$(INSTALL) --upgrade --editable ".[dev]"
	@version=$$($(LATEST)/python -c 'import jax; print(jax.__version__)'); $(LATEST)/$(INSTALL) --no-deps \
	  --target .venv-latest/gpu-compiler jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version nvidia-cuda-nvcc nvidia-nvvm
	@touch $@

.venv-hosts/.hosts: pyproject.toml constraints.txt .venv/bin/python
	@python=$$($(call find_python,3.12)); rm -rf .venv-hosts; "$$python" -m venv .venv-hosts
	@$(WITH_HOSTS)/$(INSTALL) --constraint constraints.txt --editable ".[dev,hosts]"
	@DS_BUILD_OPS=0 $(WITH_HOSTS)/$(INSTALL) --constraint constraints.txt deepspeed
	@$(WITH_HOSTS)/$(INSTALL) --no-deps $(HOSTS) $(OF_JAX_HOSTS)
	@touch $@

.venv-oldest/.dev-$(OLDEST_PYTHON): pyproject.toml constraints-oldest.txt
	@python=$$($(call find_python,$(OLDEST_PYTHON))); rm -rf .venv-oldest; "$$python" -m venv .venv-oldest
	@$(OLDEST)/$(INSTALL) --constraint constraints-oldest.txt --editable ".[torch,test]"
	@touch $@

.venv-oldest-jax/.dev: pyproject.toml constraints-oldest-jax.txt
	@python=$$($(call find_python,3.12)); rm -rf .venv-oldest-jax; "$$python" -m venv .venv-oldest-jax
	@$(OLDEST_JAX)/$(INSTALL) --constraint constraints-oldest-jax.txt --editable ".[flax,test]" flatbuffers
	@$(OLDEST_JAX)/$(INSTALL) --constraint constraints-oldest-jax.txt --no-deps --target .venv-oldest-jax/gpu-compiler \
	  $(GPU_COMPILER)
	@touch $@

.venv-docs/.docs: pyproject.toml constraints.txt
	@python=$$($(call find_python,3.12)); "$$python" -m venv .venv-docs
	@.venv-docs/bin/$(INSTALL) --constraint constraints.txt --editable ".[docs]"
	@touch $@

train: .venv/.train
	@$(BIN)/python -m flax_models.train $(ARGS)

test: .venv/.dev
	@$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not gpu" $(ARGS)

test-slow: .venv/.dev
	@$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist load -m "slow and not gpu" $(ARGS)

test-latest: .venv-latest/.dev
	@$(LATEST)/python -m pip list 2>/dev/null | grep -E \
	  '^(torch|triton|jax|jaxlib|numpy|flax|optax|orbax-checkpoint|grain|transformers|tokenizers|peft) '
	@$(TEST_ENV) $(LATEST)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not gpu" $(ARGS)

test-hosts: .venv-hosts/.hosts
	@$(TEST_ENV) $(WITH_HOSTS)/python -m pytest tests/test_hosts_*.py tests/test_pages.py -k hosts -n $(WORKERS) --dist load \
	  -m "not gpu" $(ARGS)

test-oldest: test-oldest-torch test-oldest-jax

test-oldest-torch: .venv-oldest/.dev-$(OLDEST_PYTHON)
	@$(OLDEST)/python -m pip list 2>/dev/null | grep -E '^(torch|triton|numpy) '
	@$(TEST_ENV) $(OLDEST)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not gpu" $(ARGS) $(OLDEST_TESTS)

test-oldest-jax: .venv-oldest-jax/.dev
	@$(OLDEST_JAX)/python -m pip list 2>/dev/null | grep -E '^(jax|jaxlib|numpy|flax|optax|orbax-checkpoint|grain) '
	@$(TEST_ENV) $(OLDEST_JAX)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not gpu" $(ARGS) \
	  $(OLDEST_JAX_TESTS)

test-mutations: .venv/.dev
	@$(BIN)/python tests/mutations.py $(ARGS)

docs: .venv-docs/.docs
	@PATH=.venv-docs/bin:$$PATH NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet
	@echo "build/site/index.html"

parity: .venv/.dev
	@$(BIN)/python -m parity $(ARGS)

lint: .venv/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

format: .venv/.dev
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean:
	rm -rf .venv .venv-latest .venv-oldest .venv-oldest-jax .venv-docs .venv-hosts
	rm -rf build *.egg-info .pytest_cache .ruff_cache .hypothesis
