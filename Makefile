# make report   execute the notebooks and render build/report.html      make lab   open them in JupyterLab
# make test     the tests and every notebook at small sizes            make lint  ruff and mypy
# make test-gpu the GPU tests, then compute-sanitizer over every op: needs an NVIDIA GPU
# Each sets up .venv on its first run; all it needs is python3 >= 3.11.

PYTHON ?= python3
BIN := .venv/bin
OTHER_TILELANG := 0.1.15
OTHER := .venv-tilelang-$(OTHER_TILELANG)
# the tests that build and run kernels: the ones that another TileLang could break
KERNEL_TESTS = $(wildcard tests/cuda_on_cpu tests/kernels)

.PHONY: report test test-gpu test-vllm test-tilelang lab lint clean distclean

report: .venv/ok
	$(BIN)/python -m mhc report

test: .venv/ok
	$(BIN)/python -m pytest --nbmake --nbmake-timeout=300 notebooks tests --ignore=tests/vllm

test-gpu: .venv/ok
	$(BIN)/python -m pytest tests --ignore=tests/vllm -m gpu
	$(BIN)/python -m mhc bench sanitize

test-vllm: .venv/ok
	$(BIN)/python -m pytest tests/vllm

test-tilelang: $(OTHER)/ok
	$(OTHER)/bin/python -m pytest $(KERNEL_TESTS)

lab: .venv/ok
	$(BIN)/jupyter lab notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

lint: .venv/ok
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis

distclean: clean
	rm -rf .venv .venv-* *.egg-info

.venv/ok: pyproject.toml constraints.txt
	@echo "Setting up .venv; the first time takes a few minutes, most of it PyTorch"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python3 >= 3.11 is needed, this is " + sys.version.split()[0] + ": make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[test,lab]'
	$(BIN)/jupyter labextension disable "@jupyterlab/apputils-extension:announcements"
	touch $@

# the same set-up with the other supported TileLang, which brings its own tvm-ffi
$(OTHER)/ok: pyproject.toml constraints.txt
	@echo "Setting up $(OTHER)"
	$(PYTHON) -m venv $(OTHER)
	grep -Ev '^(tilelang|apache-tvm-ffi|torch_c_dlpack_ext|z3-solver)==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --disable-pip-version-check --constraint $(OTHER)/constraints.txt \
		tilelang==$(OTHER_TILELANG) --editable '.[test]'
	touch $@
