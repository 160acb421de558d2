# A fresh machine needs python3, make, git and a C compiler; `make test-all` also needs Chromium.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
# tests run in two processes with one thread each; MKL reads MKL_CBWR when torch is loaded and then gives equal bits on every CPU
WORKERS ?= 2
# UV=uv installs with uv instead of pip: half a minute instead of two and a half; uv reads settings of its own, not pip's
UV ?=
install_into = $(if $(UV),$(UV) pip install -q --python $(1)/bin/python,$(1)/bin/python -m pip install -q)
ONE := OMP_NUM_THREADS=1 MKL_CBWR=AUTO,STRICT
export PATH := $(abspath $(BIN)):$(PATH)
export TOKENIZERS_PARALLELISM := false
export HF_HUB_DISABLE_PROGRESS_BARS := 1
# waiting threads sleep instead of spinning: an edit by the tiny model took 0.56 s instead of 0.81 with one of two cores busy
export OMP_WAIT_POLICY := passive
# bytecode is kept, whatever the machine says: without it each of some hundred processes
# would compile torch, diffusers and transformers again
unexport PYTHONDONTWRITEBYTECODE

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: demo install-browser lint types refresh hook test test-perturbed test-all test-weekly browser places site screenshots outputs check install clean space breakages mutations faults kills bench-cache bench-cluster bench-cpu bench-gpu bench-modes bench-peers first-gpu rehearsal

install: $(VENV)/.ready

$(VENV)/.ready: settings.ini setup.py
	$(PYTHON) -m venv $(VENV)
	$(call install_into,$(VENV)) -e ".[dev]"
	touch $@

demo: $(VENV)/.ready ## precompute, train and predict with the tiny model and real photographs
	$(BIN)/python -m qie_nb.cli demo --out demo_out

RUN := $(ONE) WORKERS=$(WORKERS) $(BIN)/python tools/run_tests.py

lint: $(VENV)/.ready ## is everything that is made from other files in step, do pages and code keep the rules? About a minute
	$(RUN) lint

types: $(VENV)/.ready ## do the types of the exported library agree? mypy, two minutes on the first run
	$(BIN)/python -m mypy --config-file tests/mypy.ini

refresh: $(VENV)/.ready ## write every file that is made from others: run it before a commit
	$(ONE) $(BIN)/python tools/refresh.py $(ARGS)

hook: ## let git run `make refresh` before each commit
	git config core.hooksPath tools/hooks

test: $(VENV)/.ready ## the everyday tests: notebooks, then pytest
	$(RUN) test

test-all: $(VENV)/.ready ## the lane of every change; needs Chromium, and root for the mounts
	$(BIN)/python tests/end_to_end/browser/lab.py
	$(RUN) all

# the Pythons and wheels of `make places`
PLACES := kaggle colab
IN_PLACES := $(foreach p,KAGGLE COLAB,QIE_NB_$(p)_PYTHON=$(abspath $(VENV))-$(shell echo $(p) | tr A-Z a-z)/bin/python) QIE_NB_WHEELS=$(abspath $(VENV))-wheels

test-weekly: $(VENV)/.ready $(PLACES:%=$(VENV)-%/.ready) $(VENV)-wheels/.ready ## all tests: full matrices, kills and faults, mutations and breakages, both versions of ipywidgets, Kaggle's and Colab's versions, all outputs; hours and 20 GB
	$(BIN)/python tests/end_to_end/browser/lab.py
	$(IN_PLACES) $(RUN) weekly

# each float32 result of a linear layer, convolution or attention moves by at most one unit in the last place
test-perturbed: $(VENV)/.ready ## the everyday tests as on a CPU whose float32 results depend on memory addresses
	$(ONE) PYTHONPATH=$(CURDIR)/tests/perturb:$(CURDIR) $(BIN)/nbdev_test --n_workers $(WORKERS)
	$(ONE) PYTHONPATH=$(CURDIR)/tests/perturb:$(CURDIR) $(PYTEST) --ignore=tests/lint -m "not slow and not browser and not mounts and not weekly and not bits"

BROWSERS := w8 w7
LANE := browser
install-browser: $(VENV)-w8/.ready ## the environment of the browser tests of each change; `make -j 2 install install-browser` makes both at once

browser: $(VENV)/.ready $(BROWSERS:%=$(VENV)-%/.ready) ## the notebooks in JupyterLab and Chromium, with ipywidgets 8.1 and 7.7.1
	for w in $(BROWSERS); do QIE_NB_BROWSER=$$w $(VENV)-$$w/bin/python -m pytest -m "$(LANE)" --junitxml $(VENV)/reports/browser.xml tests/end_to_end/test_browser.py tests/end_to_end/test_browser_newcomer.py || exit 1; done

space: $(VENV)/.ready $(VENV)-space/.ready ## the app of a Hugging Face Space, with the tiny model, in Chromium
	QIE_NB_BROWSER=space $(VENV)-space/bin/python -m pytest -m browser --junitxml $(VENV)/reports/space.xml tests/end_to_end/test_browser_space.py

