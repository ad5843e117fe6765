# Every target sets up .venv the first time, and again when pyproject.toml changes; see .ci/setup.sh.
#   make test ARGS="-k transformer"     arguments for the program behind a target
#   make lab PYTHON=python3.13          the Python to make .venv from

# What setup.sh prints last is the environment's Python.
run = @python=$$(sh .ci/setup.sh) && exec "$$python"
first = notebooks/00-start.ipynb
# Jupyter refuses to run as root, which is who one is in a container, unless it is told that this is meant.
root = $$([ "$$(id -u)" != 0 ] || echo --allow-root)

.DEFAULT_GOAL := help
.PHONY: help setup lab test test-gpu compare notebooks book check bench soak

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

setup: ## only set up, for a class room or a container
	@sh .ci/setup.sh >/dev/null

lab: ## open the lessons in JupyterLab, on this machine only
	$(run) -m jupyterlab --ServerApp.ip=127.0.0.1 --LabApp.default_url=/lab/tree/$(first) \
		--LabApp.app_settings_dir="$$(pwd)/.ci/lab" \
		--LabApp.news_url=None --MappingKernelManager.transport_encryption=auto --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate $(root) $(ARGS)

test: ## run every test, the notebooks' included, two at a time
	$(run) -m pytest -n 2 --dist worksteal $(ARGS)

test-gpu: ## run the tests on GPUs, one at a time, if this machine has any
	$(run) -m pytest -p no:xdist -m gpu tests/gpu $(ARGS)

compare: ## print what each strategy stores and sends, measured beside the formula
	$(run) -m chapter19_9.compare $(ARGS)

notebooks: ## build notebooks/ from chapter19_9/sections/, running every cell
	$(run) -m d2l_utils.notebooks build $(ARGS)

book: ## make the chapter's site in build/book/, to be opened from disk
	@python=$$(sh .ci/setup.sh) && { "$$python" -c 'import furo, latex2mathml, myst_nb' 2>/dev/null || \
		"$$python" -m pip install -q --disable-pip-version-check -e '.[book]'; } && exec "$$python" -m d2l_utils.book $(ARGS)

check: ## lint, format, types, and notebooks that agree with their text
	$(run) -m ruff check .
	$(run) -m ruff format --check .
	$(run) -m mypy
	$(run) -m d2l_utils.notebooks check

bench: ## measure launching, recording, live changes, steps and the dry run on this machine
	$(run) -m tests.bench $(ARGS)

soak: ## end 200 launches in every way at random, run FSDP 200 times, and look for what they leave behind
	$(run) -m tests.soak $(ARGS)
