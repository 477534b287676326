.PHONY: check quick test test-all bench quickstart tiny

check:
	ruff format --check .
	ruff check .
	mypy

test: # as the README says; 4 minutes on 2 cores
	pytest

test-all: # with the slow ones
	pytest -m ''

quick: # the inner loop: what needs no process of its own
	pytest -q --ignore-glob='*tests/test_[bdeptw]*' x

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

tiny: # a dry run of the main job: four steps
	python train.py trainer.max_steps=4 monitor.every=2
