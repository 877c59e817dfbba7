# Two commands on a bare machine with Python >= 3.11: `make demo` and `make test`. Each sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= out
DEMO_ENGINE ?= $(OUT)/smollm2.engine
PROMPT ?= What is a watermill? Answer in two sentences.

.PHONY: demo test test-gpu verify performance lint clean

demo: $(VENV)/.core
	$(BIN)/modelmill pull smollm2 -o $(OUT)/models
	test -e $(DEMO_ENGINE) || $(BIN)/modelmill build $(OUT)/models/SmolLM2-135M-Instruct.Q4_1.gguf -o $(DEMO_ENGINE) --dtype bfloat16 -q int8
	$(BIN)/modelmill run $(DEMO_ENGINE) --prompt "$(PROMPT)" --temperature 0 --max-tokens 120

test: $(VENV)/.test lint
	$(BIN)/python -m pytest

lint: $(VENV)/.test
	$(BIN)/ruff check modelmill tests benchmarks tools
	$(BIN)/ruff format --check modelmill tests benchmarks tools
	$(BIN)/mypy

# every test that needs a CUDA device; on the device's own Python and torch
test-gpu:
	$(PYTHON) -m pytest -m gpu -q -p no:cacheprovider $$(grep -rlE 'mark\.gpu' tests --include='test_*.py')

# everything the engine promises that needs no GPU, on the real model; resumable; writes docs/verification.md
verify: $(VENV)/.test
	$(BIN)/python -m tools.verify

# docs/performance.md and its plots from benchmarks/results and docs/performance.story.md; after new rows or new text
performance: $(VENV)/.test
	$(BIN)/python -m tools.performance

$(VENV)/bin/python:
	$(PYTHON) tools/setup_venv.py create $(VENV)

$(VENV)/.core: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python tools/setup_venv.py install $(VENV)
	@touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python tools/setup_venv.py install $(VENV) test,eval,report,serve
	@touch $@ $(VENV)/.core

clean:
	rm -rf $(OUT) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
