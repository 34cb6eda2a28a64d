# Everything from a checkout; `make help` says what there is, CONTRIBUTING.md more of it.
.PHONY: help setup serve test test-long check bench docs docs-site matrix matrix-encoders lock dev clients
.DEFAULT_GOAL := serve

MACHD := .venv/bin/machd
# Tests start many processes, each of which would compile the sources again.
export PYTHONDONTWRITEBYTECODE :=
# What `make test-long` runs, by marker.
LONG := long or longest
# A file is one worker's; tests/support/file_scheduling.py spreads them.
SIDE_BY_SIDE := --numprocesses auto --dist loadfile --no-loadscope-reorder

help: ## this list
	@echo 'Targets; plain `make` is `make serve`:'
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1|\2/p' Makefile | awk -F '|' '{ printf "%-14s %s\n", $$1, $$2 }'
	@echo 'Variables:'
	@echo '  ARGS="…"       more arguments: make serve ARGS="--port 9000", make test ARGS="tests/unit -q"'
	@echo '  BACKEND=…      cpu, cuda12 or cuda13, on Linux'
	@echo '  PYTHON=…       the interpreter that .venv is made with'
	@echo 'scripts/setup --help says what else can be installed. In a checkout machd is $(MACHD).'

setup: ## .venv with pinned dependencies, and the default model
	@scripts/setup
	@scripts/native
	@$(MACHD) model pull

serve: setup ## make setup, then machd serve
	@exec $(MACHD) serve $(ARGS)

dev: ## make setup, with what tests and checks need
	@scripts/setup --dev
	@scripts/native
	@$(MACHD) model pull

clients: ## .venv-clients: programs that talk to machd, for long tests
	@scripts/setup --clients

test: dev ## every property
ifdef ARGS
	.venv/bin/pytest $(ARGS)
else
	.venv/bin/pytest $(SIDE_BY_SIDE)
endif

test-long: dev clients ## what is exhaustive: hours
	.venv/bin/pytest -m '$(LONG)' $(SIDE_BY_SIDE) $(ARGS)

check: dev ## format, lint, types, layers, spelling, generated pages; then make test
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy daemon probes tests scripts/formula.py scripts/pip_settings.py docs/generate.py docs/request_fields.py docs/site_links.py docs/panels.py docs/log_events.py docs/speed_chart.py docs/man_page.py
	.venv/bin/lint-imports --no-logo
	.venv/bin/codespell
	.venv/bin/python docs/generate.py --check
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict
	$(MAKE) --no-print-directory test

bench: dev ## how fast the default model is here; bench-results/
	@mkdir -p bench-results
	$(MACHD) bench --compare single,static,batched --scenarios sweep,staggered,long-prompt,coalescing,structured \
		--concurrency 1,4,8,16 --json bench-results/bench.json --plot bench-results/bench.png $(ARGS)

docs: dev ## docs/reference/, config/ and systemd/ from the code
	.venv/bin/python docs/generate.py

docs-site: docs ## the documentation as a site in site/
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

matrix: dev ## measure every architecture of mlx-lm, and encoders
	.venv/bin/python docs/generate.py --matrix

matrix-encoders: dev ## measure encoders alone, in seconds
	.venv/bin/python docs/generate.py --encoders

lock: ## pin dependencies anew; needs uv
	scripts/lock
