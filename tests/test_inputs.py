"""Whatever Python calls a list of texts or a path is taken, or refused by name."""

import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from encoders import SENTENCES, embedder_of

import whitenedcse
from whitenedcse.app import cli
from whitenedcse.data import remote, sources
from whitenedcse.data.corpus import Corpus, read
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.evaluation.tasks import subsets
from whitenedcse.model.encoder import folder
from whitenedcse.report.compare import group
from whitenedcse.serving.encode import arrays
from whitenedcse.serving.readout import readout
from whitenedcse.serving.search import Index


def texts_of(names):
    yield from names


LISTS = {
    "a list": list,
    "a generator": texts_of,
    "a dictionary's keys": lambda x: dict.fromkeys(x).keys(),
    "an array of text": lambda x: np.array(x),
    "a Series": lambda x: pd.Series(x, index=range(9, 9 + len(x))),
}
NO_LISTS = {
    "one text": ("a cat", "str is no list of texts"),
    "a path": (Path("a"), "PosixPath is no list of texts"),
    "a table": (pd.DataFrame({"text": ["a", "b"]}), "DataFrame is no list of texts"),
    "a mapping": ({"text": ["a", "b"]}, "dict is no list of texts"),
    "a set": ({"a", "b"}, "set is no list of texts"),
    "nothing": (None, "NoneType is no list of texts"),
    "a list of bytes": (["a", b"b"], "1 is bytes b'b', not a text"),
    "a null": (pd.Series(["a", None, "c"]), "1 is .*, not a text"),
}


def test_texts_are_taken_from_any_sequence_and_never_from_a_table_by_accident(bert):
    embedder = embedder_of(bert, kind="mean").eval()
    x = embedder.encode(SENTENCES)
    assert embedder.encode([]).shape == (0, 16)
    np.testing.assert_allclose(embedder.encode(SENTENCES[0]), x[0], atol=1e-6)
    hits = Index.build(embedder, SENTENCES).query(SENTENCES, 2)
    for name, listed in LISTS.items():
        if name != "a dictionary's keys":
            np.testing.assert_array_equal(embedder.encode(listed(SENTENCES)), x, err_msg=name)
            assert Index.build(embedder, listed(SENTENCES)).query(listed(SENTENCES), 2) == hits, name
            assert readout(embedder, listed(SENTENCES)).facts, name
    for name, (wrong, words) in NO_LISTS.items():
        for use in (embedder.encode, Index(embedder).add, Index.build(embedder, ["a"]).query):
            one = use == embedder.encode and name == "one text"  # which has one vector
            with nullcontext() if one else pytest.raises(ValueError, match=words):
                use(wrong)
        if name not in ("one text", "a path"):  # which name a file
            with pytest.raises(ValueError, match=words):
                readout(embedder, wrong)


def test_ids_are_of_any_kind_and_never_null(bert):
    embedder = embedder_of(bert).eval()
    for ids in ([3, 1], np.array([3, 1]), pd.Series([3, 1]), ["3", "1"], (i for i in (3, 1))):
        found = Index.build(embedder, ["a cat", "a dog"], ids=ids).query(["a dog"], 2)[0]
        assert {hit.id for hit in found} == {"3", "1"}
    for ids in ([1, None], [float("nan"), 2.0], "ab", pd.DataFrame({"id": [1, 2]}), ["a", " "]):
        with pytest.raises(ValueError, match="id"):
            Index.build(embedder, ["a cat", "a dog"], ids=ids)


def test_home_and_variables_stand_in_every_path(bert, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PLACE", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "c.txt").write_text("\n".join(SENTENCES))
    (tmp_path / "home" / "p.tsv").write_text("sentence1\tsentence2\tscore\na\tb\t1\nc\td\t2\n")
    embedder = embedder_of(bert).eval()
    for here in ("~", "${PLACE}"):
        embedder.save(f"{here}/m")
        Postprocess("pca").fit(embedder.encode(SENTENCES)).save(f"{here}/f.safetensors")
        Index.build(embedder, SENTENCES).save(f"{here}/{len(here)}")
        assert Index.load(f"{here}/{len(here)}") and Postprocess.load(f"{here}/f.safetensors").kind == "pca"
        assert whitenedcse.Embedder.load(f"{here}/m").width == embedder.width
        assert whitenedcse.Embedder(encoder=f"{here}/m") and folder(f"{here}/m").is_dir()
        assert len(list(sources.given(f"{here}/c.txt"))) == len(SENTENCES)
        for name in ("p.tsv", "p.tsv:score:sentence2:score"):
            assert len(subsets(f"{here}/{name}")[0].gold) == 2
        assert remote.fetched(f"{here}/c.txt").is_file() and whitenedcse.Run(f"{here}/r").path.is_absolute()
        for name, place in {"WHITENEDCSE_CACHE": sources.cache, "WHITENEDCSE_DATA": sources.roots}.items():
            monkeypatch.setenv(name, f"{here}/x")
            assert str(tmp_path / "home" / "x") in str(place())
    run = whitenedcse.evaluate("~/m", tasks="~/p.tsv", output="~/e", settings={"draws": 9})
    (found,) = group("~/e").runs.values()
    assert run.path == found.path == tmp_path / "home" / "e"
    assert cli.main(["encode", "~/m", "~/c.txt", str(tmp_path / "home" / "vectors")]) == 0
    assert sum(map(len, arrays(tmp_path / "home" / "vectors"))) == len(SENTENCES)
    os.chdir(tmp_path)
    Path("~").mkdir()
    Path("~/c.txt").write_text("a literal name wins")
    assert list(sources.given("~/c.txt")) == ["a literal name wins"]


def test_what_a_system_hides_in_a_folder_is_no_part_of_it(bert, tmp_path):
    """As macOS and notebooks do, in a folder of tables, of vectors, or where a checkpoint is written."""
    table = "sentence1\tsentence2\tscore\na\tb\t1\nc\td\t2\n"
    for place in ("pairs", "vectors", "best"):
        (tmp_path / place / ".ipynb_checkpoints").mkdir(parents=True)
        for name in (".DS_Store", "._p.tsv", ".p.tsv", ".ipynb_checkpoints/p.tsv"):
            (tmp_path / place / name).write_text("no table")
    (tmp_path / "pairs" / "p.tsv").write_text(table)
    (tmp_path / "c.txt").write_text("\n".join(SENTENCES))
    assert [subset.name for subset in subsets(str(tmp_path / "pairs"))] == ["p"]
    assert len(read(Corpus(str(tmp_path / "pairs"), ("sentence1",)))[0]) == 2
    embedder_of(bert).save(tmp_path / "best")
    assert cli.main(["encode", *(str(tmp_path / name) for name in ("best", "c.txt", "vectors"))]) == 0
    assert sum(map(len, arrays(tmp_path / "vectors"))) == len(SENTENCES)
