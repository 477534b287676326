"""Batches come in an order that seed and epoch decide, shared among ranks, each row once."""

import math
from collections import Counter
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


def epoch(module, number=0):
    loader = module.train_dataloader()
    loader.sampler.set_epoch(number)
    return [[row[1] for row in rows(batch.positives)] for batch in loader]


def test_an_epoch_holds_every_row_at_most_once_in_whole_batches(data, text):
    batches = epoch(data())
    assert [len(batch) for batch in batches] == [SIZE] * (ROWS // SIZE)
    flat = [word for batch in batches for word in batch]
    assert len(set(flat)) == len(flat) and set(flat) <= set(text[1])
    assert len(data().train_dataloader()) == ROWS // SIZE


def test_order_is_a_function_of_seed_and_epoch_alone(data):
    torch.manual_seed(0)
    first = epoch(data())
    torch.manual_seed(1)
    assert epoch(data()) == first
    orders = [first, epoch(data(), 1), epoch(data(), 2), epoch(data(seed=4)), epoch(data(seed=4), 1)]
    assert len({str(order) for order in orders}) == len(orders)
    assert epoch(data(), 2) == orders[2]


def test_ranks_together_see_what_one_rank_sees(data):
    module = data()
    alone = epoch(module, 1)
    for world in (2, 3):
        shares = []
        for rank in range(world):
            module.trainer = placed(rank, world)
            shares.append(epoch(module, 1))
        assert [sum(parts, []) for parts in zip(*shares, strict=True)] == alone


def test_a_batch_that_ranks_cannot_share_equally_is_refused(data):
    for size, world, fewer in ((6, 4, 3), (7, 2, 1)):
        module = data(batch_size=size)
        module.trainer = placed(0, world)
        said = f"batch_size={size} .* {world} processes; .*, or trainer.devices={fewer}$"
        with pytest.raises(ValueError, match=said):
            module.train_dataloader()


@pytest.fixture
def unequal(tmp_path, tokenizer):
    """A corpus of sentences of 3 to 8 tokens, and the lengths of its anchors, in pairs with longer ones."""
    words = ["cat", "dog", "bird", "fish", "tree", "house", "river"]
    lines = [" ".join(words[: 1 + i * i % 6]) for i in range(97)]
    (tmp_path / "u.tsv").write_text("a\tb\n" + "".join(f"{row}\t{row} and the old\n" for row in lines))
    (tmp_path / "u.txt").write_text("\n".join(lines))
    return tmp_path, np.array([len(tokenizer(row)["input_ids"]) for row in lines])


def budgeted(unequal, tokens, columns=()):
    corpus = unequal[0] / ("u.tsv" if columns else "u.txt")
    return {"corpus": str(corpus), "columns": list(columns), "batch_tokens": tokens}


def rows_of_epoch(module, number, start=0):
    order = module.train_dataloader().sampler
    order.set_epoch(number)
    order.start = lambda: start
    return [batch.tolist() for batch in order]


@pytest.mark.parametrize("columns", [(), ("a", "b")])
@pytest.mark.parametrize("tokens", [16, 37, 100, 200])
def test_a_token_budget_fills_each_batch_to_within_a_sentence(data, unequal, tokens, columns):
    """Naively: rows are laid end to end, and each belongs to the batch in which its last token falls."""
    module, lengths = data(**budgeted(unequal, tokens, columns)), unequal[1]
    for number in (0, 1, 5):
        expected, end = [[] for _ in range(lengths.sum() // tokens)], 0
        for row in np.random.default_rng([3, number]).permutation(97).tolist():
            end += lengths[row]
            if (end - 1) // tokens < len(expected):
                expected[(end - 1) // tokens].append(row)
        got = rows_of_epoch(module, number)
        assert got == expected and len(module.train_dataloader()) == len(got)
        assert all(abs(lengths[batch].sum() - tokens) < lengths.max() for batch in got)
        assert rows_of_epoch(module, number, start=2) == expected[2:]
        sampler = module.train_dataloader().sampler
        assert [sampler.rows_of(number, i).tolist() for i in range(len(got))] == expected


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_have_equal_parts_of_a_token_budget(data, unequal, world):
    module = data(**budgeted(unequal, 50))
    alone, shares = rows_of_epoch(module, 1), []
    for rank in range(world):
        module.trainer = placed(rank, world)
        shares.append(rows_of_epoch(module, 1))
    sampler = module.train_dataloader().sampler
    for step, (batch, *parts) in enumerate(zip(alone, *shares, strict=True)):
        assert sum(parts, []) == batch[: len(batch) // world * world] == sampler.rows_of(1, step).tolist()
        assert len({len(part) for part in parts}) == 1 and parts[0]


def test_a_token_budget_that_cannot_work_is_refused(data, unequal):
    with pytest.raises(ValueError, match=r"97 rows of \d+ tokens do not fill one batch_tokens=100000"):
        data(**budgeted(unequal, 100_000))
    with pytest.raises(ValueError, match="batch_tokens=1: a contrastive loss needs 2"):
        data(**budgeted(unequal, 1))
    with pytest.raises(ValueError, match="batch_tokens=13 may leave fewer than 2 .* use 14 or more.*has 7"):
        data(**budgeted(unequal, 13))
    module = data(**budgeted(unequal, 14))
    module.trainer = placed(0, 3)
    with pytest.raises(ValueError, match="batch_tokens=14 may leave fewer than 3 .* use 21 or more"):
        module.train_dataloader()


def test_batches_are_pinned_where_there_is_cuda(data, monkeypatch):
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert data().train_dataloader().pin_memory is there


def test_passes_repeat_the_batch_pairs_are_views_and_a_third_column_is_the_negative(data, text, tokenizer):
    once = rows(next(iter(data().train_dataloader())).positives)
    batch = next(iter(data(passes=3).train_dataloader()))
    assert rows(batch.positives) == once * 3 and batch.negatives is None
    for columns, passes in product((["a", "b"], ["a", "b", "c"]), (1, 2)):
        made = data(corpus=str(text[0].with_suffix(".tsv")), columns=columns, passes=passes)
        batch = next(iter(made.train_dataloader()))
        spoken = tokenizer.batch_decode(rows(batch.positives), skip_special_tokens=True)
        anchors = spoken[:SIZE]
        assert spoken == (anchors + [f"{a} and" for a in anchors]) * passes
        hard = [rows(x) for x in [batch.negatives] * (len(columns) == 3)]
        for negatives in hard:
            assert tokenizer.batch_decode(negatives, skip_special_tokens=True) == [
                f"not {a}" for a in anchors
            ]
        assert len(hard) == 1 or batch.negatives is None


def test_a_sample_of_tokens_is_of_all_columns_and_always_the_same(data, text, tokenizer):
    triplets = {"corpus": str(text[0].with_suffix(".tsv")), "columns": ["a", "b", "c"]}
    module = data(**triplets, seed=8)
    drawn = tokenizer.batch_decode(rows(module.sample_tokens(11)), skip_special_tokens=True)
    assert len(set(drawn)) == 9
    assert drawn[3:] == [f"{a} and" for a in drawn[:3]] + [f"not {a}" for a in drawn[:3]]
    assert rows(data(**triplets, seed=1).sample_tokens(11)) == rows(module.sample_tokens(11))
    alone = rows(data(seed=1).sample_tokens(10))
    assert rows(module.sample_tokens(30))[:10] == alone  # the first column of the same rows
    first = [row[1] for row in rows(data().sample_tokens(1000))]
    assert sorted(first) == sorted(text[1])
    assert sorted(row[1] for row in rows(module.sample_tokens(1000))[: len(first)]) == sorted(first)


def test_settings_that_cannot_work_are_refused(data):
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
    ):
        with pytest.raises(ValueError, match=words):
            data(**changes)


def test_a_forgotten_tokenizer_is_named(text):
    with pytest.raises(ValueError, match=r"set data\.tokenizer"):
        SentenceData(corpus=str(text[0]), **SETTINGS).setup("fit")


def test_counts_are_told(data, tmp_path):
    (tmp_path / "y.txt").write_text("a cat\n\nthe cat\n\n" * 5)
    path = str(tmp_path / "y.txt")
    assert data(corpus=path).description == (
        f"{path}: 20 lines, 10 blank dropped, 10 kept (8 equal an earlier one); "
        "0 of 10 sentences truncated at 12 tokens (0 %), 40 tokens kept"
    )


def test_what_truncation_takes_is_told_of_every_column(data, tmp_path):
    long, endless = "a cat " * 6, "a cat " * 200
    (tmp_path / "y.csv").write_text(f"a,b\na,{long}\n,a\na,a\n{long},{endless}\n" + "a,a\n" * 3)
    told = data(corpus=str(tmp_path / "y.csv"), columns=["a", "b"]).description
    assert "7 lines, 1 blank dropped, 6 kept (3 equal an earlier one); 3 of 12 sentences" in told
    assert "truncated at 12 tokens (25 %), 63 tokens kept" in told  # 3 x 12 and 9 x 3


def words_of(module, number):
    """The positives of an epoch, as lists of ids."""
    loader = module.train_dataloader()
    loader.sampler.set_epoch(number)
    return [rows(batch.positives) for batch in loader]


CHANGED = {"passes": 3, "crop": [0.5, 1.0], "repetition": 0.3}


@pytest.mark.parametrize("columns", [(), ("a", "b")])
def test_every_pass_is_cropped(data, unequal, columns):
    wanted = budgeted(unequal, 150, columns) | {"passes": 3, "max_length": 20}
    plain, changed = words_of(data(**wanted), 1), words_of(data(**wanted, crop=[0.5, 0.9]), 1)
    shorter = Counter()
    for before, after in zip(plain, changed, strict=True):
        third = len(before) // 3
        assert len(after) == len(before)
        for i, (row, kept) in enumerate(zip(after, before, strict=True)):
            assert " ".join(map(str, row[1:-1])) in " ".join(map(str, kept)) and row[-1] == kept[-1]
            shorter[i // third] += len(row) < len(kept)
        assert after[third : 2 * third] != after[2 * third :]
    assert min(shorter[i] for i in range(3)) > 0


def test_hard_negatives_and_samples_stay_whole(data, text):
    triplets = {"corpus": str(text[0].with_suffix(".tsv")), "columns": ["a", "b", "c"], "passes": 2}
    plain, changed = data(**triplets), data(**triplets, repetition=0.5, crop=[0.5, 0.6])
    for before, after in zip(plain.train_dataloader(), changed.train_dataloader(), strict=True):
        assert rows(before.negatives) == rows(after.negatives)
    assert rows(plain.sample_tokens(9)) == rows(changed.sample_tokens(9))


def test_changes_are_a_function_of_seed_epoch_and_row_alone(data, unequal):
    """Not of the batch in which a row comes, nor of the rank it comes to."""
    settings = {"corpus": str(unequal[0] / "u.txt"), "batch_size": 24} | CHANGED

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
    found = sum(words_of(data(**budgeted(unequal, 100) | changes), 0), [])
    assert {tuple(row[: len(front)]) for row in found} == {tuple(front)}
    assert {len(row) - len(front) - 1 for row in found} <= {1, 2, 3, 4}


def test_an_epoch_of_fewer_batches_is_counted_by_these(data):
    module = data()
    module.trainer = placed(0, 1)
    whole = len(epoch(module, 0))
    assert whole > 3
    for limit, each in ((2, 1), (3, 2), (math.inf, 4)):
        steps = math.ceil(min(limit, whole) / each)
        module.trainer.num_training_batches, module.trainer.accumulate_grad_batches = limit, each
        for step in range(3 * steps):
            module.trainer.global_step = step
            assert module.batches_done() == step % steps * each
