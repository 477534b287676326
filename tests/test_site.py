"""docs/ as a web site: built from mkdocs.yml, whole, without a dead link, and reading it needs no network."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlparse

import pytest
import yaml
from programs import ROOT

DOCS = sorted((ROOT / "docs").glob("*.md"))
NEEDED = ("mkdocs", "material", "latex2mathml")
mkdocs = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, NEEDED)), reason="needs pip install -e '.[docs]'"
)
LOADS = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "object": "data"}


def build(root, out):
    """What mkdocs says, as `make docs` runs it."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


class Elements(HTMLParser):
    """Links of a page, what it loads, and its formulas."""

    def __init__(self, page):
        super().__init__()
        self.links, self.loads, self.names, self.formulas = [], [], set(), 0
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.names |= {found.get("id"), found.get("name")}
        self.formulas += tag == "math"
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if found.get(LOADS.get(tag)):
            self.loads.append(found[LOADS[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert done.returncode == 0, done.stderr
    return out


def pages(site):
    return {path: Elements(path) for path in site.rglob("*.html")}


@mkdocs
@pytest.mark.slow
def test_every_page_is_there_and_what_none_links_to_is_not(site):
    assert {page.with_suffix(".html").name for page in DOCS} <= {path.name for path in site.glob("*.html")}
    assert (site / "results/study/study.png").exists() and not (site / "whitenedcse").exists()


@mkdocs
@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site):
    for path, page in pages(site).items():
        assert page.loads and [link for link in page.loads if urlparse(link).netloc] == [], path
        styles = re.findall(r"style=\"[^\"]*\"|<style.*?</style>", path.read_text(), re.DOTALL)
        assert not re.search(r"url\(\W*(https?:)?//|@import", "".join(styles)), path
        assert "mermaid" not in path.read_text()  # which the theme would fetch
    sheets = list(site.rglob("*.css"))
    assert len(sheets) > 2
    for sheet in sheets:
        assert not re.search(r"url\([\"']?(https?:)?//|@import", sheet.read_text()), sheet


@mkdocs
@pytest.mark.slow
def test_every_link_leads_to_a_file_and_a_heading(site):
    all_pages = pages(site)
    for path, page in all_pages.items():
        if path.name == "404.html":
            continue
        for link in page.links:
            parts = urlparse(link)
            if not parts.scheme:
                target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
                assert target.is_file(), f"{path}: {link}"
                if parts.fragment and target in all_pages:
                    assert unquote(parts.fragment) in all_pages[target].names, f"{path}: {link}"


@mkdocs
@pytest.mark.slow
def test_formulas_are_drawn(site):
    written = len(re.findall(r"\$\$?[^$]+\$\$?", (ROOT / "docs/method.md").read_text()))
    assert Elements(site / "method.html").formulas == written > 50
    # what browsers without a font for mathematics do not stretch
    assert "overline" not in (ROOT / "docs/method.md").read_text()
    assert 'arithmatex">\\' not in (site / "method.html").read_text()


@mkdocs
@pytest.mark.slow
def test_a_dead_link_ends_the_build(tmp_path):
    links = ["none.md", "../results/none.md", "../CHANGELOG.md#none"]
    (tmp_path / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0])
    shutil.copy(ROOT / "CHANGELOG.md", tmp_path)
    shutil.copytree(ROOT / "docs/assets", tmp_path / "docs/assets")
    shutil.copy(ROOT / "docs/hooks.py", tmp_path / "docs")
    (tmp_path / "docs/reference.py").write_text("page = lambda: '# all names'\n")
    (tmp_path / "docs/index.md").write_text("# one\n\n" + "".join(f"[dead]({link})\n" for link in links))
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0 and all(link.rpartition("/")[2] in done.stderr for link in links)


def listed(nav):
    """Every page of a navigation, through its groups."""
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in listed(entry)]


def test_each_page_is_in_the_navigation():
    names = listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert {page.name for page in DOCS} <= set(names) and len(names) == len(set(names))
