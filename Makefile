# make run    from nothing to a report: environment, model, text, one recipe for one accelerator
# make test   the same environment, then the tests (minutes); make test-slow runs those that need real models
# make lint   ruff and mypy
# make docs   the generated pages: compatibility, schemes, schemas

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
FAST   := not slow and not gpu and not multigpu
EXTRAS := dev,hf,vision,sweep,xla,export

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.PHONY: run test test-slow lint docs assets model clean

run: $(READY) model
	$(BIN)/optforge run recipe=llama_fp8 hardware=a100

# A file of tests stays in one process, one thread each; then those that judge times, one by one.
test: $(READY) assets
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 8 --dist loadfile -m "$(FAST) and not alone"
	$(BIN)/python -m pytest -m "$(FAST) and alone"

test-slow: $(READY) assets
	$(BIN)/python -m pytest -m "slow and not gpu and not multigpu"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/python -m optforge.plan.compatibility docs/compatibility.md
	$(BIN)/python -m optforge.schemes
	$(BIN)/python -m optforge.report.schema report > docs/report.schema.json
	$(BIN)/python -m optforge.report.schema plan > docs/plan.schema.json

# What `make run` needs: a language model and a text, pinned by sha256; a failure here is the end.
model: $(READY)
	@$(BIN)/python -m optforge.fetch smollm2 wikipedia

# What the tests use. One that cannot be had is said, and the tests that need it skip by name.
assets: $(READY)
	@for name in smollm2 wikipedia fashion_mnist efficientnet_lite0 photos; do
	    $(BIN)/python -m optforge.fetch $$name || echo "without $$name: its tests will be skipped; to get it: $(BIN)/python -m optforge.fetch $$name"
	done

# Made once; made again when the pinned set or the package's own requirements change.
$(READY): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"OptForge needs Python 3.11 or newer, $(PYTHON) is {v[0]}.{v[1]}; try: make $(MAKECMDGOALS) PYTHON=python3.11")'
	[ -x $(BIN)/python ] || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[$(EXTRAS)]'
	touch $(READY)

clean:
	rm -rf $(VENV) build dist
