"""Change one expression of a module at random and see whether a test fails, for every module of the package.

    pip install pytest-cov
    python tests/mutate.py --mutants 120 --seed 0 --marked "not slow" --out results/mutation/quick.csv

A first run of the suite with coverage says which test reads which line. One expression of each module is
drawn, and more of any until there are `--mutants`: a comparison, an operator, a number or a truth value is
replaced, or a statement left out. A mutant is killed if one of the tests that read its line fails; the
fastest run first, for at most `--seconds` in all.
"""

import argparse
import ast
import copy
import csv
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[1]
PAIRS = "Lt LtE, Gt GtE, Eq NotEq, In NotIn, Is IsNot, And Or, Add Sub, Mult Div, BitOr BitAnd"
OTHER = {}
for one, other in (pair.split() for pair in PAIRS.split(", ")):
    OTHER |= {getattr(ast, one): getattr(ast, other), getattr(ast, other): getattr(ast, one)}
OTHER |= {ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult, ast.Mod: ast.Mult, ast.MatMult: ast.Add}


def mutants(source):
    """(line, start, end, text): each replaces source[start:end] by text."""
    tree = ast.parse(source)
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    skipped = set()
    for node in ast.walk(tree):
        hints = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        skipped |= {id(part) for hint in hints if hint is not None for part in ast.walk(hint)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        for changed in changes(node):
            places = ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
            start, end = (starts[line - 1] + column for line, column in places)
            text = "pass" if isinstance(changed, ast.Pass) else f"({ast.unparse(changed)})"
            yield node.lineno, start, end, text


def changes(node):  # noqa: C901
    """Other nodes to stand in the place of one."""
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            if type(operator) in OTHER:
                other = copy.deepcopy(node)
                other.ops[i] = OTHER[type(operator)]()
                yield other
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OTHER:
        other = copy.deepcopy(node)
        other.op = OTHER[type(node.op)]()
        yield other
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
        value = node.value
        yield ast.Constant(
            not value if type(value) is bool else value + 1 if type(value) is int else 2 * value + 1
        )
    elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield ast.Pass()


def pytest(folder, *arguments, seconds=None):
    """The exit code of the suite in a clone; None where it takes too long."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    env = os.environ | {"PYTHONPATH": str(folder)}
    try:
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        return None


def readers(folder, marked):
    """The passing tests that read a line of a file, the fastest first; and the seconds of each test."""
    report = folder / "tests.xml"
    pytest(folder, "-m", marked, "--cov=whitenedcse", "--cov-context=test", f"--junitxml={report}")
    seconds = {}
    for case in ET.parse(report).iter("testcase"):
        if not case.get("classname"):  # an entry of no test
            continue
        name = f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}"
        if case.find("failure") is None and case.find("error") is None:
            seconds[name] = float(case.get("time"))
    sys.path.insert(0, str(folder))
    from coverage import CoverageData

    data = CoverageData(basename=str(folder / ".coverage"))
    data.read()
    lines = {}
    for file in data.measured_files():
        for line, contexts in data.contexts_by_lineno(file).items():
            names = {re.sub(r"\|(run|setup|teardown)$", "", context) for context in contexts} & set(seconds)
            lines[str(Path(file).relative_to(folder)), line] = sorted(names, key=seconds.__getitem__)
    return lines, seconds


def fate(folder, path, mutant, known, limit):
    """Whether a mutant is killed, and by how many tests it could have been."""
    line, start, end, text = mutant
    lines, seconds = known
    names, total = [], 0.0
    for name in lines.get((path, line), []):
        total += seconds[name]
        if total > limit and names:
            break
        names.append(name)
    file = folder / path
    source = file.read_bytes()
    if not names:  # read while the module is imported, or by no test: the files that name the module
        module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        parent, _, stem = module.rpartition(".")
        named = re.compile(rf"\b{re.escape(module)}\b|from {re.escape(parent)} import .*\b{stem}\b")
        names = [str(p) for p in (folder / "tests").rglob("test_*.py") if named.search(p.read_text())]
    if not names:
        return "survived", 0
    file.write_bytes(source[:start] + text.encode() + source[end:])
    try:
        code = pytest(folder, "-x", "-n", "0", "-m", "", *names[:400], seconds=3 * limit + 60)
    finally:
        file.write_bytes(source)
    return {0: "survived", None: "timed out"}.get(code, "killed"), len(names)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tree", default="HEAD", help="the commit whose modules and tests are taken")
    parser.add_argument("--mutants", type=int, default=120, help="at least one for each module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--marked", default="not slow")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="mutation-"))
    free = Queue()
    for i in range(arguments.jobs):
        subprocess.run(["git", "clone", "-q", ROOT, home / str(i)], check=True)
        subprocess.run(["git", "checkout", "-q", arguments.tree], cwd=home / str(i), check=True)
        free.put(home / str(i))
    known = readers(home / "0", arguments.marked)
    draw = random.Random(arguments.seed)
    files = sorted((home / "0/whitenedcse").rglob("*.py"))
    every = {file: draw.sample(pool := sorted(set(mutants(file.read_text()))), len(pool)) for file in files}
    drawn = [(file, choices.pop()) for file, choices in every.items() if choices]
    rest = [(file, mutant) for file, choices in every.items() for mutant in choices]
    drawn += draw.sample(rest, max(0, arguments.mutants - len(drawn)))
    tasks = [(str(file.relative_to(home / "0")), mutant) for file, mutant in sorted(drawn)]

    def run(task):
        folder = free.get()
        try:
            return task, fate(folder, *task, known, arguments.seconds)
        finally:
            free.put(folder)

    with arguments.out.open("w") as out, ThreadPoolExecutor(arguments.jobs) as pool:
        rows = csv.writer(out, lineterminator="\n")
        rows.writerow(["module", "line", "mutant", "fate", "tests"])
        for (path, (line, start, end, text)), (what, count) in pool.map(run, tasks):
            was = (home / "0" / path).read_bytes()[start:end].decode()
            rows.writerow([path, line, f"{was} -> {text}", what, count])
            out.flush()
    shutil.rmtree(home)


if __name__ == "__main__":
    main()
