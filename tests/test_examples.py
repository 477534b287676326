"""The examples in docstrings: all print what they say, and every symbol of the method has one."""

import ast
import doctest
import importlib
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
FILES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.glob("whitenedcse/**/*.py"))}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(file):
    """Name and docstring of all that has one, decorated functions too, which doctest's own finder skips."""
    nodes = [node for node in ast.walk(ast.parse(FILES[file])) if isinstance(node, DOCUMENTED)]
    return [(getattr(node, "name", file), doc) for node in nodes if (doc := ast.get_docstring(node))]


@pytest.mark.parametrize("file", [file for file in FILES if ">>> " in FILES[file]])
def test_examples_print_what_they_say(file, capsys):
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False)
    torch.manual_seed(0)
    for name, doc in docstrings(file):
        runner.run(parser.get_doctest(doc, vars(module).copy(), name, file, None))
    assert runner.tries == FILES[file].count(">>> ")
    assert runner.failures == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", ["whitening", "model/head"])
def test_every_public_symbol_of_the_method_has_an_example(name):
    file = f"whitenedcse/{name}.py"
    symbols = [node for node in ast.parse(FILES[file]).body if isinstance(node, DOCUMENTED)]
    public = {node.name for node in symbols if not node.name.startswith("_")}
    shown = {name for name, doc in docstrings(file) if ">>> " in doc}
    assert public and public - shown == set()
