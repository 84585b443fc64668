# The commands of README and CI. Everything lives in .venv and build/; a second run reuses the first.
#
#   make demo            semantic search over real text with our attention; compiles one architecture's kernels
#   make test            every test that needs no GPU, on a subset of the kernels or, where all are built, on all
#   make build           all kernels, installed in .venv (editable)
#   make bench           us against everybody found on this machine's GPU; ARGS="--preset ..." goes to it;
#                        RESULT=benchmarks/results/NAME keeps it: JSON, Markdown, both pictures
#   make parity          the GPU tests, with a report; fails without a GPU
#   make release-check   is the newest parity report of these sources?
#   make sass            the tests of the machine code of what is built
#   make sdist           the sources as a release has them, in dist/
#   make wheel           a wheel in dist/, checked and tested; its parts as CycloneDX, and SHA256SUMS
#   make aarch64         the extension of sm_120's kernels (or ARCHS) for aarch64, cross-compiled: does it compile and link?
#   make lint            "make style" (ruff, clang-format; "make format" mends) and "make types" (mypy)
#   make clean           forget the build; "make distclean": .venv too
#
# Variables: PYTHON3   the Python that .venv is made with (default: python3)
#            PYTHON    an interpreter that already has torch and this package: for demo, bench and parity, without .venv
#            TORCH     what pip installs when .venv has no torch (default below)
#            ARCHS     architectures to compile, as "89;120" (default: all)
#            SUBSET    "ci": of each tile a kernel in bfloat16, of one head dim in float16 too; empty: all kernels
#                      (default: empty, and ci for "make test")
#            JOBS      parallel nvcc jobs (default: what cores and memory allow)
#            TEST_WORKERS     processes of "make test" (default: one per core; one where pytest-xdist is missing)
#            PARITY_WORKERS   processes of "make parity" (default: 4; one where pytest-xdist is missing)
#            ARGS      passed on to the program that a target runs
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:  # two pips in one environment disturb each other, and the compile jobs are capped by memory
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON3 ?= python3
TORCH ?= torch==2.13.0
ALL_ARCHS := 89;90;120
ARCHS ?= $(ALL_ARCHS)
SUBSET ?=
REPORTS ?= benchmarks/results/parity
TEST_WORKERS ?= auto
PARITY_WORKERS ?= 4
ARGS ?=
RESULT ?=
JOBS ?=

VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
DEVELOP = $(VENV_PYTHON) build_backend/develop.py
BUILD_INPUTS := pyproject.toml CMakeLists.txt tools/source_hash.py requirements/nvcc.txt requirements/cutlass.txt $(shell find cmake src build_backend -type f -not -name '*.pyc' -not -name '.*')

# An interpreter that is ready, or .venv's after what it needs. The working directory stays off its path: an installed
# wheel is to be used, not the sources next to it.
RUN := PYTHONSAFEPATH=1 $(if $(PYTHON),$(PYTHON),$(VENV_PYTHON))
READY := $(if $(PYTHON),,build)

.PHONY: demo test build sass bench parity release-check sdist wheel aarch64 lint style types format clean distclean setup
.DEFAULT_GOAL := test

setup: $(STAMPS)/torch $(STAMPS)/tools

$(STAMPS)/venv:
	@command -v $(PYTHON3) >/dev/null || { echo "cutlass_fmha: $(PYTHON3) was not found; install Python 3.10 or newer, or name one with PYTHON3=" >&2; exit 1; }
	@$(PYTHON3) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "cutlass_fmha: Python 3.10 or newer is needed, and $(PYTHON3) is older; name another with PYTHON3=" >&2; exit 1; }
	@$(PYTHON3) build_backend/develop.py venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: $(STAMPS)/venv
	@$(DEVELOP) torch '$(TORCH)'
	@touch $@

TOOLS := $(addprefix requirements/,build.txt nvcc.txt cutlass.txt inspect.txt test.txt)
$(STAMPS)/tools: $(TOOLS) | $(STAMPS)/venv
	@$(DEVELOP) requirements $(TOOLS)
	@touch $@

$(STAMPS)/lint: requirements/lint.txt | $(STAMPS)/venv
	@$(DEVELOP) requirements $^
	@touch $@

