"""One encode, every task: numbers equal those of slow loops, transforms are fitted to what they name."""

from functools import partial

import numpy as np
import pytest
from encoders import whitened_by_hand
from evaluation.test_scores import evaluate, naive_cosines, subset
from scipy.stats import spearmanr

from whitenedcse.evaluation.postprocess import Postprocess
from whitenedcse.evaluation.protocol import setting
from whitenedcse.evaluation.statistics import resamples
from whitenedcse.evaluation.suite import System, evaluated, plan, seed
from whitenedcse.evaluation.tasks import Labelled, Subset

WHITENING = partial(Postprocess, kind="whitening")


@pytest.fixture
def tasks():
    return {"A": [subset("p", 20, 0), subset("q", 12, 1), subset("r", 40, 2)], "B": [subset("p", 25, 3)]}


def vector(text):
    return np.random.default_rng(list(text.encode())).standard_normal(6) * [1, 2, 3, 4, 5, 6] + 3


def vectors(texts):
    return np.float32([vector(text) for text in texts])


def system(agenda, *rest):
    return System(vectors(agenda.sentences), *rest)


def result_of(agenda, *rest, classify=None, draws=50):
    return evaluated(system(agenda, *rest), agenda, classify, draws)


def test_vectors_and_their_first_channels_score_as_the_plain_evaluation(tasks):
    agenda = plan(tasks)
    assert agenda.sentences == sorted({t for s in (*tasks["A"], *tasks["B"]) for t in (*s.left, *s.right)})
    for width, transform in ((6, ()), (2, (partial(Postprocess, kind="prefix", k=2),))):  # fitted to nothing
        got = result_of(agenda, *transform).scores["sts"]
        plain = evaluate(tasks, lambda texts, width=width: vectors(texts)[:, :width])
        for name, task in plain["tasks"].items():
            for mean in ("all", "mean", "wmean"):
                assert got["tasks"][name][mean] == pytest.approx(task[mean], abs=1e-9)
        assert got["avg"]["mean"] == pytest.approx(plain["avg"]["mean"], abs=1e-9)


def own(subsets):
    return [t for s in subsets for t in (*s.left, *s.right)]


@pytest.mark.parametrize("on", ["year", "corpus.txt"])
def test_whitening_equals_the_formula_by_hand_on_what_each_transform_is_fitted_to(tasks, on, monkeypatch):
    corpus = [f"c{i % 40}" for i in range(50)]
    monkeypatch.setattr("whitenedcse.evaluation.suite.own_texts", lambda on, name, case: own(tasks[name]))
    agenda = plan(tasks, [on], {"corpus.txt": corpus}.get)
    fits, fit = [], Postprocess.fit
    monkeypatch.setattr(Postprocess, "fit", lambda self, x: fits.append(1) or fit(self, x))
    got = result_of(agenda, WHITENING, on)  # fitted once to a corpus, and for each task to its own
    assert (len(fits), setting(on)) == ((2, "transductive") if on == "year" else (1, "inductive"))
    for name, subsets in tasks.items():
        white = whitened_by_hand(vectors(own(subsets) if on == "year" else corpus))
        cosines = [naive_cosines(white(vectors(s.left)), white(vectors(s.right))) for s in subsets]
        found = got.scores["sts"]["tasks"][name]["subsets"].values()
        for s, mine, number in zip(subsets, cosines, found, strict=True):
            assert number["spearman"] == pytest.approx(100 * spearmanr(s.gold, mine).statistic, abs=1e-6)
        assert got.items[name] == pytest.approx(np.concatenate(cosines), abs=1e-6)


def test_an_interval_is_that_of_a_loop_over_resampled_pairs(tasks):
    agenda = plan({"A": tasks["A"]})
    got = result_of(agenda, draws=200)
    gold, similarity = np.concatenate([s.gold for s in tasks["A"]]), got.items["A"]
    counts = resamples(len(gold), 200, seed(gold))
    drawn = [100 * spearmanr(np.repeat(gold, c), np.repeat(similarity, c)).statistic for c in counts]
    interval = got.scores["sts"]["tasks"]["A"]["interval"]["all"]
    assert interval == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=1e-9)
    assert got.scores["sts"]["avg"]["interval"]["all"] == pytest.approx(interval, abs=1e-9)  # of one task
    (one,) = list(got.scores["sts"]["tasks"]["A"]["subsets"].values())[2:]
    pair = gold[32:72], similarity[32:72]
    drawn = [100 * spearmanr(*(np.repeat(x, c[32:72]) for x in pair)).statistic for c in counts]
    assert one["interval"] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=1e-9)


def test_a_task_is_resampled_by_its_content_and_not_by_its_name():
    gold = np.array([1.0, 2, 3, 0])
    assert seed(gold) != seed(gold[::-1])
    assert seed(gold) == seed(gold.copy()) == seed(np.array([1, 2, 3, -0.0]))


