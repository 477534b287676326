"""Exact search: FAISS and NumPy against a naive loop in float64."""

import builtins

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from whitenedcse.serving import nearest as index_module
from whitenedcse.serving.nearest import available_engine, by_faiss, by_numpy, nearest

ENGINES = [by_numpy, by_faiss]


@pytest.fixture(params=ENGINES, ids=["numpy", "faiss"])
def engine(request, monkeypatch):
    if request.param is by_faiss:
        pytest.importorskip("faiss")
    monkeypatch.setattr(index_module, "available_engine", lambda: request.param)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(index_module, "ROWS", 37)
    monkeypatch.setattr(index_module, "QUERIES", 5)


def rows_of(n, d, seed=0):
    x = np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def by_hand(queries, x, top):
    """One query and one row at a time."""
    scores, rows = [], []
    for query in queries.astype(np.float64):
        products = [
            np.float32(sum(a * b for a, b in zip(query, row, strict=True))) for row in x.astype(float)
        ]
        best = sorted(range(len(x)), key=lambda i, p=products: (-p[i], i))[:top]
        rows.append(best)
        scores.append([products[i] for i in best])
    return np.array(scores), np.array(rows)


@pytest.mark.parametrize("top", [1, 10, 300])
@pytest.mark.parametrize("cuts", [[], [1, 90, 91]])
@pytest.mark.usefixtures("engine")
def test_it_is_the_naive_loop(top, cuts):
    queries, x = rows_of(13, 24), rows_of(200, 24, seed=1)
    scores, rows = nearest(queries, np.split(x, cuts), top)
    wanted, at = by_hand(queries, x, top)
    assert_array_equal(rows, at)
    assert_allclose(scores, wanted, rtol=0, atol=1e-7)
    assert scores.shape == (13, min(top, 200)) and scores.dtype == np.float32 and rows.dtype == np.int64


@pytest.mark.usefixtures("engine")
def test_equal_rows_come_in_their_order_however_many_there_are():
    """More of them than are asked for at first, over all pieces and parts."""
    x = rows_of(400, 48)
    x[3::4] = x[3]
    scores, rows = nearest(x[:4], np.split(x, [50]), 7)
    assert_array_equal(rows[3], np.arange(3, 400, 4)[:7])
    assert np.unique(scores[3]).size == 1
    assert_array_equal(rows[:3], by_hand(x[:3], x, 7)[1])


@pytest.mark.usefixtures("engine")
def test_rows_that_float32_confuses_come_in_the_order_of_float64():
    """Products that differ by less than float32 sums of them do."""
    base = rows_of(1, 512)
    x = base + np.random.default_rng(3).normal(size=(300, 512)).astype(np.float32) * 1e-5
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    rows = nearest(base, [x], 20)[1]
    assert_array_equal(rows, by_hand(base, x, 20)[1])


def test_the_engines_agree_to_the_bit(monkeypatch):
    pytest.importorskip("faiss")
    queries, x = rows_of(50, 96), rows_of(1000, 96, seed=2)
    found = []
    for engine in ENGINES:
        monkeypatch.setattr(index_module, "available_engine", lambda engine=engine: engine)
        found.append(nearest(queries, [x], 10))
    one, two = found
    assert_array_equal(one[0], two[0])
    assert_array_equal(one[1], two[1])


@pytest.mark.usefixtures("engine")
def test_nothing_is_left_out_for_being_far():
    scores, rows = nearest(np.eye(2, dtype=np.float32)[:1], [-np.eye(2, dtype=np.float32)], 5)
    assert (scores.tolist(), rows.tolist()) == ([[0, -1]], [[1, 0]])


def test_faiss_is_taken_where_it_is(monkeypatch):
    pytest.importorskip("faiss")
    assert available_engine() is by_faiss
    known = builtins.__import__

    def without(name, *more):
        if name == "faiss":
            raise ImportError
        return known(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert available_engine() is by_numpy
    assert nearest(rows_of(1, 4), [rows_of(3, 4)], 1)[0].shape == (1, 1)


@pytest.mark.parametrize(("top", "n", "d"), [(0, 3, 4), (1, 3, 5), (1, 0, 4)])
def test_what_cannot_be_answered_is_refused(top, n, d):
    with pytest.raises(ValueError, match=f"top={top} of {n} rows" if d == 4 else r"have the widths \[4, 5\]"):
        nearest(rows_of(1, 4), [rows_of(n, d)], top)
