# Two commands on a fresh machine with Python 3.11+ and make: `make demo` and `make test`. `.ci/run` is what CI runs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CHECKPOINT := tests/data/checkpoints/gptq-int4-g32-qwen3moe
DEMO := demo-output

# The oldest and the newest triton that the kernels are for; the tests run on the one in constraints.txt.
TRITONS := 3.6.0 3.9.0

# Bytecode and compiled loops are kept between processes, whatever the environment says: the tests start hundreds.
unexport PYTHONDONTWRITEBYTECODE

# Seconds that `make fuzz` takes for the parsers, all together.
FUZZ_SECONDS ?= 600

# Folder of the engines and the quantisers of tools/engines.txt, some 600 MB; another one may serve several checkouts.
ENGINES ?= $(CURDIR)/.engines

.PHONY: demo test test-slow engines engine-tests lint pages site fuzz fuzz-minute atheris night crash mutate gpu-test \
	compile-matrix $(TRITONS:%=compile-with-%) clean

# The environment is rebuilt when what it holds changes. torch goes first: PyPI's build for Linux brings 2.5 GiB of GPU
# libraries, so the script looks for one for CPUs and says which it takes.
$(STAMP): pyproject.toml constraints.txt tools/install_torch.py
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "moeq needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/install_torch.py constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[kernels,transformers,ray,dev,docs]'
	@touch $(STAMP)

demo: $(STAMP)
	@rm -rf $(DEMO)
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/demo.sh $(CHECKPOINT) $(DEMO)

test: $(STAMP) lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -q

# What takes longer: crashes at random instants, clusters, streaming. SHARE=2/8 runs one test of eight; CI takes another
# share every day, with 125 instead of 1,000 updates for each checkpoint and layout.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -q -m slow $(if $(SHARE),--share $(SHARE))
	$(if $(SHARE),,$(BIN)/python -m pytest -n 2 --dist worksteal -q -m night tests/update)

# The plug-ins in vLLM's and SGLang's own Python, parity with vLLM's packing, transcoded checkpoints in the libraries that
# read them, and quantisers beside the libraries' own, all without a GPU. GPTQModel would compile each of its layers with
# TorchDynamo. `make night` has the slow tests as well.
ENGINE_TESTS ?= not slow
ENGINE_SITES := MOEQ_ENGINES=1 MOEQ_TEST_VLLM=$(ENGINES)/engine MOEQ_VLLM_SITE=$(ENGINES)/engine

engines: $(STAMP)
	$(BIN)/python tools/engine_site.py $(ENGINES)

engine-tests: engines
	PYTHONPATH=$(ENGINES)/engine $(ENGINE_SITES) \
		$(BIN)/python -m pytest -n 2 --dist worksteal -q -m "$(ENGINE_TESTS)" tests/engines/test_vllm*.py \
		tests/prove/test_parity.py tests/transcode/test_libraries_vllm.py \
		tests/oracle/differential/test_samples.py tests/oracle/loads/test_loads.py \
		tests/moeq_kernels/test_peer_cutlass.py tests/moeq_kernels/test_peer_packages.py
	PYTHONPATH=$(ENGINES)/sglang MOEQ_ENGINES=1 \
		$(BIN)/python -m pytest -n 2 --dist worksteal -q -m "$(ENGINE_TESTS)" tests/engines/test_sglang*.py
	PYTHONPATH=$(ENGINES)/libraries MOEQ_ENGINES=1 TORCHDYNAMO_DISABLE=1 \
		$(BIN)/python -m pytest -n 2 --dist worksteal -q -m "$(ENGINE_TESTS)" tests/transcode/test_libraries.py \
		tests/update/test_quantize.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Every generated page and block; `make site` builds the documentation into site/.
pages: $(STAMP)
	$(BIN)/python tools/pages/generate.py

site: $(STAMP)
	$(BIN)/mkdocs build --strict --quiet

# Parsers of strangers' files, fed by coverage where atheris has a wheel (Linux, CPython), else by random damage; then
# every wrong type in every document.
fuzz: $(STAMP) atheris
	$(BIN)/python tests/attacks/fuzz/run.py --seconds $(FUZZ_SECONDS) --findings fuzz-findings --corpus fuzz-corpus
	MOEQ_MUTATIONS=1000000 MOEQ_FUZZ_EXAMPLES=2000 $(BIN)/python -m pytest -q --timeout 7200 \
		tests/attacks/test_wrong_types.py tests/attacks/test_fuzz_parsers.py

fuzz-minute: $(STAMP) atheris
	$(BIN)/python tests/attacks/fuzz/run.py --seconds 60 --findings fuzz-findings

atheris: $(STAMP)
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary :all: atheris

# Everything that takes hours: for a scheduled run.
night: fuzz crash
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m night tests/pipeline
	$(MAKE) test-slow
	$(MAKE) compile-matrix SPREAD=
	$(MAKE) engine-tests ENGINE_TESTS="slow or not slow"

# Every change of a file fails once in every way, then commands are killed KILLS times.
KILLS ?= 10000

crash: $(STAMP)
	MOEQ_FAULTS=crash-faults.jsonl $(BIN)/python -m pytest -q -m night tests/attacks/test_faults.py tests/attacks/test_read_faults.py
	$(BIN)/python tests/attacks/kills.py --kills $(KILLS) --results crash-kills.json

# Do tests notice a change of the code? MUTANTS places of every folder are drawn with SEED, each is changed by itself, and
# the tests that run this place run. 90 % have to be noticed. Which tests run which lines is recorded in .mutate first.
# Most of moeq/engines runs inside engines alone: after `make engines` their tests are among them, and are recorded apart.
MUTATE ?= $(sort $(dir $(wildcard moeq/*/__init__.py)))
MUTANTS ?= 20
SEED ?= 0
HAS_ENGINES := $(and $(wildcard $(ENGINES)/engine),$(wildcard $(ENGINES)/sglang))

mutate: $(STAMP)
	$(if $(HAS_ENGINES),PYTHONPATH=$(ENGINES)/sglang:$(ENGINES)/engine $(ENGINE_SITES)) $(BIN)/python tools/mutate.py \
		$(MUTATE) --count $(MUTANTS) --seed $(SEED) --least 90 --record .mutate/lines$(if $(HAS_ENGINES),-engines).json

gpu-test: $(STAMP)
	$(BIN)/python -m pytest -q -m gpu

# Every kind of kernel, ahead of time, without a GPU, with the oldest and the newest triton; the machine code of the Hopper
# kernels is read as well. Targets take turns; `make night` has each kernel for every target.
SPREAD ?= --spread

compile-matrix: $(TRITONS:%=compile-with-%)

$(TRITONS:%=compile-with-%): compile-with-%: $(STAMP) $(VENV)/triton-%
	PYTHONPATH=kernels:tests/moeq_kernels $(BIN)/python -m support.compile.matrix --trimmed $(SPREAD) \
		--triton $(VENV)/triton-$*
	PYTHONPATH=$(VENV)/triton-$*:kernels:tests/moeq_kernels $(BIN)/python -m support.compile.hopper --trimmed

$(VENV)/triton-%: | $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==$*

clean:
	rm -rf $(VENV) $(DEMO) .mutate site .pytest_cache .mypy_cache .ruff_cache
