PYTHON ?= python3
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# One thread per process: torchrun's default, which it sets with a warning.
export OMP_NUM_THREADS ?= 1

# What cog fills, and what it needs for that.
COG := -I . -p "from tools.pages.fences import essential, faulty, fence, line_numbers, table, tree" \
  README.md docs/*.md docs/*/*.md

SHELL_FILES := $(filter-out slurm/site.sh,$(wildcard slurm/*.sbatch slurm/*.sh slurm/sites/*.sh slurm/schedulers/*.sh .ci/*))

help:
	@sed -n 's/^\([a-z]*\):.*##/make \1 \t/p' Makefile

run: .venv/run  ## train with every stage in turn
	python -m tools.chain.run

test: .venv/dev  ## run the tests; without Slurm installed, its tests are skipped, and say so
	pytest $(PYTEST_ARGS)

check: .venv/run  ## judge a script of yours: make check STAGE=multigpu FILE=my_multigpu.py
	@python -m tools.judge.check $(STAGE) '$(FILE)' $(if $(TASK),--task '$(TASK)') $(if $(WATCH),--watch)

learn: .venv/run  ## exercises in the terminal, judged at each save
	@python -m tools.learn

long: .venv/dev  ## run the tests that take long: each faulty file judged, kills at random, memory
	pytest -m long

lint: .venv/dev  ## check the style
	ruff check .
	ruff format --check .
	for file in $(SHELL_FILES); do bash -n $$file || exit 1; done
	@if command -v shellcheck >/dev/null; then echo shellcheck $(SHELL_FILES); shellcheck $(SHELL_FILES); \
	else echo 'shellcheck is missing and left out: sudo apt-get install shellcheck'; fi

docs: pages  ## refresh the diffs in README and the pages, check them, and build the site into site/
	PYTHONPATH=. zensical build --strict --clean
	mkdir -p site/assets
	cp packages/rankcheck/src/rankcheck/watch/watch.* site/assets
	python -m tools.pages.moved

pages: .venv/dev
	cog -r -P --verbosity=1 $(COG)
	python -m tools.pages.next_links
	python -m tools.pages.check_docs

# For people who change the series: see CONTRIBUTING.md.
cascade: .venv/dev
	python -m tools.chain.cascade $(FROM)

recipe: .venv/dev
	python -m tools.chain.recipe $(NAME) $(BASE)

torch: .venv/bin/python
	python -m tools.chain.torch_version $(VERSION)

chaos: .venv/run  ## inject faults into a training on three nodes: make chaos FAULTS=20 SEED=1
	python -m tests.faults.chaos $(FAULTS) $(if $(SEED),--seed $(SEED)) $(if $(filter local,$(DISKS)),--local-disks)

bench: .venv/run  ## compare the speed of the stages with raw DDP
	torchrun --standalone --nproc_per_node=2 -m bench.epoch_time $(BENCH_ARGS)

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo '$(PYTHON) is not Python 3.11 or newer: name one, as in: make run PYTHON=python3.12'; exit 1; }
	@$(PYTHON) -m venv .venv || \
	  { rm -rf .venv; echo 'could not make .venv: install venv (on Debian and Ubuntu: python3-venv)'; exit 1; }

# The package that starts and observes ranks, from its folder here.
.venv/rankcheck: packages/rankcheck/pyproject.toml | .venv/bin/python
	python -m pip install --disable-pip-version-check --no-deps -e packages/rankcheck
	@touch $@

.venv/run: requirements.txt constraints.txt | .venv/rankcheck
	python -m pip install --disable-pip-version-check -r requirements.txt -c constraints.txt
	@touch $@

.venv/dev: requirements/dev.txt requirements.txt constraints.txt | .venv/rankcheck
	python -m pip install --disable-pip-version-check -r requirements/dev.txt -c constraints.txt
	@touch $@

# An environment of its own, whose packages want others than are pinned: the schema of
# slurm/aws-cluster.yaml.
.venv/aws: requirements/aws.txt | .venv/bin/python
	python -m venv $@
	$@/bin/python -m pip install --disable-pip-version-check -r requirements/aws.txt
	@touch $@

# How constraints.txt comes to be: the newest of everything that the oldest Python can run and whose
# authors have not withdrawn it, but for torch, which stays, for builds and for CUDA's packages.
pins: | .venv/bin/python
	@python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	  { echo 'make pins: the oldest supported Python, 3.11, must be in .venv'; exit 1; }
	grep ^torch== constraints.txt > .venv/torch
	python -m pip install --dry-run --ignore-installed --only-binary :all: --python-version 3.11 \
	  --target .venv/none -r requirements/dev.txt -c .venv/torch > .venv/pins
	sed -n 's/^Would install //p' .venv/pins | tr ' ' '\n' | sed -e '/^nvidia\|^cuda\|^triton/d' \
	  -e 's/+.*//' -e 's/-\([^-]*\)$$/==\1/' | sort -f > constraints.txt

.PHONY: pages pins recipe help run test check learn long docs lint cascade bench chaos torch
