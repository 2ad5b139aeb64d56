.PHONY: help check test test-all docs

help:  ## Show this list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

check:  ## Format, lint, types, spelling, Markdown.
	ruff check
	ruff format --check
	mypy
	lint-imports
	codespell
	pymarkdown scan --recurse README.md CONTRIBUTING.md CHANGELOG.md docs

test:  ## The fast tests: two minutes on two cores.
	python -m pytest -m fast -n 2 --dist loadfile

test-all:  ## Every test that this machine can run.
	python -m pytest -n 2 --dist loadfile

docs:  ## Build the documentation site into site/.
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict
