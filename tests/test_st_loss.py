"""The loss for sentence-transformers' trainer, against that library's own losses and our own training."""

import copy
import json
import os
from datetime import timedelta
from inspect import signature

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate.state import AcceleratorState, PartialState
from datasets import Dataset
from encoders import SENTENCES, architecture, embedder_of, nowhere, whitening
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch.nn.functional import cosine_similarity
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from whitenedcse import whitening as mathematics
from whitenedcse.data.datamodule import Batch
from whitenedcse.model.encoder import Encoder
from whitenedcse.model.head import ProjectionHead
from whitenedcse.model.whitener import WhiteningSettings
from whitenedcse.ragged import concatenate, ragged
from whitenedcse.sentence_transformers import HeadInCheckpoints, WhitenedContrastiveLoss, accelerate
from whitenedcse.training.loss import ContrastiveLoss
from whitenedcse.training.module import ContrastiveTraining

OTHERS = [text.replace("the", "every") + " ." for text in SENTENCES]
WRONG = [text + " and not" for text in reversed(SENTENCES)]
NONE = {"whitening": None, "dense": False}
GROUP = {"whitening": whitening(kind="group", gradient="full", eps=1e-3)}
FULL = {"whitening": whitening(gradient="full", eps=1e-3)}


def saved(folder, tokenizer, kind="bert", dropout=0.0):
    """The directory of a tiny encoder whose vectors spread."""
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
    architecture(kind, len(tokenizer), **rates).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def opened(folder, pooling="cls"):
    parts = [Transformer(folder), Pooling(16, pooling)]
    return SentenceTransformer(modules=parts, device="cpu").train()


@pytest.fixture
def made(tmp_path, tokenizer):
    """A function that makes equal models, with this dropout."""
    return lambda dropout=0.0: opened(saved(tmp_path / f"{dropout}", tokenizer, dropout=dropout))


def tokens(model, *columns):
    return [model.preprocess(list(column)) for column in columns]


def gradients(module):
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def stepped(loss, *columns, seed=7, factor=1.0):
    """Value and gradient of one step from a seed."""
    loss.zero_grad()
    torch.manual_seed(seed)
    value = loss(tokens(loss.model, *columns), None)
    (factor * value).backward()
    return value.detach(), gradients(loss)


def test_two_views_without_a_head_are_their_ranking_loss(made):
    for columns in ((SENTENCES, OTHERS), (SENTENCES, OTHERS, WRONG, OTHERS)):
        ours = stepped(WhitenedContrastiveLoss(made(), views=2, **NONE), *columns)
        theirs = stepped(MultipleNegativesRankingLoss(made()), *columns)
        assert len(theirs[1]) > 40
        assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("columns", "positives", "kind"),
    [(1, 1, "shuffled_group"), (2, 1, "zca"), (3, 1, "shuffled_group"), (4, 2, "zca")],
)
def test_the_gradient_is_that_of_our_own_training(made, tokenizer, monkeypatch, columns, positives, kind):
    order = torch.stack([torch.randperm(16) for _ in range(4)])
    monkeypatch.setattr(mathematics, "random_permutations", lambda shape, d, device: order[: shape[0]])
    texts, model = [SENTENCES, OTHERS, WRONG, SENTENCES[::-1]][:columns], made().double()
    white = whitening(kind=kind, eps=1e-3, gradient="full")
    loss = WhitenedContrastiveLoss(model, views=3, positives=positives, whitening=white).double()
    encoder = Encoder(copy.deepcopy(model[0].model), tokenizer)
    embedder = embedder_of(encoder, head=copy.deepcopy(loss.head)).double()
    module = ContrastiveTraining(embedder=embedder, views=3)
    module.log = lambda *_, **__: None
    rows = [ragged(tokenizer(column).input_ids) for column in texts]
    passes = rows * 3 if columns == 1 else rows[: 1 + positives]
    negatives = rows[1 + positives] if columns > 1 + positives else None
    batch = Batch(concatenate(passes), negatives, len(SENTENCES))
    value = module.training_step(batch, 0)
    value.backward()
    theirs, seen = stepped(loss, *texts)
    assert_close(theirs, value.detach())
    own = {f"head.{name}": p.grad for name, p in embedder.head.named_parameters()}
    own |= {f"model.0.model.{name}": p.grad for name, p in embedder.encoder.backbone.named_parameters()}
    assert_close(seen, {name: g for name, g in own.items() if g is not None}, rtol=1e-6, atol=1e-9)
    assert len(seen) > 40


def test_one_column_is_encoded_for_each_view_with_another_dropout(made):
    loss, seen = WhitenedContrastiveLoss(made(0.2), **FULL), []
    project = loss.head.project
    loss.head.project = lambda x, **given: seen.append(x.detach()) or project(x, **given)
    loss(tokens(loss.model, SENTENCES), None)
    assert seen[0].shape == (3, 8, 16) and not torch.allclose(seen[0][0], seen[0][1], atol=1e-2)
    loss.passes = 1
    loss(tokens(loss.model, SENTENCES), None)
    assert seen[1].shape == (1, 8, 16)
    loss.model.eval()
    loss.passes = 3
    x = loss.model.encode(SENTENCES, convert_to_tensor=True)
    loss(tokens(loss.model, SENTENCES), None)
    assert_close(seen[2], x.expand(3, 8, 16))  # the rows of a pass are the texts in their order


def test_a_hard_negative_of_its_own_anchor_is_weighted(made):
    """Against a loop over anchors, with two columns of negatives of which the first is weighted."""
    x = torch.randn(4, 6, 16, dtype=torch.float64)
    weighted = ContrastiveLoss(hard_negative_log_weight=1.5)
    loss = WhitenedContrastiveLoss(made(), views=2, loss=weighted, **NONE)
    expected = 0.0
    for i in range(6):
        logits = cosine_similarity(x[0, i], x[1:].flatten(0, 1)) / 0.05
        logits[6 + i] += 1.5
        expected += (logits.logsumexp(dim=0) - logits[i]) / 6
    assert_close(loss.compute_loss_from_embeddings(list(x)), expected)


@pytest.mark.parametrize(
    ("columns", "head", "fast"),
    [((SENTENCES,), NONE | {"dense": True}, False), ((SENTENCES, OTHERS, WRONG), GROUP, True)],
)
def test_mini_batches_change_neither_loss_nor_gradient(made, columns, head, fast):
    torch.manual_seed(3)
    plain, model = WhitenedContrastiveLoss(made().double(), **head).double(), made().double()
    model = accelerate(model) if fast else model
    cached = WhitenedContrastiveLoss(model, mini_batch_size=3, **head).double()
    cached.head.load_state_dict(plain.head.state_dict())
    expected = stepped(plain, *columns, factor=0.25)  # as with four steps of accumulation
    assert_close(stepped(cached, *columns, factor=0.25), expected, rtol=1e-9, atol=1e-9)
    assert_close(cached.head.state_dict(), plain.head.state_dict())
    with torch.no_grad():
        cached(tokens(cached.model, *columns), None)


def test_mini_batches_are_encoded_again_with_the_same_dropout(made):
    """The gradient of a step is a derivative of the loss that the same random numbers give."""
    loss = WhitenedContrastiveLoss(accelerate(made(0.3).double()), mini_batch_size=3, **FULL).double()
    _, seen = stepped(loss, SENTENCES)
    name = "model.0.model.encoder.layer.1.output.dense.weight"
    weight, direction = loss.get_parameter(name), torch.randn_like(loss.get_parameter(name))
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * 1e-6 * direction
        values.append(stepped(loss, SENTENCES)[0])
        with torch.no_grad():
            weight -= sign * 1e-6 * direction
    slope = (values[0] - values[1]) / 2e-6
    assert_close((seen[name] * direction).sum(), slope, rtol=1e-4, atol=1e-7)


def test_the_encoder_may_compute_in_bfloat16_but_head_and_loss_do_not(made):
    loss = WhitenedContrastiveLoss(made(), **FULL)
    types = []
    for part in (loss.head.before, loss.head.linear):
        part.register_forward_hook(lambda _, given, out: types.extend([given[0].dtype, out.dtype]))
    given = [torch.randn(8, 16).bfloat16() for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        half = loss.compute_loss_from_embeddings(given)
        loss(tokens(loss.model, SENTENCES), None)
    assert half.dtype == torch.float32 and set(types) == {torch.float32}


def test_eval_mode_of_the_model_whitens_by_running_statistics_and_leaves_them(made):
    loss = WhitenedContrastiveLoss(made(), **FULL)
    loss(tokens(loss.model, SENTENCES, OTHERS), None)
    before = copy.deepcopy(loss.head.state_dict())
    loss.model.eval()
    values = [loss(tokens(loss.model, SENTENCES[:2], OTHERS[:2]), None) for _ in range(2)]
    assert_close(values[0], values[1])
    assert_close(loss.head.state_dict(), before)


def test_matryoshka_works_without_a_head_and_is_refused_with_one(made):
    dims = [16, 8, 4]
    ours = MatryoshkaLoss(model := made(), WhitenedContrastiveLoss(model, views=2, **NONE), dims)
    theirs = MatryoshkaLoss(model := made(), MultipleNegativesRankingLoss(model), dims)
    expected = stepped(theirs, SENTENCES, OTHERS)
    seen = stepped(ours, SENTENCES, OTHERS)
    assert_close(seen, expected, rtol=1e-6, atol=1e-6)
    cached = WhitenedContrastiveLoss(model := made(), views=2, mini_batch_size=3, **NONE)
    seen = stepped(MatryoshkaLoss(model, cached, dims), SENTENCES, OTHERS)
    assert_close(seen, expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"width 8 for a head of width 16.*MatryoshkaLoss.*dense=False"):
        stepped(MatryoshkaLoss(model := made(), WhitenedContrastiveLoss(model), dims), SENTENCES, OTHERS)


def test_the_defaults_are_those_of_our_training():
    ours = dict(signature(ContrastiveTraining).parameters) | dict(signature(ProjectionHead).parameters)
    theirs = signature(WhitenedContrastiveLoss).parameters
    for name in ("views", "loss", "whitening", "dense"):
        assert theirs[name].default == ours[name].default


def test_settings_that_do_not_fit_together_are_refused(made):
    model = made()
    for settings, words in (
        ({"views": 1}, "views=1: 2 or more"),
        ({"passes": 4}, "views=3: .*passes=4: from 1 to views"),
        ({"positives": 3}, "views=3: .*positives=3: 1 or more, below views"),
        ({"loss": ContrastiveLoss(weights=(1.0, 2.0, 3.0))}, "give 1, or 2, which is views - 1"),
        ({"whitening": whitening(group_width=5)}, "5"),
    ):
        with pytest.raises(ValueError, match=words):
            WhitenedContrastiveLoss(model, **settings)
    with pytest.raises(TypeError, match="whitening='zca' must be None, a WhiteningSettings or a module"):
        WhitenedContrastiveLoss(model, whitening="zca")
    WhitenedContrastiveLoss(model, whitening=WhiteningSettings(kind="zca", group_width=None))  # as it says


def test_weights_and_inputs_that_cannot_be_computed_with_are_refused(made):
    """AdamW's smallest denominator is 0 in float16."""
    with pytest.raises(ValueError, match=r"float16 train to NaN; use model.float\(\)"):
        WhitenedContrastiveLoss(made().half())
    WhitenedContrastiveLoss(made().half().requires_grad_(False))
    loss = WhitenedContrastiveLoss(made().bfloat16(), positives=2)
    with pytest.raises(ValueError, match="2 columns for an anchor and positives=2"):
        loss(tokens(loss.model, SENTENCES, OTHERS), None)
    flat = {"input_ids": torch.ones(1, 9, dtype=torch.long), "cu_seq_lens_q": torch.tensor([0, 9])}
    with pytest.raises(ValueError, match="unpad_inputs=False"):
        loss([flat], None)


def test_labels_that_differ_are_refused_as_the_rows_of_a_label_would_be_drawn_together(made):
    loss = WhitenedContrastiveLoss(made(), views=2, **NONE)
    columns = tokens(loss.model, SENTENCES, OTHERS)
    with pytest.raises(ValueError, match="has labels that differ, which this loss does not use"):
        loss(columns, torch.tensor([1, 0] * 4))
    assert_close(loss(columns, torch.ones(8)), loss(columns))


def test_the_model_card_has_settings_and_citation(made):
    loss = WhitenedContrastiveLoss(made(), views=2)
    config = json.loads(json.dumps(loss.get_config_dict()))
    assert config["views"] == 2 and config["whitening"]["group_width"] == 2
    assert config["loss"]["temperature"] == 0.05
    assert "2305.17746" in loss.citation


def arguments(folder, **settings):
    """Eight steps, each of eight sentences."""
    settings = {"num_train_epochs": 2, "save_steps": 3, "dataloader_drop_last": True} | settings
    return Arguments(
        str(folder), per_device_train_batch_size=8, use_cpu=True, report_to="none", disable_tqdm=True,
        logging_strategy="no", seed=3, learning_rate=1e-2, **settings,
    )  # fmt: skip


DATA = Dataset.from_dict({"text": [f"{a} {b}" for a in SENTENCES for b in SENTENCES[:4]]})


def fitted(made, folder, *, resume=None, seed=0, whole=True, **settings):
    """Model and head after a run of their trainer; its own checkpoints hold the head if `whole`."""
    torch.manual_seed(seed)
    kind = {"whitening": whitening(kind="zca", momentum=0.5, eps=1e-2)}
    loss = WhitenedContrastiveLoss(made(0.1), **kind)
    given = {"args": arguments(folder, **settings), "train_dataset": DATA, "loss": loss}
    given["callbacks"] = [HeadInCheckpoints(loss)] * whole
    SentenceTransformerTrainer(loss.model, **given).train(resume_from_checkpoint=resume)
    return {name: tensor.clone() for name, tensor in loss.state_dict().items()}


def test_a_checkpoint_without_head_is_refused(made, tmp_path):
    fitted(made, tmp_path, whole=False, max_steps=3)
    with pytest.raises(ValueError, match="step 3 holds no head"):
        fitted(made, tmp_path, resume=str(tmp_path / "checkpoint-3"))


def test_a_last_batch_that_cannot_be_whitened_is_left_out_and_the_others_train(made, tmp_path):
    settings = {"num_train_epochs": 1, "dataloader_drop_last": False, "save_strategy": "no"}

    def trained(rows, cached=4):
        loss = WhitenedContrastiveLoss(made(), whitening=whitening(group_width=4), mini_batch_size=cached)
        data, given = DATA.select(range(rows)), arguments(tmp_path, **settings)
        SentenceTransformerTrainer(loss.model, given, data, loss=loss).train()
        assert all(tensor.isfinite().all() for tensor in loss.state_dict().values())
        return int(loss.head.before.batches)

    assert trained(16 + 7, cached=None) == 3
    with pytest.warns(UserWarning, match="1 sentences? cannot whiten 4 ch.*dataloader_drop_last=True"):
        assert trained(16 + 1) == 2
    with pytest.raises(ValueError, match="set per_device_train_batch_size higher"):
        trained(1)


def ten_steps(folder, share, gather=True, cached=None, seed=5):
    """Weights after ten steps in float64, under DDP where there are several processes."""
    torch.manual_seed(seed)
    kind = {"whitening": whitening(eps=1e-3)} | (NONE if not gather else {})
    loss = WhitenedContrastiveLoss(
        opened(folder).double(), gather_across_devices=gather, mini_batch_size=cached, **kind
    ).double()
    model, columns = loss.model, tokens(loss.model, SENTENCES * 2, OTHERS * 2, WRONG * 2)
    if dist.is_initialized():
        loss.model = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.01, momentum=0.9)  # Adam would hide a factor
    torch.manual_seed(seed + 10)
    for step in range(10):
        rows = slice(step % 8, step % 8 + 8)
        batch = [{k: v[rows][share].clone() for k, v in c.items() if k != "modality"} for c in columns]
        optimizer.zero_grad()
        loss(batch, None).backward()
        optimizer.step()
    return {**model.state_dict(), **loss.head.state_dict()}


CASES = {"plain": {}, "cached": {"cached": 3}}


def one_of_two(rank, folder, place):
    wait = {"init_method": (place / "meeting").as_uri(), "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", rank=rank, world_size=2, **wait)
    share = slice(4 * rank, 4 * rank + 4)
    after = {name: ten_steps(folder, share, **case, seed=5 + rank) for name, case in CASES.items()}
    after["none"] = ten_steps(folder, share, gather=False)
    loss = WhitenedContrastiveLoss(opened(folder), gather_across_devices=False)
    refused = []
    for made, few in ((loss, 4), (WhitenedContrastiveLoss(loss.model), 4 - rank)):
        try:
            made.compute_loss_from_embeddings([torch.randn(few, 16)] * 2)
        except ValueError as error:
            refused.append(str(error))
    torch.save((after, refused), place / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_do_what_one_does(tokenizer, tmp_path):
    """Their heads begin differently, as in processes without a common seed; that of the first is used."""
    folder = saved(tmp_path / "encoder", tokenizer)
    mp.start_processes(one_of_two, (folder, tmp_path), nprocs=2, start_method="fork")  # imports take long
    (first, refused), (second, also) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name, case in CASES.items():
        alone = ten_steps(folder, slice(0, 8), **case)
        # rounding of ten steps: 1.7e-12 on one kind of CPU, below 1e-12 on another; not gathering changes 0.6
        assert_close(first[name], alone, rtol=1e-10, atol=1e-10)
        assert_close(second[name], alone, rtol=1e-10, atol=1e-10)
    assert_close(first["none"], second["none"], rtol=0, atol=0)
    assert refused == also
    assert "gather_across_devices=False: the heads of 2 processes would drift apart" in refused[0]
    assert "[4, 3] sentences; use dataloader_drop_last=True" in refused[1]


def trained_by_theirs(rank, folder, place, address):
    """One of two processes of their trainer, which begins with another head and resumes."""
    place_of = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {name: str(value) for name, value in (place_of | {"MASTER_PORT": address}).items()}
    for state in (AcceleratorState, PartialState):
        state._reset_state()
    made = lambda dropout: opened(folder)  # noqa: E731
    whole = fitted(made, place / "whole", seed=rank, save_steps=2)
    again = fitted(made, place / "other", resume=str(place / "whole" / "checkpoint-2"), seed=rank + 2)
    torch.save((whole, again), place / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*broadcast_buffers.*:FutureWarning")  # accelerate asks torch the old way
def test_their_trainer_with_two_processes_keeps_the_heads_equal_and_resumes(tokenizer, tmp_path):
    folder = saved(tmp_path / "encoder", tokenizer, dropout=0.1)
    given = (folder, tmp_path, nowhere().rpartition(":")[2])
    mp.start_processes(trained_by_theirs, given, nprocs=2, start_method="fork")
    (whole, again), (other, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert whole["head.before.batches"] == 4
    assert_close(other, whole, rtol=0, atol=0)
    assert_close(again, whole, rtol=0, atol=0)
    plain = SentenceTransformer(str(tmp_path / "whole" / "checkpoint-2"), device="cpu")  # without the head
    assert [type(part).__name__ for part in plain] == ["Transformer", "Pooling"]
