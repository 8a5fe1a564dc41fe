# make pretrain    train the small model on text that every machine has;
#                  options of train/pretrain.py: make pretrain ARGS='--method compact'
# make test        the test suite; a part: make test ARGS=tests/linear
# make test-all    all that there is: slow cases too of tests that `make test` runs
#                  other cases of, which is twice as long
# make test-fast   all but the slow tests
# make test-gpu    the tests for a GPU, which `make test` runs too where there is one
# make lint        style; `make format` repairs what can be repaired
#
# Each makes the virtual environment that it needs. JAX=jax==0.11.2 takes that version
# of jax, in an environment of its own.
JAX ?=
VENV ?= .venv$(addprefix -,$(subst ==,-,$(JAX)))
JOBS ?= 2
ARGS ?=

# jax's CUDA plugin, which jaxcompact.memory compiles with, needs no more of CUDA than
# that. Without a GPU jax would complain that the rest is missing.
ifeq ($(shell nvidia-smi -L 2>/dev/null),)
export JAX_SKIP_CUDA_CONSTRAINTS_CHECK ?= 1
endif

PYTHON := $(VENV)/bin/python
PYTEST := $(PYTHON) -m pytest -n $(JOBS) --dist worksteal --durations=10 --durations-min=10

.PHONY: pretrain test test-all test-fast test-gpu lint format

pretrain: venv-train
	$(PYTHON) train/pretrain.py $(ARGS)

test: venv-dev
	$(PYTEST) $(ARGS)
	@if nvidia-smi -L >/dev/null 2>&1; then $(MAKE) test-gpu; fi

test-all: venv-dev
	$(PYTEST) --all-cases $(ARGS)

test-fast: venv-dev
	$(PYTEST) -m "not slow" $(ARGS)

# pytest's status 5: no test was chosen, since ARGS named none for a GPU.
test-gpu: venv-dev
	JAXCOMPACT_TEST_GPU=1 $(PYTHON) -m pytest -m gpu $(ARGS) || [ $$? -eq 5 ]

lint: venv-dev
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check

format: venv-dev
	$(PYTHON) -m ruff check --fix
	$(PYTHON) -m ruff format

venv-%:
	@tools/venv $(VENV) $* $(JAX)
