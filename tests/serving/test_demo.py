"""The page to try an encoder on: what it computes, and whom it answers."""

import gc
import http.client
import json
import re
import sys

import numpy as np
import pytest
from encoders import SENTENCES, whitened_by_hand
from numpy.testing import assert_allclose

from whitenedcse.app import cli
from whitenedcse.serving.fit import scaled

TEXTS = [f"{a} {b}" for a in SENTENCES for b in SENTENCES]
pytestmark = pytest.mark.filterwarnings("ignore")  # those of Gradio, whose loops and sockets stay open
QUERY = "the small dog likes bread"


@pytest.fixture
def demo():
    yield pytest.importorskip("whitenedcse.serving.demo")  # and Gradio, which takes seconds
    gc.collect()  # its loops and sockets here, where warnings are ignored, and not in another test


def test_neighbours_and_cosines_are_those_of_the_definition(demo, embedder):
    for unit in (False, True):
        trial = demo.Trial(scaled(embedder, unit=unit), TEXTS)
        raw, asked = (embedder.encode(texts).astype(np.float64) for texts in (TEXTS, [QUERY]))
        for k in (None, 4, 10):
            x, q = (raw, asked) if k is None else map(whitened_by_hand(raw, k), (raw, asked))
            wanted = x @ q[0] / np.linalg.norm(x, axis=1) / np.linalg.norm(q)
            best = np.argsort(-wanted, kind="stable")[:5]
            got = trial.nearest(QUERY, k, 5)
            assert [text for _, text in got] == [TEXTS[i] for i in best]
            assert_allclose([cosine for cosine, _ in got], wanted[best], atol=2e-3)
            assert abs(trial.cosine(QUERY, TEXTS[3], k) - wanted[3]) < 2e-3


def test_the_page_computes_what_it_is_asked(demo, embedder):
    page = demo.page(trial := demo.Trial(embedder, TEXTS), "title")
    functions = {f.api_name: f.fn for f in page.fns.values()}
    search, compare = functions["search"], functions["similarity"]
    plain, white = search(QUERY, 4)
    for table, k in ((plain, None), (white, 4)):
        assert table == [[f"{cosine:.4f}", text] for cosine, text in trial.nearest(QUERY, k, 10)]
    assert search("\u200b", 4) == [[], []] and compare("a", "\u200b", 4) == ""
    plain, white = (f"{trial.cosine('a cat', 'a dog', k):.4f}" for k in (None, 4))
    assert compare("a cat", "a dog", 4) == f"{plain} as it is, {white} whitened to 4 components"


def test_what_cannot_be_shown_is_one_line(demo, source, tmp_path, capsys, monkeypatch):
    (tmp_path / "few.txt").write_text("one\none\n")
    assert cli.main(["demo", source, str(tmp_path / "few.txt")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    monkeypatch.setitem(sys.modules, "whitenedcse.serving.demo", None)
    assert cli.main(["demo", source, str(tmp_path / "few.txt")]) == 2
    assert "pip install 'whitenedcse[demo]'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_answers_its_own_page_and_no_other_site(demo, source, tmp_path, monkeypatch, capsys):
    (tmp_path / "x.txt").write_text("\n".join(TEXTS))
    statuses, evil = [], ("http://evil.example", "null")  # whose pages may not read the answer

    def visited(blocks):
        host = re.search(r"127\.0\.0\.1:\d+", capsys.readouterr().out)[0]
        asked = {"data": ["a cat", "a dog", 4]}
        for origin in (None, f"http://{host}", *evil):
            for path, body in (("/config", None), ("/gradio_api/call/similarity", json.dumps(asked))):
                link = http.client.HTTPConnection(host, timeout=30)
                content = {"Content-Type": "application/json", **({"Origin": origin} if origin else {})}
                link.request("POST" if body else "GET", path, body, content)
                answer = link.getresponse()
                shared = answer.headers.get("Access-Control-Allow-Origin")
                statuses.append("read" if origin in evil and shared in ("*", origin) else answer.status)
        blocks.close()

    monkeypatch.setattr(demo.gr.Blocks, "block_thread", visited)
    assert cli.main(["demo", source, str(tmp_path / "x.txt")]) == 0
    assert statuses == [200] * 8
