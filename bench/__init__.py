"""Benchmarks, each started as python -m bench.NAME from the clone."""

from importlib.util import find_spec

if find_spec("sentence_transformers") is None:
    install = "pip install -c constraints.txt -e '.[dev]'"
    raise SystemExit(f"error: benchmarks compare with sentence-transformers and others: {install}")
