"""A short form of bench/flips.py: of every file, some damages are refused, rebuilt or harmless."""

import random

import pytest

from bench import flips


@pytest.mark.slow
def test_no_damage_of_any_file_changes_what_is_read(tmp_path, monkeypatch, count=5):
    monkeypatch.setenv("WHITENEDCSE_CACHE", str(tmp_path / "cache"))
    artefacts = flips.project(tmp_path, quick=True)
    rows = list(flips.studied(artefacts, count, random.Random(count)))
    assert {name for name, _, _ in rows} == {artefact.name for artefact in artefacts}
    bad = [
        (name, file, said) for name, file, counts in rows for said in counts if said not in flips.KINDS[:3]
    ]
    assert bad == [] and sum(counts.total() for _, _, counts in rows) > 60 * count


def test_what_changes_unnoticed_is_counted(tmp_path):
    """A reader that checks nothing, one that says nothing of use, and one that fails."""
    path = tmp_path / "x"
    path.write_bytes(b"content")

    def vague():
        if path.read_bytes() != b"content":
            raise ValueError("no")

    def broken():
        return {b"content": 1}[path.read_bytes()]

    for read, verdict in (
        (path.read_bytes, "SILENT"),
        (vague, "unclear: no"),
        (broken, "traceback: KeyError"),
    ):
        artefact = flips.Artefact("x", tmp_path, read)
        ((_, _, counts),) = flips.studied([artefact], 20, random.Random(0))
        assert all(said.startswith(verdict) for said in counts) and counts.total() > 15
        assert path.read_bytes() == b"content"
