"""Write docs/python.md, the public names with their signatures and docstrings: python docs/python.py"""

import inspect
import re
from pathlib import Path

import whitenedcse

GROUPS: dict[str, dict[str, str]] = {  # public names, and those of their members that are described
    "Train and evaluate": {
        "train": "",
        "evaluate": "",
        "Run": "embedder results scores best_score settings facts series items began",
    },
    "Encode, whiten, search": {
        "Embedder": "load encode save embed",
        "Pooling": "",
        "Postprocess": "fit partial_fit merge transform inverse_transform save load mean matrix variances",
        "whitened": "",
        "Index": "build add query save load",
    },
    "Parts of a training": {
        "ContrastiveTraining": "",
        "SentenceData": "counts",
        "MultiPositiveLoss": "__call__",
        "Matryoshka": "__call__",
        **dict.fromkeys(["VICReg", "BarlowTwins", "WMSE", "SIGReg", "CovariancePenalty", "TraceLoss"], ""),
        "pretrained": "",
        "LoRA": "",
        "ProjectionHead": "forward",
    },
    "Whitening as PyTorch modules": {"ShuffledGroupWhitening": "", "GroupWhitening": "", "Whitening": ""},
}
BEGINNING = """# The library in Python

You want to train, evaluate, encode, whiten or search from your own Python code. Everything here is imported
from `whitenedcse`. There are scripts for a [training](../examples/own_text.py),
[search](../examples/whiten_and_search.py), a [Lightning script](../examples/lightning_script.py), a
[PyTorch loop](../examples/plain_pytorch.py) and
[sentence-transformers' trainer](../examples/sentence_transformers_loss.py).

```python
import whitenedcse

run = whitenedcse.train("bert-base-uncased", "my.txt", dev="my_pairs.tsv", output="outputs/python")
x = run.embedder.encode(["a sentence", "another one"])
```

Written from the docstrings by `python docs/python.py`; `help(whitenedcse.train)` prints the same.

n: sentences, v: views of each, d: width of a vector, k: components kept.
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
        parts.append(f"**`{described(key, member)}`** {short(member)}\n")
    return "\n".join(parts)


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
    """A docstring as Markdown: its examples and indented lists as blocks of code."""
    blocks = (inspect.getdoc(symbol) or "").split("\n\n")
    shown = [block.replace("  # doctest: +ELLIPSIS", "") for block in blocks]
    return "\n".join(f"```pycon\n{b}\n```\n" if ">>>" in b else f"{listed(b)}\n" for b in shown)


def listed(block: str) -> str:
    """A paragraph, in which each line that explains an argument begins a line."""
    lines = re.split(r"\n|(?<=\.) (?=[a-z]\w*: )", re.sub(r"\n {4,}", " ", block))
    starts = [re.match(r"(\w+(?:, \w+)*): ", line) for line in lines]
    if not all(starts):
        return " ".join(lines)
    return "\n".join(
        f"- `{start[1]}`: {line[start.end() :]}" for start, line in zip(starts, lines, strict=True) if start
    )


def short(member: object) -> str:
    """The first paragraph of a docstring."""
    return " ".join((inspect.getdoc(member) or "").split("\n\n")[0].split())


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(page())
