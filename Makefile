# Everything from a checkout; CONTRIBUTING.md says what each target is for.
.PHONY: setup serve test test-long check bench docs docs-site matrix lock dev clients
.DEFAULT_GOAL := serve

MACHD := .venv/bin/machd
# Tests start many processes, each of which would compile the sources again.
export PYTHONDONTWRITEBYTECODE :=
SIDE_BY_SIDE := --numprocesses auto --maxprocesses 4 --dist loadfile

setup:
	@scripts/setup
	@$(MACHD) model pull

serve: setup
	@exec $(MACHD) serve $(ARGS)

dev:
	@scripts/setup --dev
	@$(MACHD) model pull

clients:
	@scripts/setup --clients

test: dev
ifdef ARGS
	.venv/bin/pytest $(ARGS)
else
	.venv/bin/pytest $(SIDE_BY_SIDE)
endif

test-long: dev clients
	.venv/bin/pytest -m long $(SIDE_BY_SIDE) $(ARGS)

check: dev
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy daemon probes tests docs/generate.py docs/request_fields.py docs/site_links.py docs/panels.py docs/modules.py docs/log_events.py
	.venv/bin/lint-imports --no-logo
	.venv/bin/codespell
	.venv/bin/python docs/generate.py --check
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict
	$(MAKE) --no-print-directory test

bench: dev
	@mkdir -p bench-results
	$(MACHD) bench --compare single,static,continuous --scenarios sweep,staggered,long-prompt,coalescing,structured \
		--concurrency 1,4,8,16 --json bench-results/bench.json --plot bench-results/bench.png $(ARGS)

docs: dev
	.venv/bin/python docs/generate.py

docs-site: docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

matrix: dev
	.venv/bin/python docs/generate.py --matrix

lock:
	scripts/lock
