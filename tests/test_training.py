"""The training step, its optimiser, its masked-language-model term, and the monitor that evaluates it."""

import csv
import itertools
import math
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from encoders import SENTENCES, backbone, embedder_of, whitened_by_hand, whitening
from lightning import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from scipy.stats import spearmanr
from torch.testing import assert_close
from torch.utils.data import DataLoader

from whitenedcse import ragged as ragged_module
from whitenedcse.data.datamodule import Batch
from whitenedcse.data.tokens import token_ids
from whitenedcse.evaluation.geometry import alignment
from whitenedcse.evaluation.tasks import Subset
from whitenedcse.model.embedder import Embedder
from whitenedcse.model.encoder import Encoder
from whitenedcse.model.head import ProjectionHead
from whitenedcse.ragged import concatenate, ragged
from whitenedcse.training.loss import ContrastiveLoss, Matryoshka, Step
from whitenedcse.training.module import ContrastiveTraining, adamw
from whitenedcse.training.monitor import DevSet, Monitor
from whitenedcse.training.terms import MaskedLanguageModel

GOLD = np.array([5.0, 4.5, 4.2, 3.5, 2.0, 1.0, 0.5, 0.0])
DEV = Subset("dev", SENTENCES, SENTENCES[3:] + SENTENCES[:3], GOLD)
LOSS = ContrastiveLoss()


class EightSentences(LightningDataModule):
    """The same eight sentences, batch after batch."""

    def __init__(self, tokenizer, steps):
        super().__init__()
        self.batch, self.steps = ragged(token_ids(SENTENCES, tokenizer, 32)), steps

    def train_dataloader(self):
        batches = [Batch(concatenate([self.batch] * 3), None, 8)] * self.steps
        return DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)

    def sample_tokens(self, k):
        return self.batch


optimizer = partial(adamw, lr=1e-2)


def module_of(encoder, mlm=None, kind="cls", layers=(-1,), **changes):
    settings = {"seed": 0, "loss": LOSS} | changes
    seed_everything(0, verbose=False)
    embedder = embedder_of(encoder, kind=kind, layers=layers)
    return ContrastiveTraining(embedder=embedder, optimizer=optimizer, views=3, mlm=mlm, **settings)


def fit(module, tmp_path, *callbacks, steps=6, **settings):
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    settings |= quiet | {"logger": CSVLogger(tmp_path, name="run", version=""), "log_every_n_steps": 1}
    trainer = Trainer(max_epochs=1, accelerator="cpu", callbacks=list(callbacks), **settings)
    trainer.fit(module, EightSentences(module.embedder.encoder.tokenizer, steps))
    return trainer


def monitor_of(tmp_path, **changes):
    settings = {"dev": [DEV], "every": 2, "patience": None, "directory": tmp_path / "best"}
    return Monitor(**(settings | {"say": lambda text: None} | changes))


ABOVE = ("encoder.layer.1.", "encoder.layer.2.", "pooler.")


@pytest.mark.parametrize("masked", [False, True])
def test_layers_above_those_that_pooling_reads_stay_but_for_a_masked_term(bert, tmp_path, masked):
    mlm = MaskedLanguageModel(encoder=bert, weight=0.1, probability=0.3) if masked else None
    module = module_of(bert, mlm, kind="mean", layers=[0, 1])
    before = deepcopy(bert.backbone.state_dict())
    fit(module, tmp_path, steps=3)
    for name, weight in bert.backbone.named_parameters():
        still = name.startswith("pooler." if masked else ABOVE)
        assert torch.equal(weight, before[name]) == still, name
    assert all(weight.requires_grad for weight in bert.parameters())  # as it was handed in


def test_the_rate_falls_linearly_to_zero_after_the_warm_up():
    weight, bias = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer, schedule = adamw([weight, bias], total_steps=10, lr=1.0, weight_decay=0.1, warmup_steps=2)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    rates = []
    for _ in range(10):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([1 / 3, 2 / 3] + [i / 8 for i in range(8, 0, -1)])
    assert schedule.get_last_lr()[0] == 0


