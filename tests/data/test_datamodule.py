"""Batches come in an order that seed and epoch decide, shared among ranks, each row once."""

import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from whitenedcse.data.datamodule import SentenceData
from whitenedcse.data.views import prompt_tokens
from whitenedcse.ragged import rows

ROWS, SIZE = 29, 6
SETTINGS = {"max_length": 12, "batch_size": SIZE, "passes": 1, "seed": 3}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WHITENEDCSE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path, tokenizer):
    """Row i holds word i, so that a batch tells which rows it is made of."""
    words = sorted(word for word in tokenizer.get_vocab() if word[0] not in "[#.,")[:ROWS]
    (tmp_path / "x.txt").write_text("\n".join(words))
    lines = [f"{w}\t{w} and\tnot {w}\n" for w in words]
    (tmp_path / "x.tsv").write_text("a\tb\tc\n" + "".join(lines))
    return tmp_path / "x.txt", [tokenizer.convert_tokens_to_ids(word) for word in words]


@pytest.fixture
def data(text, tokenizer):
    def built(**changes):
        module = SentenceData(**({"corpus": str(text[0])} | SETTINGS | changes))
        module.tokenizer = tokenizer
        module.setup("fit")
        return module

    return built


def placed(rank, world):
    """A trainer at the start, as the data sees it."""
    place = {"global_rank": rank, "world_size": world, "global_step": 0}
    return SimpleNamespace(**place, accumulate_grad_batches=1, num_training_batches=math.inf)


@pytest.fixture
def unequal(tmp_path, tokenizer):
    """A corpus of sentences of 3 to 8 tokens, and the lengths of its anchors, in rows with longer ones."""
    words = ["cat", "dog", "bird", "fish", "tree", "house", "river"]
    lines = [" ".join(words[: 1 + i * i % 6]) for i in range(97)]
    triplets = "".join(f"{row}\t{row} and the old\tnot {row}\n" for row in lines)
    (tmp_path / "u.tsv").write_text(f"a\tb\tc\n{triplets}")
    (tmp_path / "u.txt").write_text("\n".join(lines))
    return tmp_path, np.array([len(tokenizer(row)["input_ids"]) for row in lines])


def of(unequal, columns=(), **changes):
    return {"corpus": str(unequal[0] / ("u.tsv" if columns else "u.txt")), "columns": list(columns)} | changes


def rows_of_epoch(module, number, start=0):
    order = module.train_dataloader().sampler
    order.set_epoch(number)
    order.start = lambda: start
    return [batch.tolist() for batch in order]


