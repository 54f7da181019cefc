# Every target brings what it needs: a virtual environment in .venv, filled from the pinned files in requirements/.
# Only Python (3.11 or newer, with venv) must be there already. Another one: make demo PYTHON=/path/to/python3.12

VENV := .venv
BIN := $(VENV)/bin

# The two stamps say what .venv holds. They are written last, so an interrupted installation starts afresh.
PINNED := $(VENV)/.pinned
INSTALLED := $(VENV)/.installed

# Run, not just looked up: a version manager may have a name on the PATH that starts nothing.
USABLE := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3; do \
	$$python -c '$(USABLE)' 2>/dev/null && echo $$python && exit; done; echo python3)

# On a terminal pip shows how far it is; in a log its lines would hide the rest.
QUIET := $(shell test -t 2 || echo --quiet)
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install $(QUIET)

# The end-to-end tests start fleets of processes, so more workers than this measure each other.
TEST_WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench bench-optimizer bench-engine vllm clean requirements environment

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: environment ## replay a real trace through a planned fleet on this machine, about three minutes
	@$(BIN)/kvantile demo

test: environment ## run all tests
	@$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: environment ## check style, types, imports, the Dockerfile and what must not be committed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile
	$(BIN)/shellcheck .ci/run
	$(BIN)/python -m tests.support.leaks

bench: environment ## run the benchmarks
	@found=; for spec in benchmarks/bench_*.py; do \
		test -e "$$spec" || continue; found=1; echo "== $$spec"; $(BIN)/python "$$spec" || exit 1; \
	done; test "$$found" || echo "There are no benchmarks yet: nothing was measured."

# For example: make bench-optimizer TRACES=/data/traces ROWS=ambiguity,heldout BENCH_ARGS=--quick
bench-optimizer: environment ## measure what the optimizer is held to; TRACES=FOLDER of the public traces, ROWS=a,b of it
	@$(BIN)/python -m benchmarks.optimizer $(if $(TRACES),--traces "$(TRACES)") $(if $(ROWS),--rows "$(ROWS)") $(BENCH_ARGS)

# For example: make bench-engine TRACES=/data/traces ROWS=recorded
bench-engine: environment ## measure what the engine is held to; TRACES=FOLDER with engine_runs/, ROWS=a,b of it
	@$(BIN)/python -m benchmarks.engine $(if $(TRACES),--traces "$(TRACES)") $(if $(ROWS),--rows "$(ROWS)") $(BENCH_ARGS)

vllm: environment ## make the real vLLM's environment that tests drive, in a cache folder: 9 GB, some minutes, once
	@$(BIN)/python -m tests.support.vllm_environment

clean: ## remove the environment and what tools have cached
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

environment: $(INSTALLED)

$(PINNED): requirements/dev.txt
	@python=$(PYTHON); $$python -c '$(USABLE)' 2>/dev/null || { \
		echo "$$python will not do ($$($$python --version 2>&1)): Kvantile needs Python 3.11 or newer with its venv and" \
			"ensurepip modules. On Debian and Ubuntu: apt install python3 python3-venv." \
			"Or name another: make PYTHON=/path/to/python3.12" >&2; exit 1; }; \
	echo "Making the environment in $(VENV) with $$($$python --version): a minute or two, once." >&2; \
	$$python -m venv --clear $(VENV)
	@$(PIP) --require-hashes --requirement $<
	@touch $@

$(INSTALLED): $(PINNED) pyproject.toml
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

# One version of each package for every supported Python: a plan must not depend on which one solved it.
COMPILE = $(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --fork-strategy fewest \
	--generate-hashes --no-header --no-config $(UPGRADE)
IMAGES := optimizer router engine operator

requirements: environment ## pin what pyproject.toml asks for (with UPGRADE=--upgrade, as new as there is)
	$(PIP) --require-hashes --requirement requirements/compile.txt
	$(COMPILE) --extra local --group build --group test --group lint --output-file requirements/dev.txt
	$(COMPILE) --group build --constraints requirements/dev.txt --output-file requirements/build.txt
	$(COMPILE) --group compile --output-file requirements/compile.txt
	$(BIN)/uv pip compile requirements/vllm.in --quiet --override requirements/vllm-overrides.txt --python-version 3.11 \
		--python-platform x86_64-manylinux_2_28 --generate-hashes --no-header --no-config --no-annotate $(UPGRADE) \
		--output-file requirements/vllm.txt
	for image in $(IMAGES); do \
		$(COMPILE) --extra $$image --constraints requirements/dev.txt --output-file requirements/$$image.txt || exit 1; \
	done