def test_fused_steps_clip_gradients_under_autocast(bert, tmp_path):
    module = module_of(bert)
    module.optimizer = partial(adamw, lr=1e-3)
    norms = []
    module.on_before_optimizer_step = lambda optimizer: norms.append(
        float(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).norm())
    )
    fit(module, tmp_path, steps=2, precision="bf16-mixed", gradient_clip_val=1e-3)
    moved = module.optimizers().optimizer
    assert moved.param_groups[0]["fused"]
    clipped = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).norm()
    assert min(norms) > 1e-2
    assert float(clipped) == pytest.approx(1e-3, rel=1e-3)


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """The types of all floating-point results, in order."""

    def __init__(self):
        super().__init__()
        self.kinds = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.kinds += [out.dtype] if isinstance(out, torch.Tensor) and out.is_floating_point() else []
        return out


@pytest.mark.parametrize(
    ("kind", "whitening_kind"),
    [(torch.bfloat16, "shuffled_group"), (torch.float16, "zca"), (torch.bfloat16, None)],
)
def test_from_the_pooled_vectors_to_the_loss_no_number_has_few_digits(bert, kind, whitening_kind):
    """Every operation after pooling is watched, forward and backward, under autocast."""
    settings = whitening_kind and whitening(kind=whitening_kind, group_width=2, gradient="full")
    head = ProjectionHead(width=16, whitening=settings, dense=True, position="both")
    embedder, watch = embedder_of(bert, head=head), Seen()
    x, hard = (torch.randn(3, 40, 16, generator=torch.Generator().manual_seed(i)) for i in range(2))
    x = torch.cat([x, hard[:1]]).to(kind).requires_grad_()
    loss = ContrastiveLoss(**(vars(LOSS) | {"denominator": "symmetric"}))
    with watch:
        with torch.autocast("cpu", kind):
            value = loss(*embedder.head.project(x, passes=3, views=3))
        value.backward()
    assert watch.kinds.count(kind) <= 2  # x itself as the head takes it, and its gradient
    assert watch.kinds.count(torch.float32) > 50 and value.dtype == torch.float32


def test_weights_of_a_few_digits_and_rounded_products_of_float32_are_refused(bert, tmp_path):
    with pytest.raises(ValueError, match="=bf16-true .* one of 32-true, bf16-mixed, 16-mixed, 64-true$"):
        fit(module_of(bert), tmp_path, precision="bf16-true")
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ValueError, match=r"set_float32_matmul_precision\('high'\) rounds whitening"):
            fit(module_of(bert), tmp_path)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_language_models_cross_entropy_is_that_of_float32_logits(bert):
    padded = Encoder(bert.backbone, bert.tokenizer, batches="padded")
    mlm = MaskedLanguageModel(encoder=padded, weight=0.1, probability=0.9)
    batch = EightSentences(bert.tokenizer, 1).batch
    mlm.model.eval()
    torch.manual_seed(0)
    ids, labels = mlm.masked(batch.ids)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        value = mlm(batch)
        padded = ragged_module.pad(batch._replace(ids=ids), bert.tokenizer.pad_token_id)
        logits = mlm.model(input_ids=padded, attention_mask=ragged_module.mask(batch).long()).logits
    assert logits.dtype == torch.bfloat16 and value.dtype == torch.float32
    wanted = torch.nn.functional.cross_entropy(
        ragged_module.unpad(logits, batch).double(), labels, ignore_index=-100
    )
    assert float(value.detach()) == pytest.approx(float(wanted.detach()), rel=1e-6)


def test_a_weight_that_cannot_train_is_refused():
    for weight in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"mlm.weight={weight} above 0"):
            MaskedLanguageModel(encoder=None, weight=weight, probability=0.3)


