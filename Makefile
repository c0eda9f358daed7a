# make        set up once, then run the demo
# make test   lint, types and all tests
# make docs   the guide, the results and the API reference as HTML, in build/docs
# make docs-serve   the same, shown at http://localhost:8000
# make bench  the recurrences against other libraries
# make mutants  deliberate errors in samples of the source: do the tests notice? (an hour; see CONTRIBUTING.md)

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo setup test lint types docs docs-serve bench mutants clean

demo: setup
	$(BIN)/statetrack demo

setup: $(READY)

# Everything is installed with constraints.txt: without it pip installs the CUDA build of torch (several GB). torch
# comes first, so that its pin is in place before the requirements of other packages are resolved.
$(READY): pyproject.toml constraints.txt setup.py $(wildcard src/statetrack/ops/native/*.[ch]*)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q

lint: setup
	$(BIN)/ruff check src tests examples tools
	$(BIN)/ruff format --check --quiet src tests examples tools

types: setup
	$(BIN)/basedpyright --level error

docs: setup
	$(BIN)/python tools/build_docs.py build/docs

docs-serve: docs
	$(BIN)/python -m http.server --directory build/docs --bind 127.0.0.1 8000

bench: setup
	$(BIN)/statetrack bench

mutants: setup
	for part in tasks experiments report/results.py report/summary.py report/records.py training layers; do \
	  $(BIN)/python tools/mutate.py src/statetrack/$$part --sample 150 --results mutants.jsonl || exit 1; done

clean:
	rm -rf .venv build src/*.egg-info src/statetrack/ops/native/*.so
