# make help lists the targets. They need nothing but Python: the first one builds $(VENV).
# To use an environment that exists already, name it; nothing is installed into it: make test VENV=/path/to/venv

PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python

# An environment named by the caller is taken as it is; only our own is built.
ifeq ($(origin VENV),file)
READY := $(VENV)/.installed
endif

export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Modules are compiled when they are first imported, and kept: of what is installed, few ever are.
export PYTHONDONTWRITEBYTECODE =
PIP := $(RUN) -m pip install -q --no-compile

.PHONY: help venv demo demo-ranks test test-all lint typecheck unit unit-all mutations durations bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       GRPO on a small policy next to TRL's own trainer, then drafts on a larger model; tables and plots"
	@echo "                in demo_output/; MODEL=DIR takes that model for the drafts"
	@echo "make demo-ranks the same on two CPU processes: how long they wait for each other"
	@echo "make test       lint, type check, tests"
	@echo "make test-all   the same with the slow tests"
	@echo "make unit       the tests alone"
	@echo "make mutations  break the code in one place at a time and see make test notice (about half an hour)"
	@echo "make durations  write tests/durations.json, by which make test splits its files, on an idle machine"
	@echo "make lint       ruff"
	@echo "make typecheck  mypy"
	@echo "make bench      short benchmarks; results in bench_output/"
	@echo "make venv       install into $(VENV) (the other targets do it when needed)"
	@echo "make clean      remove caches and demo_output/"
	@echo "VENV=DIR uses an existing environment; PYTHON=EXE builds .venv with another interpreter"

venv: $(READY)

# torch first: its wheel is by far the largest, and an index with several builds of it then settles which one.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=EXE")'
	@echo "Building $(VENV) with $$($(PYTHON) --version)"
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch==2.13.0 (the longest step)"
	@$(PIP) torch==2.13.0
	@echo "Installing spec_trl and its dependencies"
	@$(PIP) -e ".[test,dev]" -c constraints.txt
	@touch $@

demo-ranks: $(READY)
	@$(RUN) -m examples.demo.ranks

demo: $(READY)
	@$(RUN) -m examples.demo.run $(if $(filter command line,$(origin MODEL)),--model "$(MODEL)")

test: lint
	@$(MAKE) --no-print-directory -j 2 typecheck unit

test-all: lint
	@$(MAKE) --no-print-directory -j 2 typecheck unit-all

# Two processes of one thread each: most tests are too small for more threads. The longest files of tests/durations.json
# come first, so that both end at about the same time.
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

unit: $(READY)
	$(PYTEST) --durations=25 -m "not slow"

unit-all: $(READY)
	$(PYTEST) --durations=25

durations: $(READY)
	$(PYTEST) --durations=0 -m "not slow" > durations.log || (tail -30 durations.log; false)
	$(RUN) -m tests.durations durations.log

mutations: $(READY)
	$(RUN) -m tests.mutations

lint: $(READY)
	$(RUN) -m ruff check .

typecheck: $(READY)
	$(RUN) -m mypy

bench: $(READY)
	$(RUN) -m benchmarks.rollout --output bench_output/rollout.json
	$(RUN) -m benchmarks.identity --output bench_output/identity.json
	$(RUN) -m benchmarks.end_to_end --steps 6 --repeats 2 --calibration-seconds 5 --output bench_output/end_to_end.json
	$(RUN) -m benchmarks.control_machine --repeats 3 --output bench_output/control_machine.json

clean:
	rm -rf demo_output bench_output durations.log .pytest_cache .ruff_cache .mypy_cache build *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
