.PHONY: check test bench quickstart tiny

check:
	ruff format --check .
	ruff check .
	mypy

test:
	pytest

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
