# Two commands on a bare machine with Python >= 3.11: `make demo` and `make test`. Each sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= out
DEMO_ENGINE ?= $(OUT)/smollm2.engine
PROMPT ?= What is a watermill? Answer in two sentences.

.PHONY: bench demo demo-sam quantization-page test test-all test-computing test-models test-building test-families test-waiting test-rest test-versions test-gpu test-triton test-ray test-browser clean-room verify conformance performance kernels devices command-line families chat-formats parser-differences llama-cpp-tests request-fields site lint format clean

demo: $(VENV)/.core
	@$(BIN)/modelmill pull smollm2 -o $(OUT)/models
	@test -e $(DEMO_ENGINE) || $(BIN)/modelmill build $(OUT)/models/SmolLM2-135M-Instruct.Q4_1.gguf -o $(DEMO_ENGINE) --dtype bfloat16 -q int8 --quiet
	@printf '> %s\n' "$(PROMPT)"
	@$(BIN)/modelmill run $(DEMO_ENGINE) --prompt "$(PROMPT)" --temperature 0 --max-tokens 120
	@printf '%s\n' 'Go on with:' \
	  '  $(BIN)/modelmill chat $(DEMO_ENGINE)' \
	  '  source $(BIN)/activate    # puts modelmill on the PATH of this shell, then: modelmill --help'

# WEIGHTS: mobile_sam.pt, sam_vit_b/l/h .pth or .safetensors; IMAGE: a photo; POINT: x,y in it, without it everything
SAM_ENGINE = $(OUT)/$(basename $(notdir $(WEIGHTS))).engine
demo-sam: $(VENV)/.core
	@test -n "$(WEIGHTS)" -a -f "$(WEIGHTS)" || { echo "demo-sam: no weights at '$(WEIGHTS)': take mobile_sam.pt (39 MB) from https://github.com/ChaoningZhang/MobileSAM/tree/master/weights or sam_vit_*.pth from https://github.com/facebookresearch/segment-anything#model-checkpoints, then: make demo-sam WEIGHTS=mobile_sam.pt IMAGE=photo.jpg"; exit 1; }
	@test -n "$(IMAGE)" -a -f "$(IMAGE)" || { echo "demo-sam: no picture at '$(IMAGE)': make demo-sam WEIGHTS=$(WEIGHTS) IMAGE=photo.jpg [POINT=x,y]"; exit 1; }
	test -e $(SAM_ENGINE) || $(BIN)/modelmill build $(WEIGHTS) -o $(SAM_ENGINE)
	$(BIN)/modelmill segment $(SAM_ENGINE) $(IMAGE) $(if $(POINT),--point $(POINT),--everything --points-per-side 16) -o $(OUT)/segmented.png

# what has a part of its own beside the rest: kernels; what makes engines; what mostly starts processes and waits for them.
# In make test-all test-computing, which compiles kernels for every GPU generation, and test-models, which plants faults into
# every family, are the longest; tests/text is beside the builds, since the rest of make test ended a minute after them
COMPUTING := tests/ops
MODELS := tests/models
BUILDING := tests/accept tests/builder tests/checkpoint tests/quant tests/weights tests/loader tests/nn tests/text
WAITING := tests/serve tests/trust tests/export tests/tools tests/browser
# a selection that sees a fault of every op, route and check within minutes, in five parts side by side, since most
# tests keep one core busy, and the linters beside them, while tests wait for processes; grep passes whole lines on
test: $(VENV)/.test
	$(MAKE) --no-print-directory -j6 test-computing test-models test-building test-waiting test-rest lint QUICK=--quick

# every test that runs on a machine without a GPU (contains those of make test)
test-all: $(VENV)/.test
	$(MAKE) --no-print-directory -j6 test-computing test-models test-building test-waiting test-rest lint

