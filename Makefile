# What a newcomer guesses. PYTHON may name another interpreter.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: demo test lint bench prove-1 prove-2 prove-3 prove-images prove-properties clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[test]'
	touch $@

demo: $(VENV)/.installed ## the whole loop on this machine
	$(BIN)/forge-server demo

test: $(VENV)/.installed ## every test that fits into CI
	$(BIN)/python -m pytest

lint: $(VENV)/.installed ## style, types, import arrows
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed ## the figures of docs/benchmarks.md
	$(BIN)/python -m benchmarks

prove-1: $(VENV)/.installed ## five demo seeds, the control, and the long kills (hours)
	$(BIN)/python -m tests.prove.seeds
	$(BIN)/python -m tests.prove.kills

prove-2: $(VENV)/.installed ## every installed harness in record and in splice mode and in trouble, and requests nobody should send
	$(BIN)/python -m tests.prove.harnesses
	$(BIN)/python -m tests.prove.harnesses --plain --reasoning
	$(BIN)/python -m tests.prove.harness_faults
	$(BIN)/python -m tests.prove.fuzz

prove-3: $(VENV)/.installed ## the table of faults, 200 real pods, the demo and the images of the Dockerfile on a real Kubernetes cluster (two hours; wants buildah)
	$(BIN)/python -m tests.prove.kubernetes_faults
	$(BIN)/python -m tests.prove.kubernetes_pods
	$(BIN)/python -m tests.prove.cluster
	$(BIN)/python -m tests.prove.dockerfile

prove-images: $(VENV)/.installed ## pictures through a real vLLM with a tiny vision model (minutes; wants torchvision)
	$(BIN)/python -m tests.prove.images

prove-properties: $(VENV)/.installed ## every property on a thousand new examples (an hour; `test` draws the same ones every time)
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile=search

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis forge-demo
