"""From an encoder and scored pairs to its best readout: what is found, what is folded in, what is refused."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from encoders import SENTENCES, embedder_of
from numpy.testing import assert_allclose

import whitenedcse
from whitenedcse.app import cli
from whitenedcse.evaluation.layers import spearman_columns
from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.evaluation.readout import Choice, Spectrum, maps
from whitenedcse.evaluation.scores import cosine
from whitenedcse.evaluation.tasks import Subset
from whitenedcse.model.embedder import Embedder
from whitenedcse.serving.fit import whitened
from whitenedcse.serving.readout import Found, grids, matrix, needed, readout, verdict, write

TEXTS = [f"{a} {b}" for a in SENTENCES for b in SENTENCES]
RNG = np.random.default_rng(0)
LEFT, RIGHT = (list(RNG.choice(TEXTS, 120)) for _ in range(2))


@pytest.fixture
def plain(bert):
    return embedder_of(bert, kind="cls").eval()


def scored_by(embedder):
    """Pairs whose gold scores are, but for a little noise, the cosines of another readout of the encoder."""
    other = embedder_of(embedder.encoder, kind="mean", layers=(1,)).eval()
    better = whitened(other, Postprocess("whitening", k=8).fit(other.encode(TEXTS)))
    gold = cosine(better.encode(LEFT), better.encode(RIGHT))
    return Subset("made", LEFT, RIGHT, gold + 0.05 * RNG.normal(size=len(gold)))


def written(pairs, path):
    with open(path, "w") as stream:
        rows = csv.writer(stream, delimiter="\t")
        rows.writerow(["sentence1", "sentence2", "score"])
        rows.writerows(zip(pairs.left, pairs.right, pairs.gold, strict=True))


def test_the_embedder_with_the_chosen_readout_has_the_cosines_that_chose_it(plain, tmp_path):
    pairs = scored_by(plain)
    found = readout(plain, TEXTS, pairs)
    assert found.choice.shown and found.best.pooling == "mean"
    assert str(found).startswith(f"chosen: {found.best}; ")
    found.embedder.save(tmp_path / "model")
    for embedder in (found.embedder, Embedder.load(tmp_path / "model")):
        own = cosine(embedder.encode(LEFT), embedder.encode(RIGHT))
        score = spearman_columns(pairs.gold, own[:, None])[0]
        assert score == pytest.approx(found.choice.scores[found.choice.best], abs=0.2)  # float32, k axes
    assert found.choice.scores[found.choice.best] > found.choice.own + 5


def test_each_map_is_folded_as_its_transform_with_as_many_components():
    draw = np.random.default_rng(2)
    x = draw.normal(size=(300, 8)) @ draw.normal(size=(8, 8))
    spectrum = Spectrum.of(x.mean(axis=0), np.cov(x.T, bias=True))
    for one in maps(8, 300)[1:]:
        ours = (x - x.mean(axis=0)) @ matrix(one, spectrum)
        theirs = Postprocess(**one.settings).fit(x).transform(x)
        assert ours.shape == theirs.shape, one
        assert_allclose(ours @ ours.T, theirs @ theirs.T, atol=1e-8, err_msg=str(one))  # axes have no sign


def test_a_readout_that_is_no_better_leaves_the_embedder_as_it_is(plain, tmp_path):
    own = cosine(plain.encode(LEFT), plain.encode(RIGHT))
    found = readout(plain, TEXTS, Subset("own", LEFT, RIGHT, own))
    assert not found.choice.shown and found.embedder is plain
    assert "leave it as it is" in grids(found)[1].notes[0]
    write(found, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"readouts.csv", "readouts.png"}
    embedder_of(plain.encoder, kind="mean").save(tmp_path / "model")  # what an earlier call chose
    write(found, tmp_path)
    assert_allclose(Embedder.load(tmp_path / "model").encode(LEFT), plain.encode(LEFT), atol=1e-6)


def test_pairs_that_a_file_has_twice_say_what_they_say_once(plain):
    gold = RNG.normal(size=len(LEFT))
    once, twice = (
        readout(plain, TEXTS, Subset("luck", *pairs)).choice
        for pairs in ((LEFT, RIGHT, gold), (LEFT + RIGHT, RIGHT + LEFT, np.tile(gold, 2)))
    )
    assert twice[2:] == pytest.approx(once[2:], abs=1e-3)


def test_a_set_of_layers_is_shown_where_none_of_its_parts_scores_as_much():
    scores = {("cls", (6,)): 80.0, ("cls", (0, 6)): 80.05, ("cls", (1, 6)): 80.2, ("cls", (0, 1, 6)): 80.25}
    scores |= {("mean", (0,)): 70.0, ("mean", (0, 6)): 81.0}
    assert needed(scores) == [("mean", (0, 6)), ("cls", (1, 6)), ("cls", (6,)), ("mean", (0,))]
    assert len(needed({("mean", (i,)): float(i) for i in range(20)})) == 8


def test_without_pairs_layers_are_described_and_nothing_is_recommended(plain):
    found = whitenedcse.readout(plain, TEXTS)
    assert found.best is None and found.embedder is plain and len(found.facts) == 2 * 4
    x = embedder_of(plain.encoder, kind="mean", layers=(2,)).eval().encode(TEXTS).astype(np.float64)
    variances = np.linalg.eigvalsh(np.cov(x.T, bias=True))[::-1]
    assert found.facts["mean", 2]["top"] == pytest.approx(variances[0] / variances.sum(), abs=1e-4)


def test_the_command_writes_an_encoder_that_other_commands_read(with_bert, capsys):
    embedder = Embedder.load("bert")
    pairs = scored_by(embedder)
    written(pairs, "pairs.tsv")
    (with_bert / "my.txt").write_text("\n".join(TEXTS))
    assert cli.main(["readout", "bert", "my.txt", "--pairs", "pairs.tsv", "--out", "it's found"]) == 0
    said = capsys.readouterr().out
    for command in ("""whitenedcse export 'it'"'"'s found/model' EXPORT""", "whitenedcse evaluate 'model='"):
        assert command in said and "effective rank" in said
    found = {path.name for path in (with_bert / "it's found").iterdir()}
    assert found == {"model", "readouts.csv", "readouts.png"}
    x = Embedder.load("it's found/model").encode(LEFT[:2])
    assert np.isfinite(x).all()
    to = ["--to", "sentence-transformers", "--no-verify"]
    assert cli.main(["export", "it's found/model", "exported", *to]) == 0
    card = Path("exported/README.md").read_text()
    assert re.search(rf"\n- \w+, \d+ components, fitted to {len(TEXTS)} texts of my.txt\n", card)


def test_evaluate_py_scores_the_readout_that_pairs_choose_and_leaves_alone_what_gains_nothing(with_bert):
    embedder = Embedder.load("bert")
    (with_bert / "my.txt").write_text("\n".join(TEXTS))
    luck = Subset("luck", LEFT, RIGHT, np.random.default_rng(1).normal(size=len(LEFT)))
    for name, pairs, gains in (("better", scored_by(embedder), True), ("luck", luck, False)):
        written(pairs, f"{name}.tsv")
        settings = {"protocol": "readout", "pairs": f"{name}.tsv", "tasks.names": [f"{name}.tsv"]}
        settings["fit"] = "my.txt"
        run = whitenedcse.evaluate("bert", settings=settings, output=f"outputs/{name}")
        plain, chosen = (row["sts"]["avg"]["all"] for row in run.results["rows"])
        found = readout(embedder, TEXTS, f"{name}.tsv")
        best = found.choice.scores[found.choice.best]
        assert best > plain + 5 and chosen == pytest.approx(best if gains else plain, abs=0.05)
    with pytest.raises(ValueError, match="a readout is fitted to a corpus"):
        whitenedcse.evaluate("bert", settings=settings | {"fit": "target"}, output="outputs/target")


def test_bad_input_is_one_clear_line(with_bert, capsys):
    (with_bert / "my.txt").write_text("\n".join(TEXTS))
    (with_bert / "few.tsv").write_text("sentence1\tsentence2\tscore\na\tb\t1\nc\td\t2\n")
    (with_bert / "one.txt").write_text("a text\n")
    for words, said in {
        ("bert", "my.txt", "--pairs", "few.tsv"): "2 pairs are too few to choose a readout",
        ("bert", "one.txt"): "1 texts: a whitening is fitted to two or more",
    }.items():
        assert cli.main(["readout", *words]) == 2
        assert said in capsys.readouterr().err


def test_a_loss_is_not_said_to_include_zero():
    lost = Choice(best=0, scores=np.array([50.0]), own=60.0, gain=-9.4, low=-11.9, high=-7.0)
    assert verdict(Found({}, [], lost, None), lost).endswith("gains -9.40 (-11.90 .. -7.00), a loss")
