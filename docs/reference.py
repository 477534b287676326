"""The page reference.md of the site: the public names with their signatures and docstrings (hooks.py)."""

import inspect
import re

import whitenedcse

GROUPS: dict[str, dict[str, str]] = {  # public names, and those of their members that are described
    "Train and evaluate": {
        "train": "",
        "evaluate": "",
        "Run": "tests results scores best_score settings facts series items began",
    },
    "Encode, whiten, search": {
        "Embedder": "load encode similarity save embed",
        "Pooling": "",
        "Postprocess": "fit partial_fit transform save load mean matrix variances",
        "whitened": "",
        "export": "",
        "readout": "",
        "Index": "build add query save load",
    },
    "Parts of a training": {
        "ContrastiveTraining": "",
        "SentenceData": "description",
        "ContrastiveLoss": "__call__",
        "Matryoshka": "__call__",
        "CovariancePenalty": "",
        "pretrained": "",
        "LoRA": "",
        "ProjectionHead": "forward",
    },
    "Whitening as a PyTorch module": {"Whitener": ""},
}
BEGINNING = """# Reference

Every name with a heading is imported from `whitenedcse`. This page is made from the docstrings when the site
is built; `help(whitenedcse.train)` prints the same text. In shapes, n is the number of sentences, v of views
of each, and k of components kept; d is the width of a vector. Some examples also need `import numpy as np`,
`import torch` and `from whitenedcse.training.loss import Step`.
"""


def page() -> str:
    """The whole page."""
    sections = [
        f"## {title}\n\n" + "\n".join(map(entry, names, names.values())) for title, names in GROUPS.items()
    ]
    return "\n".join([BEGINNING, *sections])


def entry(name: str, members: str) -> str:
    """The section of one public name: its signature, its docstring, and those of some of its members."""
    symbol = getattr(whitenedcse, name)
    parts = [f"### {name}\n", f"```py\n{signature(name, symbol)}\n```\n", text(symbol)]
    for key in members.split():
        member = inspect.getattr_static(symbol, key)
        parts.append(f"**`{described(key, member)}`** {prose(member)}\n")
    return "\n".join([*parts, *filter(None, [sources(symbol, "\n".join(parts))])])


def described(name: str, member: object) -> str:
    """A method with the names of its arguments, or a property."""
    function = getattr(member, "__func__", member)
    if not inspect.isfunction(function):
        return name
    names = [key for key in inspect.signature(function).parameters if key not in ("self", "cls")]
    return f"{name}({', '.join(names)})"


def signature(name: str, symbol: object) -> str:
    """A signature in one line, or an argument a line."""
    text = re.sub(r"\bwhitenedcse\.[\w.]*\.(\w+)", r"\1", str(inspect.signature(symbol)))  # type: ignore[arg-type]
    text = re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", text)
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations are kept as strings
    if len(text) < 90:
        return f"{name}{text}"
    inside, _, end = text[1:].rpartition(")")
    return f"{name}(\n    " + re.sub(r", (?=\*|\w+:|\w+=)", ",\n    ", inside) + f"\n){end}"


def text(symbol: object) -> str:
    """A docstring as Markdown: its examples as blocks of code, its arguments as a list."""
    blocks = (inspect.getdoc(symbol) or "").split("\n\n")
    names = list(inspect.signature(symbol).parameters)  # type: ignore[arg-type]
    return "\n".join(f"```pycon\n{b}\n```\n" if ">>>" in b else f"{listed(b, names)}\n" for b in blocks)


def listed(block: str, names: list[str]) -> str:
    """A paragraph, in which each explanation of an argument begins a line of a list."""
    one = f"(?:{'|'.join(names)})"
    before, *parts = re.split(rf"(?:^|(?<=[.;] ))({one}(?:, {one})*): ", " ".join(block.split()))
    if before or not parts:
        return " ".join(block.split())
    parts[-1], raises, what = parts[-1].partition(" Raises ")
    items = [f"- `{name}`: {said.strip()}" for name, said in zip(parts[::2], parts[1::2], strict=True)]
    return "\n".join([*items, *([f"\nRaises {what}"] if raises else [])])


def sources(symbol: object, section: str) -> str:
    """The references that a section names as [1], from the docstring of the module."""
    module = inspect.getdoc(inspect.getmodule(symbol)) or ""
    known = dict(re.findall(r"\[(\d)\] (.+?)(?=    \[\d|$)", module, re.MULTILINE))
    prose = re.sub(r"```.*?```", "", section, flags=re.DOTALL)
    named = [f"[{key}] {known[key]}" for key in sorted(known) if f"[{key}]" in prose]
    return f"{'. '.join(named)}.\n" if named else ""


def prose(member: object) -> str:
    """A docstring as one paragraph, without its examples."""
    blocks = (inspect.getdoc(member) or "").split("\n\n")
    return " ".join(word for block in blocks if ">>>" not in block for word in block.split())