DEMO := requirements/demo.txt requirements/demo-model.txt
$(STAMPS)/demo: $(DEMO) | $(STAMPS)/torch
	@$(DEVELOP) requirements $(DEMO)
	@touch $@

$(STAMPS)/integrations: requirements/integrations.txt requirements/jax.txt | $(STAMPS)/torch
	@$(DEVELOP) requirements $^
	@touch $@

# The package as it is installed for a list of architectures. Only the last one built is there, so its stamp alone is.
STAMP = build/.built-$(subst ;,-,$(ARCHS))
BUILT := $(STAMP)$(SUBSET:%=-%)
$(BUILT): $(BUILD_INPUTS) | $(STAMPS)/torch $(STAMPS)/tools
	@rm -f build/.built-*
	@$(DEVELOP) build '$(ARCHS)' '$(JOBS)' '$(SUBSET)'
	@touch $@

build: $(BUILT)
	@:

# One architecture proves the toolchain: the GPU's, or sm_89. What an earlier build compiled is kept.
EARLIER = $(subst -, ,$(patsubst build/.built-%,%,$(firstword $(wildcard build/.built-*))))
EARLIER_ARCHS = $(subst $(SPACE),;,$(strip $(filter-out ci,$(EARLIER))))
SPACE := $() $()
DEMO_ARCHS = $(or $(if $(filter-out file,$(origin ARCHS)),$(ARCHS)),$(EARLIER_ARCHS),auto)

demo: $(if $(PYTHON),,$(STAMPS)/demo demo-build)
	@$(RUN) -m cutlass_fmha demo $(ARGS)

.PHONY: demo-build
demo-build:
	@$(MAKE) build ARCHS='$(DEMO_ARCHS)'

# Where all kernels were built, they are tested and stay; else the subset is enough. Demo and integrations are tested too,
# so that their packages are needed. Tests of a file share what they prepare, so that one worker takes them.
TEST_SUBSET = $(if $(filter-out file,$(origin SUBSET)),$(SUBSET),$(if $(wildcard $(STAMP)),,ci))
test: $(STAMPS)/demo $(STAMPS)/integrations
	@$(MAKE) build SUBSET='$(TEST_SUBSET)'
	@workers=$$($(VENV_PYTHON) -c 'import xdist' 2>/dev/null && echo '-n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0' || true) \
	  && $(VENV_PYTHON) -m pytest $$workers $(ARGS)

sass: build
	@$(VENV_PYTHON) -m pytest tests/test_resources.py tests/test_sass_counts.py $(ARGS)

bench: $(READY)
	@$(RUN) -m cutlass_fmha bench $(if $(RESULT),--json '$(RESULT).json' --markdown '$(RESULT).md' --plot '$(RESULT).png') $(ARGS)
	@$(if $(RESULT),$(RUN) -m cutlass_fmha bench --from-json '$(RESULT).json' --preset dense latency decode --plot '$(RESULT)-overview.png' >/dev/null)

# From tests/, so that "python -m" finds no package in the working directory. Workers take turns on the GPU, and changing
# from one to the next costs: on an H200 four were the fastest, twelve no faster than one.
parity: $(READY)
	@mkdir -p '$(REPORTS)'
	@report=$$(realpath '$(REPORTS)') && cd tests && python='$(if $(PYTHON),$(PYTHON),../$(VENV_PYTHON))' \
	  && workers=$$("$$python" -c 'import xdist' 2>/dev/null && echo '-n $(PARITY_WORKERS) --dist worksteal' || true) \
	  && "$$python" -m pytest -m gpu $$workers --parity-report "$$report" $(ARGS) .

release-check: $(if $(PYTHON),,$(STAMPS)/venv)
	@$(if $(PYTHON),$(PYTHON),$(VENV_PYTHON)) tools/release_check.py $(ARGS)

sdist: $(STAMPS)/tools
	@echo '==> packing the sources in dist/' && rm -f dist/cutlass_fmha-*.tar.gz
	@PYTHONPATH=build_backend $(VENV_PYTHON) -c 'import backend; print(backend.build_sdist("dist"))'

