# The same work as the command `rollkv`, in an environment of its own. `make help` lists what there is.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
ROLLKV := $(VENV)/bin/rollkv

MODEL ?= smollm2-135m
NAME := $(patsubst %.gguf,%,$(notdir $(patsubst %/,%,$(MODEL))))
OUT ?= bundles/$(NAME)
BUNDLE ?= $(OUT)
PROMPT ?= What is the capital of France?
# What is given reaches the program through the environment: no shell looks at it.
export MODEL OUT BUNDLE PROMPT REFERENCE L CHUNK C
# given,VARIABLE,flag: the flag with its value, if the variable stands on make's command line
given = $(if $(filter command,$(firstword $(origin $1))),$2 "$$$1")

.DEFAULT_GOAL := help
.PHONY: help setup demo export run chat info families verify test test-properties test-real toolchains toolchains-quick check lint format types bench clean

help: ## this list
	@echo 'usage: make TARGET [VARIABLE=value ...]'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1 \2/p' Makefile | while read -r target text; do printf '  %-17s %s\n' "$$target" "$$text"; done

setup: $(VENV)/ready ## make the environment in .venv [PYTHON=python3 TORCH_INDEX=wheel-index]

$(VENV)/ready: pyproject.toml .ci/constraints.txt .ci/install-torch
	@$(PYTHON) -c 'import sys; sys.exit("rollkv needs Python 3.10 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	.ci/install-torch $(VENV)/bin/python .ci/constraints.txt "$(TORCH_INDEX)"
	$(RUN) pip install --quiet -c .ci/constraints.txt -e '.[export,dev]'
	@touch $@

demo: setup ## export SmolLM2-135M-Instruct, answer a prompt in chat form, verify the bundle
	$(ROLLKV) export smollm2-135m -o bundles/smollm2-135m
	$(ROLLKV) info bundles/smollm2-135m
	$(ROLLKV) run bundles/smollm2-135m --chat --prompt 'What is the capital of France?'
	$(ROLLKV) verify bundles/smollm2-135m

export: setup ## write a bundle [MODEL=preset|folder|file.gguf|hub-id L=1216 CHUNK=128 C=1344 OUT=folder ARGS=...]
	$(ROLLKV) export "$$MODEL" -o "$$OUT" $(call given,L,-L) $(call given,CHUNK,-c) $(call given,C,-C) $(ARGS)

run: setup ## answer one prompt [BUNDLE=folder PROMPT=text CHAT=1 ARGS=...]
	@$(ROLLKV) run "$$BUNDLE" --prompt="$$PROMPT" $(if $(CHAT),--chat) $(ARGS)

chat: setup ## talk turn by turn [BUNDLE=folder ARGS=...]
	@$(ROLLKV) chat "$$BUNDLE" $(ARGS)

info: setup ## say what a bundle holds [BUNDLE=folder]
	@$(ROLLKV) info "$$BUNDLE" $(ARGS)

families: setup ## list what can be exported
	@$(ROLLKV) families $(ARGS)

verify: setup ## prove a bundle against transformers [BUNDLE=folder REFERENCE=model ARGS=...]
	$(ROLLKV) verify "$$BUNDLE" $(if $(REFERENCE),--reference "$$REFERENCE") $(ARGS)

test: setup ## run the test suite
	$(RUN) pytest -q -n 2 --dist loadfile

test-properties: setup ## hold 3,600 random sessions against the NumPy reference (about 2 minutes)
	HYPOTHESIS_PROFILE=nightly $(RUN) pytest -q tests/test_properties.py

test-real: setup ## run the tests on SmolLM2-135M and Qwen2.5-Coder-0.5B (downloads 570 MB, takes about 20 minutes)
	$(RUN) pytest -q -m real

toolchains: setup ## try every NPU compiler that is installed on a tiny graph (rollkv toolchain install; about 5 minutes)
	$(RUN) pytest -q -m toolchain tests/test_toolchain_tools.py

toolchains-quick: setup ## the same with QNN's simulator and OpenVINO (about 1 minute)
	$(RUN) pytest -q -m toolchain -k 'qnn or openvino' tests/test_toolchain_tools.py

check: lint types test ## lint, types and tests

lint: setup ## ruff
	$(RUN) ruff check .
	$(RUN) ruff format --check .

format: setup ## ruff, writing
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

types: setup ## mypy
	@mkdir -p .types/rollkv
	@for folder in export models runtime; do ln -sfn ../../$$folder .types/rollkv/$$folder; done
	$(RUN) mypy

bench: setup ## the figures of the README (run it alone on the machine)
	$(RUN) benchmarks.run

clean: ## remove the environment and what tools left; bundles stay
	rm -rf $(VENV) .types .pytest_cache .mypy_cache .ruff_cache *.egg-info build dist