def test_labelled_texts_reach_the_classifier_in_order_and_rte_its_threshold(tasks):
    words = [f"w{i}" for i in range(30)]
    labels = np.arange(30) % 2
    single = Labelled("mine", (words,), labels, ["no", "yes"], None)
    pair = Labelled("RTE", (words, words[::-1]), labels, ["entailment", "not_entailment"], None)
    file = single._replace(name="RTE")  # one of a user's, which is classified as any other
    agenda = plan({"mine": single, "RTE": pair, "x/RTE.tsv": file, **tasks})

    def classify(x, y, split):
        assert x == pytest.approx(vectors(words))
        assert y.tolist() == labels.tolist() and split is None
        return np.where(np.arange(30) < 3, 1 - y, y), 77.0

    said = []
    got = evaluated(system(agenda), agenda, classify, 100, said.append)
    mine = got.scores["transfer"]["tasks"]["mine"]
    assert (mine["accuracy"], mine["dev"], mine["n"]) == (pytest.approx(90), 77.0, 30)
    assert got.items["mine"].tolist() == [False] * 3 + [True] * 27
    assert mine["interval"][0] < 90 < mine["interval"][1]
    assert got.scores["transfer"]["avg"] == pytest.approx(90)
    other = got.scores["transfer"]["tasks"]["x/RTE.tsv"]
    assert other["accuracy"] == mine["accuracy"] and other["interval"] == mine["interval"]  # of one content
    assert got.scores["transfer"]["interval"] == mine["interval"]  # of tasks that are alike
    assert said == [
        f"{name}: 90.00 ({one['seconds']} s)" for name, one in (("mine", mine), ("x/RTE.tsv", other))
    ]
    entailed = naive_cosines(vectors(words), vectors(words[::-1])) >= 0.5
    assert got.scores["rte"]["accuracy"] == pytest.approx(100 * np.mean(entailed == (labels == 0)))
    assert "sts" in got.scores and "correct" not in got.scores["rte"]


def test_geometry_is_of_sts_b_where_there_is_one_with_pairs_above_four_as_positives(tasks):
    agenda = plan({"A": tasks["A"], "STS-B": tasks["B"]})
    got = result_of(agenda).scores["geometry"]
    positives = [(a, b) for a, b, g in zip(*tasks["B"][0][1:4], strict=True) if g > 4]
    x = {text: vector(text).astype(np.float32) for pair in positives for text in pair}
    unit = {text: row / np.linalg.norm(row) for text, row in x.items()}
    expected = np.mean([((unit[a] - unit[b]) ** 2).sum() for a, b in positives])
    assert (got["task"], got["alignment"]) == ("STS-B", pytest.approx(expected, abs=1e-5))
    assert got["positives"] == {"above": 4, "scale": [0, 5], "n": len(positives), "of": 25}


def test_zero_vectors_leave_no_average_and_other_shapes_are_refused(tasks):
    agenda = plan(tasks)
    x = vectors(agenda.sentences)
    x[:2] = 0
    got = evaluated(System(x), agenda, None, 20).scores["sts"]
    assert got["avg"]["all"] is None and got["avg"]["interval"]["all"] is None
    with pytest.raises(ValueError, match=r"sentences have \(3, 6\) vectors"):
        evaluated(System(x[:3]), agenda, None, 20)


def test_whitening_on_no_more_sentences_than_components_has_no_score(monkeypatch):
    few = Subset("p", ["s0", "s1", "s2", "s0"], ["s3", "s4", "s5", "s6"], np.array([0.0, 3, 1, 4]))
    monkeypatch.setattr("whitenedcse.evaluation.suite.own_texts", lambda on, name, case: own([few]))
    for make, on, defined in (
        (WHITENING, "target", False),
        (partial(Postprocess, kind="zca"), "year", False),
        (partial(WHITENING, k=4), "target", True),
        (partial(WHITENING, shrinkage=0.1), "target", True),
        (partial(Postprocess, kind="zca", power=0.3), "target", True),
        (partial(Postprocess, kind="pca"), "target", True),
        (WHITENING, "c", True),  # other sentences than those whose cosines are scored
        (None, "", True),
    ):
        agenda = plan({"A": [few]}, [on] if on else [], lambda _: [f"c{i}" for i in range(6)])
        result = result_of(agenda, make, on)
        task = result.scores["sts"]["tasks"]["A"]
        assert (task["all"] is not None) == defined and (np.ptp(result.items["A"]) > 1e-9) == defined
        assert (result.scores["geometry"]["alignment"] is not None) == defined
        if not defined:  # seven points in six dimensions, as the corners of a simplex
            x = make().fit(system(agenda).x).transform(system(agenda).x)
            unit = x / np.linalg.norm(x, axis=1, keepdims=True)
            assert unit @ unit.T == pytest.approx(np.where(np.eye(7), 1, -1 / 6), abs=1e-6)
            assert task["why"] == "whitened on its own 7 sentences, too few for 6 components"
            assert result.scores["sts"]["avg"]["all"] is None and "A" in result.scores["sts"]["avg"]["why"]
