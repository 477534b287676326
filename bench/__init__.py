"""Benchmarks, each started as python -m bench.NAME from the clone."""

from importlib.util import find_spec

if find_spec("sentence_transformers") is None:
    raise SystemExit("benchmarks compare with sentence-transformers and others: pip install -e '.[dev]'")
