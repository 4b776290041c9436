# Everything runs in .venv, which the first target that needs it makes. Nothing but make and Python is required.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# A process on each core: more threads of OpenBLAS only wait for each other.
export OPENBLAS_NUM_THREADS ?= 1
# An environment that uv made has none.
NEEDS_PIP = $(RUN) -m pip --version >/dev/null 2>&1 || $(RUN) -m ensurepip >/dev/null

.PHONY: help demo test check docs dashboards bench accuracy accuracy-ranks clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    diagnose the captures of a real vLLM in examples"
	@echo "make test    run the tests"
	@echo "make check   ruff, mypy and the import contracts"
	@echo "make docs    write the generated pages in docs/"
	@echo "make dashboards write the dashboards for Grafana"
	@echo "make accuracy play labelled worlds, score the diagnosis, write docs/accuracy.md (some hours)"
	@echo "make accuracy-ranks the same for worlds of ranks, docs/accuracy-ranks.md (an hour)"
	@echo "make bench   measure speed and memory on synthetic traces"
	@echo "make clean   remove .venv and caches"
	@echo "PYTHON=python3.12 chooses the interpreter for a new .venv (3.11 or newer)."

demo: $(VENV)/installed
	@$(VENV)/bin/tailscope demo

test: $(VENV)/installed-dev
	$(VENV)/bin/pytest -ra -n 2 --dist worksteal

check: $(VENV)/installed-dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

docs: $(VENV)/installed
	$(RUN) -m tailscope.render.reference

dashboards: $(VENV)/installed-dev
	$(RUN) -m tailscope.grafana

bench: $(VENV)/installed-dev
	$(RUN) tests/benchmarks/run.py

accuracy: $(VENV)/installed-dev
	$(RUN) tests/accuracy/suite.py

accuracy-ranks: $(VENV)/installed-dev
	$(RUN) tests/accuracy/ranks.py

clean:
	rm -rf $(VENV) build dist tailscope.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# An install is editable, so only pyproject.toml can make it stale.
$(VENV)/installed: pyproject.toml $(VENV)/pyvenv.cfg
	@echo "installing tailscope into $(VENV)"
	@$(NEEDS_PIP)
	@$(RUN) -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/installed-dev: pyproject.toml $(VENV)/pyvenv.cfg
	@echo "installing tailscope and what its tests need into $(VENV)"
	@$(NEEDS_PIP)
	@$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	@touch $(VENV)/installed $@

$(VENV)/pyvenv.cfg:
	@command -v "$(PYTHON)" >/dev/null || { \
		echo "tailscope needs Python 3.11 or newer, and there is no '$(PYTHON)'." \
			"Install it, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "tailscope needs Python 3.11 or newer; '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1)." \
			"Name another one, for example: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "'$(PYTHON)' cannot make virtual environments: its venv module is missing." \
			"On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "making $(VENV) with $$("$(PYTHON)" --version)"
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
