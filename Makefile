# make demo    fine-tune a small real model with and without tunecompile, and write reports/demo/report.html
# make test    what needs no GPU, where its time goes is in reports/tests.json; make test-all has the slow cases, too, and sends every case of a pass through the whole backend
# make lint    ruff and pyright; make format mends what they can mend by themselves
# make docs    the pages of docs/ and all docstrings as a site, reports/docs/index.html
# make test-versions  the golden table and quick tests with the oldest, the tested and the newest versions, as one table; ARGS=newest: these alone
# make test-hosts HOST=lightning  the doors of tunecompile/trainers in the real package of a host (tests/hosts/), in an environment of its own
# make test-gpu, make wheel, make clean
#
# Both make their own .venv on the first call. On a machine that has torch and the rest already (a GPU image without
# a network): make demo NO_VENV=1, which installs nothing and uses $(PYTHON) as it is.
# A CPU-only machine may save the CUDA download: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
SYSTEMS ?= eager,tunecompile
OUT ?= reports/demo
ARGS ?=
HOSTS := $(basename $(notdir $(wildcard tests/hosts/*.txt)))
HOST ?= $(HOSTS)

PIP_FLAGS := --disable-pip-version-check -q --no-compile

ifdef NO_VENV
PY := $(PYTHON)
READY := links
DEMO := links
SPREAD :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
DEMO := $(VENV)/.demo
SPREAD := -n auto --maxprocesses 4 --dist worksteal
endif

.PHONY: all demo docs format lint test test-all test-gpu test-hosts test-versions wheel clean links
all: test

# torch first and alone: with it in place, pip never looks for another build of it.
define environment
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install $(PIP_FLAGS) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $$(grep '^torch==' $<)
	$(@D)/bin/python -m pip install $(PIP_FLAGS) -c $< -e '.[all]'
	touch $@
endef

# Bytecode by all cores: pip compiles with one, 40 s. (Some packages have files that are no Python of this version.)
define tools
	$(@D)/bin/python -m pip install $(PIP_FLAGS) -c $(1) -e '.[all,test,lint]'
	$(@D)/bin/python -m compileall -qq -j 0 $(@D)/lib || true
	touch $@
endef

# What the demo needs, in half the time.
$(VENV)/.demo: constraints.txt pyproject.toml
	$(environment)

$(VENV)/.ready: $(VENV)/.demo
	$(call tools,constraints.txt)

.PRECIOUS: .venv-%/.demo
.venv-%/.demo: constraints-%.txt pyproject.toml
	$(environment)

.venv-%/.ready: .venv-%/.demo
	$(call tools,constraints-$*.txt)

# A host's own versions go before those of the tests' environment, which has the rest: no host brings a torch of its own.
.venv-host-%/.ready: tests/hosts/%.txt pyproject.toml $(READY)
	$(PY) -m venv $(@D)
	$(PY) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth
	$(@D)/bin/python -m pip install $(PIP_FLAGS) --no-deps -r $<
	$(@D)/bin/python -m pip install $(PIP_FLAGS) --no-deps -e .
	touch $@

# What an installation does by its package mapping, done by two links that git ignores.
links:
	ln -sfn ../passes tunecompile/passes
	ln -sfn ../templates tunecompile/templates

demo: $(DEMO)
	PYTHONDONTWRITEBYTECODE= $(PY) -m tunecompile demo --data benchmarks/data/wordnet.jsonl --systems $(SYSTEMS) --out $(OUT) $(ARGS)

test: $(READY)
	$(if $(SPREAD),OMP_NUM_THREADS=1) $(PY) -m pytest -m "not gpu and not slow" --durations-to reports/tests.json $(SPREAD) $(ARGS)

test-all: $(READY)
	$(if $(SPREAD),OMP_NUM_THREADS=1) $(PY) -m pytest -m "not gpu" --durations-to reports/tests.json $(SPREAD) $(ARGS)

test-gpu: $(READY)
	$(PY) -m pytest -m gpu $(ARGS)

lint: $(READY)
	$(PY) -m ruff check -q .
	$(PY) -m ruff format -q --check .
	$(PY) -m pyright --level error --pythonpath $(PY)

format: $(READY)
	$(PY) -m ruff check -q --fix .
	$(PY) -m ruff format -q .

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build -q --strict -f docs/mkdocs.yml -d ../reports/docs

test-hosts: $(HOST:%=.venv-host-%/.ready)
	$(foreach host,$(HOST),OMP_NUM_THREADS=1 .venv-host-$(host)/bin/python -m pytest tests/hosts/test_$(host).py $(ARGS) &&) true

test-versions: $(READY) $(patsubst %,.venv-%/.ready,$(filter oldest newest,$(or $(ARGS),oldest newest)))
	$(PY) -m tests._torch.versions $(ARGS)

wheel: $(READY)
	$(PY) -m pip wheel $(PIP_FLAGS) --no-deps -w dist .

clean:
	rm -rf $(VENV) .venv-* build dist reports .pytest_cache *.egg-info tunecompile/passes tunecompile/templates
