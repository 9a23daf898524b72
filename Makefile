# The virtual environment is made from the lock file; `make demo` and `make test` need nothing but Python and pip.
PYTHON ?= python3
BIN := .venv/bin

# Tests start dozens of processes; without bytecode on disk each would compile all of torch's Python again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo gallery test suite gpu emulated golden lint format docs benchmarks lock clean

demo: .venv/.stamp-demo
	$(BIN)/python examples/demo.py

# Runs the examples of the gallery, and writes their pages.
gallery: .venv/.stamp-demo
	$(BIN)/python examples/gallery

# Lint and docs take one core: with `make -j3 test` they run beside the tests.
test: lint docs suite

suite: .venv/.stamp
	$(BIN)/python -m pytest -n 2 --dist worksteal

# What needs a CUDA device: the facts of it are noted, and then the tests that are marked so have to pass.
gpu: .venv/.stamp
	$(BIN)/python benchmarks/gpu/main.py facts regions
	$(BIN)/python -m pytest -m gpu

# The same without a device: on one that tests/emulator builds, and that finds what two streams do in no order. With
# what is marked run suites that name no device: it is torch's default one for them.
EMULATED := tests/emulator tests/measuring tests/optimizing tests/pipeline tests/planning tests/policies tests/regions tests/stages tests/stores tests/test_ambient.py

emulated: .venv/.stamp
	PYTHONPATH=tests $(BIN)/python -m emulator
	TORCHREMAT_DEFAULT_DEVICE=cuda EMULATOR_DEVICES=4 OMP_NUM_THREADS=1 PYTHONPATH=tests \
		$(BIN)/python -m pytest -p emulator.plugin -n 2 --dist worksteal $(EMULATED)

# The plans that tests/planning/test_golden.py compares, written anew: where another plan is meant.
golden: .venv/.stamp
	OMP_NUM_THREADS=1 PYTHONPATH=examples:tests $(BIN)/python tests/planning/test_golden.py

lint: .venv/.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright --project .
	$(BIN)/towncrier build --draft --version next > /dev/null

format: .venv/.stamp
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: .venv/.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # not quietly: warnings would not count

benchmarks: .venv/.stamp
	set -e; for main in $(wildcard benchmarks/*/main.py); do echo "== $$main"; $(BIN)/python $$main; done

# Resolve the newest versions that pyproject.toml allows. The local tag of a torch build names the build that happened
# to be installed, so it is cut off.
lock: .venv/.stamp
	$(BIN)/pip-compile --quiet --all-extras --strip-extras --unsafe-package pip --no-emit-options --no-header \
		--no-annotate --output-file requirements.lock pyproject.toml
	sed -i.bak -E -e 's|^(torch==[0-9.]+)\+[a-z0-9]+|\1|' -e '/^# The following packages|^# pip$$|^$$/d' requirements.lock
	rm requirements.lock.bak

# What the demo needs is half of everything.
.venv/.stamp-demo: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint requirements.lock hatchling
	$(BIN)/python -m pip install --quiet --no-compile --constraint requirements.lock --no-build-isolation \
		--editable '.[cli,plot]'
	touch $@

.venv/.stamp: .venv/.stamp-demo
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	touch $@

clean:
	rm -rf .venv build dist out site