# Its tests import the package: the wheel's own, where .venv has none. They install it into an empty environment besides.
WHEEL_INSTALLED := build/wheel-installed
wheel: $(STAMPS)/torch $(STAMPS)/tools
	@echo '==> building a wheel in dist/' && rm -f dist/cutlass_fmha-*.whl
	@CUDACXX="$$($(VENV_PYTHON) build_backend/probe.py nvcc)" $(VENV_PYTHON) -m pip wheel --no-deps --no-build-isolation --wheel-dir dist \
	  --config-settings=build-dir=build --config-settings='cmake.define.CMAKE_CUDA_ARCHITECTURES=$(ARCHS)' \
	  --config-settings='cmake.define.CUTLASS_FMHA_JOBS=$(JOBS)' --config-settings='cmake.define.CUTLASS_FMHA_SUBSET=$(SUBSET)' .
	@$(VENV_PYTHON) .ci/check_wheel.py dist/cutlass_fmha-*.whl
	@$(VENV_PYTHON) -m auditwheel show dist/cutlass_fmha-*.whl
	@rm -rf $(WHEEL_INSTALLED) && $(VENV_PYTHON) -m pip --disable-pip-version-check install -q --no-deps --target $(WHEEL_INSTALLED) dist/cutlass_fmha-*.whl
	@WHEEL="$$(realpath dist/cutlass_fmha-*.whl)" PYTHONPATH=$(CURDIR)/$(WHEEL_INSTALLED) $(VENV_PYTHON) -m pytest -q tests/test_wheel.py
	@$(VENV_PYTHON) .ci/sbom.py --output dist/cutlass_fmha.cdx.json dist/cutlass_fmha-*.whl
	@cd dist && sha256sum cutlass_fmha-*.whl cutlass_fmha.cdx.json > SHA256SUMS

# nvcc links aarch64's CUDA runtime, of the same package; Python's headers are this machine's.
ARM_CUDA := build/aarch64-cuda
ARM_LIBRARIES := $(CURDIR)/$(ARM_CUDA)/nvidia/cu13/lib
ARM_ARCHS = $(if $(filter-out file,$(origin ARCHS)),$(ARCHS),120)
aarch64: $(STAMPS)/tools
	@command -v aarch64-linux-gnu-g++ >/dev/null || { echo "cutlass_fmha: aarch64-linux-gnu-g++ was not found; apt install g++-aarch64-linux-gnu" >&2; exit 1; }
	@test -d $(ARM_LIBRARIES) || { $(VENV_PYTHON) -m pip --disable-pip-version-check download -q --no-deps --only-binary :all: --platform manylinux2014_aarch64 \
	  --dest $(ARM_CUDA) "$$(grep ^nvidia-cuda-runtime== requirements/nvcc.txt)" && $(VENV_PYTHON) -m zipfile -e $(ARM_CUDA)/*.whl $(ARM_CUDA); }
	@export PATH="$(CURDIR)/$(VENV)/bin:$$PATH" CUDACXX="$$($(VENV_PYTHON) build_backend/probe.py nvcc)" NVCC_APPEND_FLAGS=-L$(ARM_LIBRARIES) \
	  && cmake -S . -B build/aarch64 -G Ninja --toolchain cmake/aarch64-linux-gnu.cmake '-DCMAKE_CUDA_ARCHITECTURES=$(ARM_ARCHS)' \
	    -DFMHA_CUDART=$(ARM_LIBRARIES)/libcudart_static.a -DPython_EXECUTABLE=$(CURDIR)/$(VENV_PYTHON) "-Dpybind11_DIR=$$(python -m pybind11 --cmakedir)" \
	    '-DCUTLASS_FMHA_JOBS=$(JOBS)' '-DCUTLASS_FMHA_SUBSET=$(SUBSET)' $(ARGS) \
	  && cmake --build build/aarch64 --target _C && readelf -h build/aarch64/_C.*.so | grep Machine

CXX_SOURCES = $(shell find src tools/simulator -name '*.h' -o -name '*.cpp' -o -name '*.cuh')
lint: style types

style: $(STAMPS)/lint
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/clang-format --dry-run --Werror $(CXX_SOURCES)

types: $(STAMPS)/lint $(STAMPS)/torch
	@$(VENV)/bin/mypy

format: $(STAMPS)/lint
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .
	@$(VENV)/bin/clang-format -i $(CXX_SOURCES)

clean:
	rm -rf build dist wheelhouse .pytest_cache .mypy_cache .ruff_cache .hypothesis

distclean: clean
	rm -rf $(VENV)
