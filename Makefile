# `make demo` and `make test` are all a fresh machine needs: python3, make, git and a C compiler; `make test-all` needs Chromium, too.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# tests run side by side, one thread each
WORKERS ?= 2
ONE := OMP_NUM_THREADS=1
export PATH := $(abspath $(BIN)):$(PATH)
export TOKENIZERS_PARALLELISM := false
export HF_HUB_DISABLE_PROGRESS_BARS := 1
# threads that wait without spinning: with one of two cores busy, an edit by the tiny model took 0.56 s in place of 0.81
export OMP_WAIT_POLICY := passive

.PHONY: demo test test-all browser places screenshots check install clean breakages faults kills bench-cache bench-cpu bench-gpu bench-modes

install: $(VENV)/.ready

$(VENV)/.ready: settings.ini setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e ".[dev]"
	touch $@

demo: $(VENV)/.ready ## precompute, train and predict on the embedded model and real photographs
	$(BIN)/python -m qie_nb.cli demo --out demo_out

test: $(VENV)/.ready ## everyday suite: notebooks, pytest (the notebooks of the places among it) without what is marked slow
	$(ONE) $(BIN)/nbdev_test --n_workers $(WORKERS)
	$(ONE) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow"
	@echo "left out, run by make test-all: the browser (JupyterLab in Chromium), read-only and full disks (they are mounted, as root), what is marked slow (1 MP parity, the demo's figures, the breakages)"

test-all: $(VENV)/.ready ## everything; needs Chromium, and root for the mounts
	$(BIN)/python tests/end_to_end/browser/lab.py
	$(ONE) $(BIN)/nbdev_test --n_workers $(WORKERS) --flags slow
	$(ONE) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not browser"
	$(MAKE) browser

BROWSERS := w8 w7
browser: $(BROWSERS:%=$(VENV)-%/.ready) ## the notebooks in JupyterLab and Chromium, with ipywidgets 8.1 and 7.7.1
	for w in $(BROWSERS); do QIE_NB_BROWSER=$$w $(VENV)-$$w/bin/python -m pytest tests/end_to_end/test_browser.py || exit 1; done

# an environment with one JupyterLab and its ipywidgets in front of what is installed in $(VENV)
$(VENV)-%/.ready: tests/end_to_end/browser/%.txt $(VENV)/.ready
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install -q -r $<
	$(BIN)/python -c "import sysconfig as s; print('import site; site.addsitedir(%r)' % s.get_path('purelib'))" > "$$($(VENV)-$*/bin/python -c "import sysconfig as s; print(s.get_path('purelib'))")/main.pth"
	touch $@

# Kaggle's and Colab's own versions, as they come, and the wheels that the install cell is given there; PLACE_PYTHON=python3.12 for the places' own
PLACES := kaggle colab
PLACE_PYTHON ?= $(PYTHON)
places: $(PLACES:%=$(VENV)-%/.ready) $(VENV)-wheels/.ready ## the Kaggle notebooks and much of the suite with each place's library versions, in imitations of the places; 13 GB
	$(ONE) QIE_NB_KAGGLE_PYTHON=$(abspath $(VENV))-kaggle/bin/python QIE_NB_COLAB_PYTHON=$(abspath $(VENV))-colab/bin/python QIE_NB_WHEELS=$(abspath $(VENV))-wheels $(BIN)/python -m pytest tests/end_to_end/test_kaggle.py

$(VENV)-%/.ready: constraints/%.txt $(VENV)/.ready
	$(PLACE_PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install -q --no-cache-dir -r $< pytest
	touch $@

$(VENV)-wheels/.ready: settings.ini
	mkdir -p $(@D)
	$(PLACE_PYTHON) -m pip download -q --no-deps -d $(@D) optimum-quanto ninja bitsandbytes
	touch $@

screenshots: $(VENV)-w8/.ready ## README's images of the widgets, taken anew
	$(VENV)-w8/bin/python tests/end_to_end/browser/screenshots.py docs

check: $(VENV)/.ready ## before a commit: export and clean leave git unchanged, then the everyday suite
	$(BIN)/nbdev_export
	$(BIN)/nbdev_clean
	$(BIN)/nbdev_clean --fname kaggle
	git diff --exit-code
	$(MAKE) test

breakages: $(VENV)/.ready ## break the code on purpose, one way at a time, and see a test fail
	$(BIN)/python -m pytest -s tests/breakages/test_code_breakages.py tests/breakages/test_cache_breakages.py

faults: $(VENV)/.ready ## kills, flipped bits, full disks, crowds: all trials, about 20 minutes; as root, or without the disks' cases
	OMP_NUM_THREADS=1 $(BIN)/python tests/cache_fault_trials.py --full --out benchmarks/results/faults.json

kills: $(VENV)/.ready ## runs killed, interrupted and ended by signals, two processes too: all trials, about half an hour
	OMP_NUM_THREADS=1 $(BIN)/python tests/crash_trials.py --full --out benchmarks/results/kills.json

bench-cache: $(VENV)/.ready ## what the cache costs, measured on this machine: benchmarks/results/cache.json and a table
	$(BIN)/python benchmarks/cache.py

bench-cpu: $(VENV)/.ready ## what a training step and precompute do beyond a bare loop: counts and paired times, benchmarks/results/step_cpu.json, precompute.json
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/step_cpu.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/precompute.py
	$(BIN)/python benchmarks/table.py --write

bench-modes: $(VENV)/.ready ## uncached, lazy and precomputed training side by side; ARGS=--full on a GPU
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/modes.py $(ARGS)
	$(BIN)/python benchmarks/table.py --write

bench-gpu: $(VENV)/.ready ## on a GPU, full size with random weights: its floor, the bare loop, every mode; again where time ran out. ARGS="--part floor" for one part
	$(BIN)/python benchmarks/step_gpu.py --minutes 60 $(ARGS)
	$(BIN)/python benchmarks/precompute.py --gpu
	$(BIN)/python benchmarks/block_swap.py --out benchmarks/results/stream.json
	$(BIN)/python benchmarks/table.py --write

clean:
	rm -rf demo_out build dist *.egg-info