def laid_end_to_end(sizes, budget, seed):
    """Each row belongs to the batch in which its last token falls."""
    batches, end = [[] for _ in range(sizes.sum() // budget)], 0
    for row in np.random.default_rng(seed).permutation(len(sizes)).tolist():
        end += sizes[row]
        if (end - 1) // budget < len(batches):
            batches[(end - 1) // budget].append(row)
    return batches


@pytest.mark.parametrize("columns", [(), ("a", "b")])
@pytest.mark.parametrize(
    ("setting", "budget"), [("batch_size", 6), ("batch_tokens", 23), ("batch_tokens", 100)]
)
def test_seed_and_epoch_decide_batches_that_ranks_share_equally(data, unequal, columns, setting, budget):
    sizes = unequal[1] if setting == "batch_tokens" else np.ones(97, int)
    for seed, number in ((3, 0), (3, 5), (4, 1)):
        expected = laid_end_to_end(sizes, budget, [seed, number])
        module = data(**of(unequal, columns), **{setting: budget}, seed=seed)
        assert len(module.train_dataloader()) == len(expected)
        assert rows_of_epoch(module, number, start=2) == expected[2:]
        for world in (1, 2, 3):
            shares = []
            for rank in range(world):
                module.trainer = placed(rank, world)
                shares.append(rows_of_epoch(module, number))
            for batch, *parts in zip(expected, *shares, strict=True):
                assert sum(parts, []) == batch[: len(batch) // world * world]
                assert len({len(part) for part in parts}) == 1 and parts[0]


def test_batches_are_pinned_where_there_is_cuda(data, monkeypatch):
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert data().train_dataloader().pin_memory is there


def test_passes_repeat_the_batch_pairs_are_views_and_a_third_column_is_the_negative(data, text, tokenizer):
    loader = data().train_dataloader()
    once = rows(next(iter(loader)).positives)
    assert [row[1] for row in once] == [text[1][i] for i in next(iter(loader.sampler))]
    batch = next(iter(data(passes=3).train_dataloader()))
    assert rows(batch.positives) == once * 3 and batch.negatives is None
    for columns, passes in product((["a", "b"], ["a", "b", "c"]), (1, 2)):
        made = data(corpus=str(text[0].with_suffix(".tsv")), columns=columns, passes=passes)
        batch = next(iter(made.train_dataloader()))
        spoken = tokenizer.batch_decode(rows(batch.positives), skip_special_tokens=True)
        anchors = spoken[:SIZE]
        assert spoken == (anchors + [f"{a} and" for a in anchors]) * passes
        assert (batch.negatives is None) == (len(columns) == 2)
        if batch.negatives is not None:
            hard = tokenizer.batch_decode(rows(batch.negatives), skip_special_tokens=True)
            assert hard == [f"not {a}" for a in anchors]


def test_a_sample_of_tokens_is_of_all_columns_and_always_the_same(data, text, tokenizer):
    triplets = {"corpus": str(text[0].with_suffix(".tsv")), "columns": ["a", "b", "c"]}
    module = data(**triplets, seed=8)
    drawn = tokenizer.batch_decode(rows(module.sample_tokens(11)), skip_special_tokens=True)
    assert len(set(drawn)) == 9
    assert drawn[3:] == [f"{a} and" for a in drawn[:3]] + [f"not {a}" for a in drawn[:3]]
    assert rows(data(**triplets, seed=1).sample_tokens(11)) == rows(module.sample_tokens(11))
    alone = rows(data(seed=1).sample_tokens(10))
    assert rows(module.sample_tokens(30))[:10] == alone  # the first column of the same rows
    assert sorted(row[1] for row in rows(data().sample_tokens(1000))) == sorted(text[1])


def test_settings_that_cannot_work_are_refused(data, unequal, text):
    for changes, words in (
        ({"batch_size": 1}, "batch_size=1"),
        ({"passes": 0}, "passes=0"),
        ({"batch_size": 30}, "29 rows .*batch_size=30"),
        ({"repetition": 1.0, "passes": 2}, r"data\.repetition=1\.0 is not in \[0, 1\)"),
        ({"repetition": float("nan"), "passes": 2}, r"data\.repetition=nan is not in"),
        ({"repetition": 0.3}, r"data\.passes=1 change nothing.*data\.passes=2"),
        ({"crop": [0.5, 1]}, r"data\.passes=1 change nothing.*data\.passes=2"),
        ({"crop": [0.5, 1, 1], "passes": 2}, r"data\.crop=\[0\.5, 1, 1\] must be two shares"),
        ({"crop": [0, 1], "passes": 2}, r"data\.crop=\[0, 1\] must be two shares, 0 < least"),
        ({"crop": [0.9, 0.5], "passes": 2}, r"data\.crop=\[0\.9, 0\.5\]"),
        (of(unequal, batch_tokens=100_000), "97 rows do not fill one batch_tokens=100000"),
        ({"batch_tokens": 1}, "batch_tokens=1 may leave fewer than 2"),
        (of(unequal, batch_tokens=13), "batch_tokens=13 may leave fewer than 2 .* use 14 or more.*has 7"),
    ):
        with pytest.raises(ValueError, match=words):
            data(**changes)
    for changes, world, words in (
        ({"batch_size": 6}, 4, r"batch_size=6 .* 4 processes; .*, or trainer\.devices=3$"),
        ({"batch_size": 7}, 2, r"batch_size=7 .* 2 processes; .*, or trainer\.devices=1$"),
        (of(unequal, batch_tokens=14), 3, "batch_tokens=14 may leave fewer than 3 .* use 21 or more"),
    ):
        module = data(**changes)
        module.trainer = placed(0, world)
        with pytest.raises(ValueError, match=words):
            module.train_dataloader()
    with pytest.raises(ValueError, match=r"set data\.tokenizer"):
        SentenceData(corpus=str(text[0]), **SETTINGS).setup("fit")


def test_counts_and_what_truncation_takes_are_told_of_every_column(data, tmp_path):
    long, endless = "a cat " * 6, "a cat " * 200
    path = tmp_path / "y.csv"
    path.write_text(f"a,b\na,{long}\n,a\na,a\n{long},{endless}\n" + "a,a\n" * 3)
    assert data(corpus=str(path), columns=["a", "b"]).description == (
        f"{path}: 7 lines, 1 blank dropped, 6 kept (3 equal an earlier one); 3 of 12 sentences "
        "truncated at 12 tokens (25 %), 63 tokens kept"  # 3 x 12 and 9 x 3
    )


def words_of(module, number):
    """The positives of an epoch, as lists of ids."""
    loader = module.train_dataloader()
    loader.sampler.set_epoch(number)
    return [rows(batch.positives) for batch in loader]


def test_crops_are_of_every_pass_repetition_of_later_ones_and_negatives_and_samples_stay_whole(data, unequal):
    triplets = of(unequal, "abc", passes=2, max_length=20)
    plain = data(**triplets)
    for changes, whole in (({"repetition": 0.5}, True), ({"crop": [0.5, 0.6]}, False)):
        changed = data(**triplets, **changes)
        for before, after in zip(plain.train_dataloader(), changed.train_dataloader(), strict=True):
            assert rows(before.negatives) == rows(after.negatives)
            (first, second), (one, two) = (
                (x[: 2 * SIZE], x[2 * SIZE :]) for x in map(rows, (before[0], after[0]))
            )
            assert (first == one) == whole and second != two != one
        assert rows(plain.sample_tokens(9)) == rows(changed.sample_tokens(9))


def test_changes_are_a_function_of_seed_epoch_and_row_alone(data, unequal):
    """Not of the batch in which a row comes, nor of the rank it comes to."""
    settings = of(unequal, batch_size=24, passes=3, crop=[0.5, 1.0], repetition=0.3)

    def by_row(module, number):
        order = module.train_dataloader().sampler
        order.set_epoch(number)
        pairs = zip(order, words_of(module, number), strict=True)
        return {row: batch[i :: len(at)] for at, batch in pairs for i, row in enumerate(at.tolist())}

    alone = by_row(data(**settings), 0)
    assert len(alone) == 96
    torch.manual_seed(5)
    smaller = by_row(data(**settings | {"batch_size": 6}), 0)
    assert {row: smaller[row] for row in alone} == alone
    module, shared = data(**settings), {}
    for rank in range(3):
        module.trainer = placed(rank, 3)
        shared |= by_row(module, 0)
    assert shared == alone
    for other in (by_row(data(**settings), 1), by_row(data(**settings | {"seed": 4}), 0)):
        both = alone.keys() & other.keys()
        assert sum(alone[row] != other[row] for row in both) > len(both) / 2


@pytest.mark.parametrize("prompt", ["the old: ", "cat. "])
def test_a_prompt_stays_whole_in_crops(data, unequal, tokenizer, prompt):
    front = tokenizer(prompt).input_ids[:-1]
    assert prompt_tokens(tokenizer, prompt) == len(front) - 1 and prompt_tokens(tokenizer, "") == 0
    changes = {"passes": 2, "crop": [0.1, 0.2], "prompt": prompt, "max_length": 20}
    found = sum(words_of(data(**of(unequal, batch_tokens=100), **changes), 0), [])
    assert {tuple(row[: len(front)]) for row in found} == {tuple(front)}
    assert {len(row) - len(front) - 1 for row in found} <= {1, 2, 3, 4}


def test_an_epoch_of_fewer_batches_is_counted_by_these(data):
    module = data()
    module.trainer = placed(0, 1)
    whole = len(module.train_dataloader())
    assert whole > 3
    for limit, each in ((2, 1), (3, 2), (math.inf, 4)):
        steps = math.ceil(min(limit, whole) / each)
        module.trainer.num_training_batches, module.trainer.accumulate_grad_batches = limit, each
        for step in range(3 * steps):
            module.trainer.global_step = step
            assert module.batches_done() == step % steps * each
