.PHONY: help check test test-all docs

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

check:  ## Format, lint, types, spelling, Markdown.
	ruff check
	ruff format --check
	mypy
	mypy --config-file tests/mypy.ini
	lint-imports
	codespell
	pymarkdown scan --recurse README.md CONTRIBUTING.md CHANGELOG.md docs

test:  ## The fast tests: three minutes on two cores.
	python -m pytest -m fast -n 2 --dist loadfile --no-loadscope-reorder

test-all:  ## Every test that this machine can run, with the lines that the fast ones reach.
	python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --cov --cov-report=term:skip-covered

docs:  ## Build the documentation site into site/.
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict
