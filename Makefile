# Two commands on a fresh clone: `make demo` and `make test`. Both create .venv and install what they need.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check soak bench clean

demo: .venv/ready
	$(BIN)/weft demo

test: .venv/ready check
	$(BIN)/pytest -m "not slow" -rs --numprocesses 2 --dist loadgroup

check: .venv/ready
	$(BIN)/ruff check src tests examples
	$(BIN)/ruff format --check src tests examples
	$(BIN)/mypy
	$(BIN)/lint-imports

soak: .venv/ready
	WEFT_SOAK=1 $(BIN)/pytest -m slow --timeout 1200 --numprocesses 2 --dist loadgroup
	WEFT_SOAK=1 $(BIN)/pytest -m "not slow" -k "nccl or sim or every_combination" --timeout 1200 --numprocesses 2 --dist loadgroup

bench: .venv/ready
	$(BIN)/weft bench scan --ranks 4 --json bench-scan.json

# torch first and pinned (constraints.txt says why), then weft and its tools.
.venv/ready: pyproject.toml constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,train,transformers]"
	touch $@

clean:
	rm -rf .venv build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
