"""docs/ as a web site: built from mkdocs.yml, whole, and reading it needs no network."""

import importlib.util
import os
import re
import subprocess
import sys
from urllib.parse import urlparse

import pytest
from programs import ROOT

DOCS = sorted((ROOT / "docs").glob("*.md"))
NEEDED = ("mkdocs", "material", "latex2mathml")
mkdocs = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, NEEDED)), reason="needs pip install -e '.[docs]'"
)
LOADS = r'<(?:script|link|img|iframe|source|object)\b[^>]*?\s(?:src|href|data)="([^"]*)"'


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, as `make docs` builds it."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


@mkdocs
@pytest.mark.slow
def test_every_page_is_there_and_loads_nothing_from_elsewhere(site):
    assert {page.with_suffix(".html").name for page in DOCS} <= {path.name for path in site.glob("*.html")}
    assert (site / "results/study/study.png").exists() and not (site / "whitenedcse").exists()
    for path in site.rglob("*.html"):
        loads = re.findall(LOADS, path.read_text())
        assert loads and [link for link in loads if urlparse(link).netloc] == [], path
        styles = re.findall(r"style=\"[^\"]*\"|<style.*?</style>", path.read_text(), re.DOTALL)
        assert not re.search(r"url\(\W*(https?:)?//|@import", "".join(styles)), path
        assert "mermaid" not in path.read_text()  # which the theme would fetch
    sheets = list(site.rglob("*.css"))
    assert len(sheets) > 2
    for sheet in sheets:
        assert not re.search(r"url\([\"']?(https?:)?//|@import", sheet.read_text()), sheet


@mkdocs
@pytest.mark.slow
def test_formulas_are_drawn(site):
    written = len(re.findall(r"\$\$?[^$]+\$\$?", (ROOT / "docs/method.md").read_text()))
    assert (site / "method.html").read_text().count("<math") == written > 50
    # what browsers without a font for mathematics do not stretch
    assert "overline" not in (ROOT / "docs/method.md").read_text()
    assert 'arithmatex">\\' not in (site / "method.html").read_text()


def test_each_page_is_in_the_navigation():
    names = re.findall(r"\S+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    assert {page.name for page in DOCS} <= set(names) and len(names) == len(set(names))
