"""A page of a run or a sweep: what was logged and nothing else, in one file."""

import base64
import html
import io
import re
from html.parser import HTMLParser

from matplotlib.image import imread
from report_runs import SCORES, swept, trained

from whitenedcse.report import charts, page

HEALTH = {
    "dev/effective_rank": {0: 3.0, 50: 5.0, 100: 6.0},
    "dev/variance_top1": {0: 0.7, 50: 0.4, 100: 0.3},
    "dev/variance_top2": {0: 0.8, 50: 0.6, 100: 0.5},
    "train/diversity_before": {10: 0.5, 60: 0.4, 90: 0.3},
    "train/diversity_after": {10: 1.1, 60: 1.2, 90: 1.3},
}
HOSTILE = "<script>document.title='x'</script>&\"'$a_b$ {{7}}"


def written(folder):
    """The page's text."""
    return page.write([str(folder)], None, None)[1][0].read_text()


class Elements(HTMLParser):
    """Every start tag with its attributes, and the texts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data.strip())

    @property
    def charts(self):
        return [attributes["alt"] for tag, attributes in self.tags if tag == "img"]


def test_a_run_says_what_it_is_with_a_chart_for_each_thing_that_was_logged(tmp_path):
    full = Elements(written(trained(tmp_path / "full", average=66.25, series=HEALTH)))
    assert full.charts == [*charts.CHARTS, "Alignment and uniformity"]
    assert {"finished", "c.txt", "c0ffee", "2 CPU cores", "61.00", "70.00", "66.25"} <= set(full.words)
    for tag, attributes in full.tags:
        if tag == "img":
            kind, _, data = attributes["src"].partition(",")
            image = imread(io.BytesIO(base64.b64decode(data)))
            assert kind == "data:image/png;base64" and min(image.shape[:2]) > 300
            assert image[..., :3].std() > 0.01
    unfinished = trained(tmp_path / "unfinished", finished=False)
    page = Elements(written(unfinished))
    assert "NOT FINISHED" in page.words and "Dev score" in page.charts
    (unfinished / "metrics.csv").unlink()
    assert Elements(written(unfinished)).charts == []


def test_a_sweep_opens_with_a_verdict_the_chart_of_differences_and_what_all_runs_share(tmp_path):
    folder = swept(tmp_path / "s")
    text = written(folder)
    assert text == written(folder)  # the same runs make the same bytes
    found = Elements(text)
    sources = [v for _, a in found.tags for k, v in a.items() if k in ("src", "href")]
    assert sources and all(source.startswith("data:") for source in sources)  # nothing from outside
    assert found.charts[0] == "Difference of the test average (all)"
    at = [text.index(mark) for mark in ('class="verdict"', "Difference of the", 'class="facts"', "<table>")]
    assert at == sorted(at)
    assert "better than simcse by test average (all): whitenedcse" in text
    assert "c0ffee" in found.words and "c.txt" in found.words
    assert "head.whitening.eps: 0.1" in text and "train.py seed=1" in text  # in the details
    listed = re.findall(r'<li><span style="color:(.*?)">(.*?)</span>(.*?)</li>', text)
    looks = [(*charts.look(i), label) for i, label in enumerate(SCORES)]
    assert listed == [(colour, charts.MARKS[mark], label) for colour, mark, label in looks]


def test_what_comes_from_files_is_text(tmp_path):
    name = HOSTILE.replace("/", "|")
    folder = trained(tmp_path / "s" / name, 1, system=HOSTILE, average=60.0, data__corpus=HOSTILE)
    trained(tmp_path / "s" / "other", 1, system="_$x$", average=60.0, views=2)
    for text in (written(folder), written(tmp_path / "s")):
        assert "<script" not in text and "&lt;script" in text and HOSTILE in html.unescape(text)
        assert not {"script", "iframe"} & {tag for tag, _ in Elements(text).tags}


def test_what_all_runs_share_is_what_each_of_them_has_alike():
    assert page.same([{"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 0}, {"a": 1, "c": 3}]) == {"a": 1}