def test_masking_follows_berts_rule(bert):
    mlm = MaskedLanguageModel(encoder=bert, weight=0.1, probability=0.15)
    special = torch.tensor(bert.tokenizer.all_special_ids)
    ids = torch.randint(5, len(bert.tokenizer), (200_000,), generator=torch.Generator().manual_seed(0))
    ids[::50] = special[ids[::50] % len(special)]
    torch.manual_seed(0)
    changed, labels = mlm.masked(ids)
    chosen = labels != -100
    assert not torch.isin(ids[chosen], special).any()
    assert torch.equal(labels[chosen], ids[chosen])
    assert torch.equal(changed[~chosen], ids[~chosen])
    words = ~torch.isin(ids, special)
    assert float(chosen[words].float().mean()) == pytest.approx(0.15, abs=0.005)
    became_mask = changed[chosen] == bert.tokenizer.mask_token_id
    stayed = changed[chosen] == ids[chosen]
    assert float(became_mask.float().mean()) == pytest.approx(0.8, abs=0.01)
    assert float(stayed.float().mean()) == pytest.approx(0.1 + 0.1 / len(bert.tokenizer), abs=0.01)
    mlm.probability = 1e-9
    assert mlm(EightSentences(bert.tokenizer, 1).batch).item() == 0  # no word is masked


@pytest.mark.parametrize(("kind", "threads"), [("bert", 2), ("roberta", 1)])
def test_masked_words_are_predicted_without_padding_as_with_it(bert, kind, threads, monkeypatch):
    for module in ("terms", "parallel"):
        monkeypatch.setattr(f"whitenedcse.training.{module}.cores", lambda: threads)
    batch, outcomes = EightSentences(bert.tokenizer, 1).batch, []
    model = backbone(kind, len(bert.tokenizer))
    for batches in ("packed", "padded"):
        encoder = Encoder(deepcopy(model).double().eval(), bert.tokenizer, batches=batches)
        torch.manual_seed(3)
        mlm = MaskedLanguageModel(encoder=encoder, weight=1.0, probability=0.4).double().eval()
        torch.manual_seed(0)
        value = mlm(batch)
        value.backward()
        grads = {name: p.grad for name, p in mlm.named_parameters() if p.grad is not None}
        outcomes.append((value.detach(), grads))
    assert len(outcomes[1][1]) > 10
    assert_close(*outcomes, rtol=1e-9, atol=1e-12)


def test_masked_language_modelling_alone_trains_the_encoder(bert, tmp_path):
    bert.backbone.pooler = None
    before = [p.detach().clone() for p in bert.backbone.parameters()]
    mlm = MaskedLanguageModel(encoder=bert, weight=0.5, probability=0.3)
    module = module_of(bert, mlm=mlm, loss=None)
    head = [p.detach().clone() for p in module.embedder.head.parameters()]
    trainer = fit(module, tmp_path, steps=1)
    assert "train/contrastive" not in trainer.callback_metrics
    assert all(p.requires_grad for p in module.parameters())  # frozen while it trains, and not after it
    assert 0 < float(trainer.callback_metrics["train/loss"]) < len(bert.tokenizer)
    moved = [not torch.equal(p, old) for p, old in zip(bert.backbone.parameters(), before, strict=True)]
    assert all(moved)
    assert mlm.model.get_output_embeddings().weight is bert.backbone.get_input_embeddings().weight  # tied
    assert all(torch.equal(p, old) for p, old in zip(module.embedder.head.parameters(), head, strict=True))
    for other, terms in ((None, {}), (None, {"name": mlm}), (mlm, {"name": mlm})):
        with pytest.raises(ValueError, match="loss=none trains by mlm.weight above 0"):
            module_of(bert, mlm=other, loss=None, terms=terms)


class Own(torch.nn.Module):
    """A loss, and a term: how far a learnt map of a view is from another; and what it was given."""

    weight = 0.25

    def __init__(self):
        super().__init__()
        self.map, self.given = torch.nn.Linear(16, 16), []

    def forward(self, given, negatives=None):
        self.given.append(given)
        x = given.x if isinstance(given, Step) else given
        return (self.map(x[0]) - x[1]).square().mean()