# without compiled files, each of the processes that tests start would compile the package
unexport PYTHONDONTWRITEBYTECODE
PYTEST_RUN = $(BIN)/python -m pytest $(QUICK) $(PYTEST)
test-computing test-models test-building test-waiting test-rest: SHELL := bash
test-computing test-models test-building test-waiting test-rest: .SHELLFLAGS := -o pipefail -c
test-computing: $(VENV)/.test
	$(PYTEST_RUN) $(COMPUTING) 2>&1 | grep --line-buffered ''

test-models: $(VENV)/.test
	$(PYTEST_RUN) $(MODELS) 2>&1 | grep --line-buffered ''

test-building: $(VENV)/.test
	$(PYTEST_RUN) $(BUILDING) 2>&1 | grep --line-buffered ''

# what make test-all leaves to it (EXHAUSTIVE_ONLY): families in every recipe, with every planted fault: about an hour
test-families: $(VENV)/.test
	$(PYTEST_RUN) --exhaustive tests/models/test_dense_families.py $(wildcard tests/models/test_*_faults.py) tests/builder/test_config_only.py

test-waiting: $(VENV)/.test
	$(PYTEST_RUN) $(WAITING) 2>&1 | grep --line-buffered ''

test-rest: $(VENV)/.test
	$(PYTEST_RUN) tests $(patsubst %,--ignore=%,$(COMPUTING) $(MODELS) $(BUILDING) $(WAITING)) 2>&1 | grep --line-buffered ''

NATIVE = $(foreach suffix,cpp cu cuh h c,$(shell find modelmill tests benchmarks -name "*.$(suffix)"))
lint: $(VENV)/.test
	$(BIN)/ruff check modelmill tests benchmarks tools examples
	$(BIN)/ruff format --check modelmill tests benchmarks tools examples
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)

format: $(VENV)/.test
	$(BIN)/ruff format modelmill tests benchmarks tools examples
	$(BIN)/clang-format -i $(NATIVE)

# the oldest and the newest version of every range in pyproject.toml, on every Python that is here; resumable
test-versions: $(VENV)/.test
	$(BIN)/python tools/version_matrix.py $(if $(PYTHONS),--python $(PYTHONS)) $(if $(PINS),--pin $(PINS)) $(if $(PAGE),--write $(PAGE))

# every test that needs a CUDA device; on the device's own Python and torch
test-gpu:
	$(PYTHON) -m pytest -m gpu -q -p no:cacheprovider $$(grep -rlE 'mark\.gpu' tests --include='test_*.py')

# an exported engine in a real Triton Inference Server (the one in the wheel nvidia-pytriton), in a .venv of its own
test-triton: .venv-triton/.ready
	.venv-triton/bin/python -m pytest -m triton tests/export

.venv-triton/.ready: pyproject.toml constraints.txt tests/export/requirements.txt
	$(PYTHON) tools/setup_venv.py create .venv-triton
	.venv-triton/bin/python tools/setup_venv.py install .venv-triton test
	.venv-triton/bin/python -m pip install -q --no-deps -r tests/export/requirements.txt
	@touch $@

# wheel and sdist in new environments outside the checkout: demo, server, page, first compilation, and without a compiler;
# several GB in /tmp and about ten minutes for each Python
clean-room:
	$(PYTHON) tools/clean_room.py $(if $(PYTHONS),--python $(PYTHONS)) $(if $(CHECKPOINT),--checkpoint $(CHECKPOINT))

# two replicas behind Ray Serve on this machine, under load, while one is killed; in a .venv of its own
test-ray: .venv-ray/.ready
	.venv-ray/bin/python -m pytest -m ray tests/serve

.venv-ray/.ready: pyproject.toml constraints.txt
	$(PYTHON) tools/setup_venv.py create .venv-ray
	.venv-ray/bin/python tools/setup_venv.py install .venv-ray test,serve,ray
	@touch $@

# the page in Debian's chromium (apt-get install chromium); screenshots go to out/browser
test-browser: $(VENV)/.test
	$(BIN)/python tools/setup_venv.py install $(VENV) test,eval,report,serve,browser
	$(BIN)/python -m pytest -m browser tests/browser

