"""Hooks of mkdocs: files outside docs/ that pages link to are in the site too, and formulas are MathML."""

import html
import os
import re
from pathlib import Path
from runpy import run_path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
FORMULA = re.compile(r'(class="arithmatex">)\\([(\[])(.*?)\\[)\]](?=</(?:span|div)>)', re.DOTALL)


def in_site(path: Path) -> str:
    """Where a file of the repository is in the site: docs/ is its root, other folders keep their names."""
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else DOCS.parent).as_posix()


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the reference, each file that a page links to, and what those pages link to."""
    files.append(
        File.generated(config, "reference.md", content=run_path(str(DOCS / "reference.py"))["page"]())
    )
    waiting = [Path(file.abs_src_path or "") for file in files.documentation_pages() if file.abs_src_path]
    while waiting:
        page = waiting.pop()
        for link in LINK.finditer(page.read_text()):
            path = (page.parent / link[2]).resolve()
            if path.is_file() and in_site(path) not in files.src_uris:
                files.append(File.generated(config, in_site(path), abs_src_path=str(path)))
                waiting += [path] * (path.suffix == ".md")


def on_nav(nav: Navigation, files: Files, **_: object) -> None:
    """The start page is the home page although it stands in a group."""
    nav.homepage = files.src_uris["index.md"].page


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Rewrite links; of a folder only the name stays; --strict finds those that lead nowhere."""
    source, folder = Path(page.file.abs_src_path or "").parent, Path(page.file.src_uri).parent

    def rewritten(link: re.Match[str]) -> str:
        path = (source / link[2]).resolve()
        if path.is_file():
            return f"[{link[1]}]({os.path.relpath(in_site(path), folder)}{link[3] or ''})"
        return link[1] if path.is_dir() else link[0]

    return LINK.sub(rewritten, markdown)


def on_page_content(content: str, **_: object) -> str:
    """LaTeX as MathML, which browsers draw without a script."""
    displays = {"(": "inline", "[": "block"}
    return FORMULA.sub(lambda f: f[1] + convert(html.unescape(f[3]), display=displays[f[2]]), content)