# an environment with one JupyterLab and its ipywidgets, or gradio, which come before what is installed in $(VENV)
$(VENV)-%/.ready: tests/end_to_end/browser/%.txt
	$(PYTHON) -m venv $(VENV)-$*
	$(call install_into,$(VENV)-$*) -r $<
	$(PYTHON) -c "import sysconfig as s; print('import site; site.addsitedir(%r)' % s.get_path('purelib', 'posix_prefix', dict(base='$(abspath $(VENV))')))" > "$$($(VENV)-$*/bin/python -c "import sysconfig as s; print(s.get_path('purelib'))")/main.pth"
	touch $@

# environments with Kaggle's and Colab's library versions, and the wheels that the install cells need; PLACE_PYTHON=python3.12 uses Kaggle's Python
PLACE_PYTHON ?= $(PYTHON)
places: $(PLACES:%=$(VENV)-%/.ready) $(VENV)-wheels/.ready ## the Kaggle notebooks and many tests with Kaggle's and Colab's library versions; 13 GB
	$(ONE) $(IN_PLACES) $(BIN)/python -m pytest tests/end_to_end/test_kaggle.py

$(VENV)-%/.ready: constraints/%.txt $(VENV)/.ready
	$(PLACE_PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install -q --no-cache-dir -r $< pytest
	touch $@

$(VENV)-wheels/.ready: settings.ini
	mkdir -p $(@D)
	$(PLACE_PYTHON) -m pip download -q --no-deps -d $(@D) optimum-quanto ninja bitsandbytes
	touch $@

# pages and notebooks as a web site, by mkdocs in an environment of its own
$(VENV)-site/.ready: docs/requirements.txt
	$(PYTHON) -m venv $(VENV)-site
	$(VENV)-site/bin/python -m pip install -q -r $<
	touch $@

site: $(VENV)-site/.ready ## README, docs/ and all notebooks as a web site in site/, checked for dead links; five minutes
	$(VENV)-site/bin/python tools/website.py $(ARGS)

screenshots: $(VENV)/.ready $(VENV)-w8/.ready ## take the widget images of README again
	$(VENV)-w8/bin/python tools/screenshots.py docs

outputs: $(VENV)/.ready ## run all notebooks and write their outputs into them; ARGS="nbs/index" for one
	$(ONE) $(BIN)/python tools/outputs.py $(ARGS)

check: lint test ## lint, then the everyday tests

breakages: $(VENV)/.ready ## break the code on purpose, one way at a time, and expect a failing test; ten minutes
	$(ONE) $(PYTEST) tests/breakages

mutations: $(VENV)/.ready ## put small mistakes into the library, one at a time: does `make test-all` notice them? About an hour; ARGS="seed key" for some
	$(ONE) $(BIN)/python tests/breakages/mutations.py $(ARGS)

faults: $(VENV)/.ready ## all trials of the cache: kills, flipped bits, full disks, many processes; about 20 minutes; full disks need root
	$(ONE) $(BIN)/python tests/cache_fault_trials.py --full --out benchmarks/results/faults.json

kills: $(VENV)/.ready ## all trials of killed and interrupted runs, also with two processes; about half an hour
	$(ONE) $(BIN)/python tests/crash_trials.py --full --out benchmarks/results/kills.json

bench-cache: $(VENV)/.ready ## measure the cache: benchmarks/results/cache.json and a table
	$(BIN)/python benchmarks/cache.py

bench-cluster: $(VENV)/.ready ## precompute 2,000 samples on a Ray cluster while workers and the job are killed: benchmarks/results/cluster.json
	$(BIN)/python benchmarks/cluster.py $(ARGS)

bench-cpu: $(VENV)/.ready ## compare a training step and precompute with a bare loop: operation counts and paired times
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/step_cpu.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/precompute.py
	$(BIN)/python benchmarks/table.py --write

bench-modes: $(VENV)/.ready ## uncached, lazy and precomputed training side by side; ARGS=--full on a GPU
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/modes.py $(ARGS)
	$(BIN)/python benchmarks/table.py --write

PEERS ?=
bench-peers: $(VENV)/.ready ## compare with other trainers of Qwen-Image-Edit; PEERS=/path has their checkouts; ARGS="--parts steps" for one part
	PEERS="$(PEERS)" OMP_NUM_THREADS=1 $(BIN)/python benchmarks/peers/compare.py $(ARGS)
	$(BIN)/python benchmarks/peers/compare.py --write

rehearsal: $(VENV)/.ready ## the whole job at full size with random weights: about an hour on two cores, 12 GB of memory, 35 GB of disk in rehearsal/; continues where it stopped
	$(BIN)/python benchmarks/rehearsal.py $(ARGS)
	$(BIN)/python benchmarks/table.py --write

first-gpu: $(VENV)/.ready ## the first ten minutes on a GPU: ten parts, one file to send; ARGS="--parts 1 2" for the two that tell most
	$(BIN)/python benchmarks/first_gpu.py $(ARGS)

bench-gpu: $(VENV)/.ready ## on a GPU, at full size with random weights: hardware floor, bare loop, every mode; continues where it stopped. ARGS="--part floor" for one part
	$(BIN)/python benchmarks/step_gpu.py --minutes 60 $(ARGS)
	$(BIN)/python benchmarks/precompute.py --gpu
	$(BIN)/python benchmarks/block_swap.py --out benchmarks/results/stream.json
	$(BIN)/python benchmarks/table.py --write

clean:
	rm -rf demo_out build dist site *.egg-info
