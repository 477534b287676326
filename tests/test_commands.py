"""A command that is printed works when a shell is given it as it stands, whatever names are in it."""

import re
import shlex
import subprocess

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from programs import started

from whitenedcse.console import override, quoted

NAMES = "it's.tsv a,b.txt über [x] a=b $HOME ~ `ls` a\"b a\\b a\\ \\' 12 1e5 true null NaN #1 {a:b} a;b * !x"
NAMES = [*NAMES.split(), "日本", "é'\\,", "(1)", "two words", "", " "]
PLAIN = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=20)


def in_shell(words):
    """The words that a shell makes of a command line."""
    line = subprocess.run(["bash", "-c", f"printf '%s\\0' {words}"], capture_output=True, check=True).stdout
    return line.decode().split("\0")[:-1]


def read(word):
    """The value of a setting as Hydra reads it."""
    return OverridesParser.create().parse_override(word).value()


def test_a_setting_comes_through_shell_and_hydra_as_it_was():
    every = [*NAMES, [*NAMES], {"a": "it's"}, None, 0.5, True]
    words = in_shell(" ".join(override("x.y", value) for value in every))
    for word, value in zip(words, every, strict=True):
        got = read(word)
        assert str(got) == str(value) if value is None else got == value, word


@given(PLAIN, st.lists(PLAIN, max_size=3))
def test_any_text_comes_through_hydra_and_simple_text_stays_bare(text, several):
    assert read(f"x={quoted(text)}") == text
    (word,) = shlex.split(override("x", several))
    assert read(word) == several
    assert override("model", "outputs/a-1.b") == "model=outputs/a-1.b"


@pytest.fixture
def there(home):
    """A folder with an encoder, a corpus and pairs whose names no shell leaves alone."""
    for name, odd in {"bert": "bért's", "my.txt": "a,b.txt", "pairs.tsv": "it's (1).tsv"}.items():
        (home / name).rename(home / odd)
    return home


def obey(command, cwd):
    """Start what a printed command says, and check that it works; returns what it printed."""
    program, *words = in_shell(command)
    done = started(program, *words, cwd=cwd)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


RUN = "ü's, 1"


@pytest.mark.slow
def test_every_printed_command_works_as_it_is_printed(there):
    names = {"encoder.path": "bért's", "data.corpus": "a,b.txt", "monitor.dev": "it's (1).tsv", "run": RUN}
    small = "trainer.max_steps=2 data.batch_size=8 pooling=mean head.whitening.group_width=2"
    places = " ".join(override(name, value) for name, value in names.items())
    said = obey(f"whitenedcse train encoder=pretrained data=file {small} {places}", there)
    follow = next(line for line in said.splitlines() if line.startswith("next: "))
    (there / "TESTS.csv").write_text((there / "it's (1).tsv").read_text().replace("\t", ","))
    for command in re.split("   ", follow.removeprefix("next: ")):
        obey(command, there)
    pairs, own = override("tasks.names", ["TESTS.csv"]), f"outputs/{RUN}"
    obey(f"whitenedcse evaluate {override('model', own)} {pairs} {override('run', 'x,y')}", there)
    for wrong in (
        f"whitenedcse evaluate {override('compare', [own, 'outputs/x,y'])}",  # one has no tests
        f"whitenedcse report WhitenedCSE/T1 {shlex.quote(own)}",
    ):
        program, *words = in_shell(wrong)
        done = started(program, *words, cwd=there)
        cure = re.search(r"whitenedcse (evaluate .*?)( makes some| \(--debug)", done.stderr)
        assert done.returncode == 2 and cure, done.stderr
        obey(f"whitenedcse {cure[1]} {pairs}", there)