# everything the engine promises that needs no GPU, on the real model; resumable; writes docs/verification.md
verify: $(VENV)/.test
	$(BIN)/python -m tools.verify

# other people's suites against a served SmolLM2 on the CPU, in a .venv of their own; resumable; writes docs/conformance.md
conformance: .venv-conformance/.ready
	.venv-conformance/bin/python -m tools.conformance

.venv-conformance/.ready: pyproject.toml constraints.txt tools/conformance/requirements.txt
	$(PYTHON) tools/setup_venv.py create .venv-conformance
	.venv-conformance/bin/python tools/setup_venv.py install .venv-conformance eval,serve,conformance
	.venv-conformance/bin/python -m pip install -q --no-deps -r tools/conformance/requirements.txt
	@touch $@

# speed on this machine beside every peer that is installed, in turn: picks what fits, prints a table with ratios and floor,
# appends rows to benchmarks/results/DEVICE.jsonl; resumable. BENCH=--plan says what would run, BENCH='--minutes 60' takes
# longer than 5 minutes on a CPU; a peer in another Python:
# BENCH='--vllm-python PYTHON' or BENCH='--llamacpp-python PYTHON'
bench: $(VENV)/.test
	$(BIN)/python benchmarks/suite.py $(BENCH)

# docs/performance.md and its plots from benchmarks/results and tools/performance/page.template.md, docs/notes/README.md from
# the notes; after new rows, text or notes. It measures nothing: docs/reproduce.md has the commands that do
performance: $(VENV)/.test
	$(BIN)/python -m tools.performance
	$(BIN)/python -m tools.readme_chart

# docs/quantization.md and its plots from benchmarks/results and tools/quantization.template.md; after new rows or new text.
# It measures nothing: benchmarks/quantization.py and benchmarks/quantization_texts.py do
quantization-page: $(VENV)/.test
	$(BIN)/python -m tools.quantization

# docs/cli: a page for each command, from its help
command-line: $(VENV)/.test
	$(BIN)/python -m tools.command_line_pages

# the table of docs/chat-formats.md
chat-formats: $(VENV)/.test
	$(BIN)/python -m tools.chat_formats.page

# docs/parser_differences.md, from tools/peer_parsers/results.json
parser-differences: $(VENV)/.test
	$(BIN)/python -m tools.peer_parsers.page

# docs/llama_cpp_tests.md, from tools/peer_server_tests/results.json
llama-cpp-tests: $(VENV)/.test
	$(BIN)/python -m tools.peer_server_tests.page

# docs/families.md, the table of supported families
families: $(VENV)/.test
	$(BIN)/python -m tools.families_page

# docs/request-fields.md, the fields of requests that are accepted and change nothing
request-fields: $(VENV)/.test
	$(BIN)/python -m tools.request_fields_page

# the site of docs/, in out/site, in a .venv of its own; `make site SERVE=1` shows it at http://127.0.0.1:8000
site: .venv-docs/.ready
	.venv-docs/bin/python -m mkdocs $(if $(SERVE),serve,build --strict -d $(OUT)/site)

.venv-docs/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install -q -c constraints.txt 'mkdocs-material>=9.6,<9.9' 'mkdocstrings[python]>=1.0,<1.1'
	@touch $@

# docs/kernels.md from the heads of the kernel files and benchmarks/results; after a new kernel, head or row
kernels: $(VENV)/.test
	$(BIN)/python -m tools.kernels_page

# docs/devices.md: which kernels a GPU gets, from their own code
devices: $(VENV)/.test
	$(BIN)/python -m tools.devices_page

$(VENV)/bin/python:
	@$(PYTHON) tools/setup_venv.py create $(VENV)

$(VENV)/.core: $(VENV)/bin/python pyproject.toml constraints.txt
	@$(BIN)/python tools/setup_venv.py install $(VENV)
	@touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml constraints.txt
	@$(BIN)/python tools/setup_venv.py install $(VENV) test,eval,report,serve
	@touch $@ $(VENV)/.core

clean:
	rm -rf $(OUT) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
