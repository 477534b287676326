"""Hooks of mkdocs (mkdocs.yml): files that pages link to outside docs/ are in the site too; formulas are MathML."""

import html
import os
import re
from collections.abc import Callable
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add each file that a page links to, and what those pages link to."""
    waiting = [Path(file.abs_src_path or "") for file in files.documentation_pages()]
    while waiting:
        page = waiting.pop()
        for _, target, _ in LINK.findall(page.read_text()):
            path = (page.parent / target).resolve()
            if path.is_file() and in_site(path) not in files.src_uris:
                files.append(File.generated(config, in_site(path), abs_src_path=str(path)))
                waiting += [path] * (path.suffix == ".md")
    return files


def in_site(path: Path) -> str:
    """Where a file of the repository is in the site: docs/ is its root, other folders keep their names."""
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else DOCS.parent).as_posix()


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Rewrite links; a folder has no page in the site, so that only its name stays."""
    return LINK.sub(link_of(page), markdown)


def link_of(page: Page) -> Callable[[re.Match[str]], str]:
    """What replaces a link of this page; one that leads nowhere stays, and ends the build by --strict."""
    source = Path(page.file.abs_src_path or "")
    folder = Path(page.file.src_uri).parent

    def replaced(link: re.Match[str]) -> str:
        path = (source.parent / link[2]).resolve()
        if path.is_file():
            return f"[{link[1]}]({os.path.relpath(in_site(path), folder)}{link[3] or ''})"
        return link[1] if path.is_dir() else link[0]

    return replaced


def on_page_content(content: str, **_: object) -> str:
    """LaTeX as MathML, which browsers draw without a script."""
    kinds = {"span": "inline", "div": "block"}
    return FORMULA.sub(lambda found: convert(html.unescape(found[2]), display=kinds[found[1]]), content)
