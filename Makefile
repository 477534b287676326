.PHONY: check test bench quickstart tiny

check:
	ruff format --check .
	ruff check .
	mypy

test:
	pytest

bench:
	python bench/whitening.py
	python bench/bootstrap.py

quickstart:
	python train.py

tiny: # a dry run of the main job: four steps
	python train.py trainer.max_steps=4 monitor.every=2