def test_a_loss_and_a_term_of_ones_own_train_and_a_term_joins_with_its_weight(bert, tmp_path):
    loss, term = Own(), Own()
    before = deepcopy((loss, term))
    mlm = MaskedLanguageModel(encoder=bert, weight=0.5, probability=0.3)
    trainer = fit(module_of(bert, mlm, loss=loss, terms={"own": term}), tmp_path, steps=1)
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    for own, old, name in zip((loss, term), before, ("contrastive", "own"), strict=True):
        assert not torch.equal(own.map.weight, old.map.weight)
        assert values[f"train/{name}"] == pytest.approx(old(own.given[0]).item(), rel=1e-6)
    (step,) = term.given
    assert step.batch.n * 3 == step.batch.positives.n and step.x.grad_fn is not None
    assert step.x.shape == step.z.shape == (3, step.batch.n, 16)
    wanted = values["train/contrastive"] + 0.25 * values["train/own"] + 0.5 * values["train/mlm"]
    assert values["train/loss"] == pytest.approx(wanted, rel=1e-6)


def scored(dev_set, dev, corpus):
    return dev_set(dev) | dev_set.baselines(dev, corpus)


def test_the_dev_set_scores_the_raw_and_whitened_vectors():
    rng = np.random.default_rng(0)
    dev_set = DevSet([DEV])
    dev, corpus = rng.normal(size=(8, 40)) @ rng.normal(size=(40, 40)), rng.normal(size=(200, 40))
    values = scored(dev_set, dev, corpus)
    row = {sentence: i for i, sentence in enumerate(dev_set.sentences)}
    left, right = ([row[s] for s in side] for side in (DEV.left, DEV.right))

    def cosines(x):
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
        return (x[left] * x[right]).sum(axis=1)

    assert values["dev/spearman"] == pytest.approx(100 * spearmanr(GOLD, cosines(dev)).statistic)
    score = 100 * spearmanr(GOLD, cosines(whitened_by_hand(corpus)(dev))).statistic
    assert values["dev/whitened_on_corpus_k40"] == pytest.approx(score)
    above4 = torch.from_numpy(dev)[torch.tensor([left[:3], right[:3]])]
    assert values["dev/alignment"] == pytest.approx(float(alignment(*above4)))
    assert set(values) == {"dev/spearman", "dev/alignment", "dev/uniformity"} | {
        f"dev/whitened_on_{fitted}_k{k}" for fitted in ("dev", "corpus") for k in (40, 32)
    } | {"dev/effective_rank"} | {f"dev/variance_top{k}" for k in (1, 2, 4, 8, 16, 32)}
    p = np.linalg.svd(dev - dev.mean(0), compute_uv=False) ** 2  # eight rows: seven axes
    p = p[:7] / p.sum()
    assert values["dev/effective_rank"] == pytest.approx(np.exp(-(p * np.log(p)).sum()))
    for k in (1, 2, 4, 8, 16, 32):
        assert values[f"dev/variance_top{k}"] == pytest.approx(p[:k].sum())


def test_more_components_than_sentences_can_vary_by_are_undefined():
    draw = np.random.default_rng(0).normal
    for n, undefined in {32: {32, 40}, 33: {40}, 40: {40}, 41: set()}.items():
        values = scored(DevSet([DEV]), draw(size=(8, 40)), draw(size=(n, 40)))
        assert {k for k in (32, 40) if values[f"dev/whitened_on_corpus_k{k}"] is None} == undefined
    for width, defined in ((6, True), (7, False), (40, False)):  # of eight dev sentences
        values = scored(DevSet([DEV]), draw(size=(8, width)), draw(size=(50, width)))
        assert (values[f"dev/whitened_on_dev_k{width}"] is not None) == defined
        assert values[f"dev/whitened_on_corpus_k{width}"] is not None and values["dev/spearman"] is not None


