.PHONY: check quick test test-all bench quickstart tiny docs

check:
	ruff format --check .
	ruff check .
	mypy

test: # as the README says; 4 minutes on 2 cores
	pytest

test-all: # with the slow ones
	pytest -m ''

quick: # the inner loop: mathematics, model and evaluation
	pytest -q tests/test_whitening.py tests/test_ragged.py tests/model tests/evaluation

bench: # a quick look at each; without --quick they take long
	python -m bench.whitening --quick
	python -m bench.step --quick
	python -m bench.systems --quick
	python -m bench.loading --quick
	python -m bench.encode --quick
	python -m bench.evaluate --quick
	python -m bench.bootstrap

quickstart:
	python train.py

docs: # docs/ as a site in site/: pip install -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict

tiny: # a dry run of the main job: four steps
	python train.py trainer.max_steps=4 monitor.every=2
