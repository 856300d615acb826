# Everything below builds what it needs in .venv first; python 3.11 or newer, pip and make suffice.
# With TORCH=2.11.0, it does so with that version of PyTorch in .venv-2.11.0.
PYTHON ?= python3
VENV := .venv$(if $(TORCH),-$(TORCH))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OLDEST_TORCH := 2.11.0

# Each process takes one half of the files, in order, and then what the other has left: what a
# module's tests share is made once. With PART=3/20, that part of `make thorough` as well.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal $(if $(PART),--part $(PART))

.PHONY: train test thorough check docs bench fuzz gpu soak journey gallery conformance clean
.DELETE_ON_ERROR:

train: $(READY)  ## train a small model on the standard library's source, on this machine
	$(BIN)/shardwise train configs/stdlib.toml

test: $(READY)  ## every property once (tests/README.md); TESTS=tests/tensor for some of them
	$(PYTEST) $(if $(PART),-m "thorough or not thorough") $(TESTS)

thorough: $(READY)  ## the combinations and examples that `make test` leaves out; PART=3/20 for some of them
	$(PYTEST) -m "thorough or hypothesis" --hypothesis-profile thorough
	$(if $(PART),,$(BIN)/python -m tests.journey)
	$(if $(PART)$(TORCH),,$(MAKE) test TORCH=$(OLDEST_TORCH) TESTS="tests/tensor tests/runtime")

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(READY)  ## the documentation site, in build/site; a link that leads nowhere is an error
	$(BIN)/python -m docs.build.site

bench: $(READY)  ## compare with DDP, FSDP1 and FSDP2, interleaved in one run
	$(BIN)/shardwise bench

fuzz: $(READY)  ## random models and programs against one process, until one differs
	$(BIN)/python -m tests.fuzz

gpu: $(READY)  ## what a GPU has to show, in less than nine minutes; DEVICE=cpu or simulated without one
	$(BIN)/python -m tests.gpu $(if $(DEVICE),--device $(DEVICE))

soak: $(READY)  ## kill training runs and replicas again and again, and look at what is left
	$(BIN)/python -m tests.soak
	$(BIN)/python -m tests.replicas.soak

journey: $(READY)  ## from a bare environment and the wheel to a trained model that transformers generates with
	$(BIN)/python -m tests.journey

gallery: $(READY)  ## draw the pictures of docs; those of report.md and plan.md in Chromium
	$(BIN)/python -m docs.build.pictures
	$(BIN)/python -m tests.report.gallery

conformance: $(READY)  ## PyTorch's own FSDP tests; CONFORMANCE=DIR has their runner, run.py
	@test -f "$(CONFORMANCE)/run.py" || { echo "pass CONFORMANCE=DIR, where DIR/run.py runs them"; exit 2; }
	for set in fsdp1 fsdp2 dcp; do \
	  $(BIN)/python $(CONFORMANCE)/run.py --impl shardwise.fsdp --set $$set --ceiling-only --failures; \
	done

clean:  ## runs/ stays: it is yours
	rm -rf .venv .venv-* build dist .hypothesis .*_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[docs,plot,test]'
	touch $@