def test_the_monitor_evaluates_every_few_steps_and_keeps_the_best_checkpoint(bert, tmp_path, monkeypatch):
    monitor, module, clock = monitor_of(tmp_path), module_of(bert), SimpleNamespace()
    clock.perf_counter = itertools.count().__next__
    monkeypatch.setattr("whitenedcse.training.monitor.time", clock)
    fit(module, tmp_path, monitor, steps=5)
    scores = {row.step: row.values["dev/spearman"] for row in monitor.rows}
    assert [*scores] == [0, 2, 4, 5] and module.training and monitor.evaluating == 4
    with (tmp_path / "run" / "metrics.csv").open() as file:
        logged = {int(r["step"]): float(r["dev/spearman"]) for r in csv.DictReader(file) if r["dev/spearman"]}
    assert logged == pytest.approx(scores)
    del scores[0]
    said = monitor.summary()
    assert said["best"] == scores[said["best_step"]] == max(scores.values())
    assert said["positives"] == {"above": 4, "scale": [0, 5], "n": 3, "of": 8}
    again = DevSet([DEV])(Embedder.load(tmp_path / "best").encode(monitor.dev_set.sentences))
    assert again["dev/spearman"] == pytest.approx(said["best"], abs=1e-9)


def test_vectors_that_are_all_one_have_no_score_and_end_training(bert, tmp_path):
    values = DevSet([DEV])(np.ones((8, 4), np.float32))
    assert values["dev/spearman"] is None and values["dev/effective_rank"] == 0
    assert values["dev/variance_top1"] is values["dev/variance_top2"] is None
    assert "dev/variance_top4" not in values  # all of it, by definition
    low = DevSet([DEV._replace(gold=GOLD / 5, scale=(0.0, 5.0))])  # of which no pair is a positive
    assert low(np.eye(8, 4))["dev/alignment"] is None and low.positives["n"] == 0
    with torch.no_grad():  # equal but for rounding
        for table in (bert.backbone.embeddings.word_embeddings, bert.backbone.embeddings.position_embeddings):
            table.weight.zero_()
    monitor = monitor_of(tmp_path)
    said = r"step 0: all 8 dev sentences have the same vector.*pooling=mean, or pooling=last"
    with pytest.raises(ValueError, match=said):
        fit(module_of(bert, kind="mean"), tmp_path, monitor)
    assert monitor.rows == [] and not (tmp_path / "best").exists()


@pytest.mark.parametrize(("embedding", "negatives"), [("encoder", True), ("dense", False), ("head", True)])
def test_prefixes_are_those_of_the_embedding_that_evaluation_sees(bert, embedding, negatives):
    for weight in bert.parameters():  # else all sentences have nearly the same vector
        weight.data *= 8 if weight.ndim > 1 else 1
    embedder, cut = embedder_of(bert, embedding=embedding), Matryoshka(dims=[4, 7])
    embedder.head.before.covariance *= 4  # else it whitens by the identity, as if it were not there
    module = ContrastiveTraining(embedder=embedder, loss=cut, views=3).eval()
    passes = ragged(token_ids(SENTENCES[:6], bert.tokenizer, 32))
    batch = Batch(passes, ragged(token_ids(SENTENCES[6:], bert.tokenizer, 32)) if negatives else None, 2)
    module.log = lambda *_, **__: None
    value = module.training_step(batch, 0)
    tokens = passes if not negatives else concatenate([passes, batch.negatives])
    x = embedder.embed(tokens).unflatten(0, (-1, 2)).double()  # what `encode` returns
    z = embedder.head(embedder.pool(tokens).unflatten(0, (-1, 2))).double()
    expected = LOSS(z[:3], z[3] if negatives else None)
    assert (
        embedding != "encoder" or abs(LOSS(x[:3]) - LOSS(z[:3])) > 0.1
    )  # so that each is told from the other
    for m in (4, 7) if embedding == "head" else (4, 7, 16):
        expected = expected + LOSS(x[:3, :, :m], x[3, :, :m] if negatives else None)
    assert value.item() == pytest.approx(expected.item(), rel=1e-4)
    with pytest.raises(ValueError, match=r"loss.dims=\[4, 17\]: 17 is more than the width 16"):
        ContrastiveTraining(embedder=embedder, loss=Matryoshka(dims=[4, 17]))
