"""A teacher's similarities as targets: the cross-entropy of a naive loop; and no weight of it is trained."""

import json
import math
import shutil
from copy import deepcopy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from encoders import backbone, embedder_of
from programs import started as program
from test_distributed import (
    COLUMNS,
    N,
    apart,
    batch_of,
    encoder_of,
    finish,
    gradient,
    module_of,
    share_of,
    started,
    stepped,
    together,
)
from test_scripts import TINY
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast

from whitenedcse.app import identity
from whitenedcse.model.encoder import Encoder
from whitenedcse.ragged import ragged
from whitenedcse.training.loss import Step
from whitenedcse.training.terms import Teacher, listwise, others


@pytest.fixture
def run(tokenizer, tmp_path):
    """The directory of a run whose best/ is an encoder with other weights than a new one."""
    encoder = encoder_of(tokenizer, torch.float32)
    embedder_of(encoder, kind="mean", layers=(-2,)).save(tmp_path / "run" / "best")
    return tmp_path / "run"


def cosine(a, b):
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))


def naive(z, t, temperature, teacher_temperature):
    """Sentence by sentence and in Python's numbers; z: (v, n, d) and t: (p, n, d') as lists."""
    total, n = 0.0, len(z[0])
    for view in range(1, len(z)):
        target = t[view % len(t)]
        for i in range(n):
            rest = [j for j in range(n) if j != i]
            wanted = [math.exp(cosine(t[0][i], target[j]) / teacher_temperature) for j in rest]
            given = [math.exp(cosine(z[0][i], z[view][j]) / temperature) for j in rest]
            shares = zip(wanted, given, strict=True)
            total -= sum(w / sum(wanted) * math.log(g / sum(given)) for w, g in shares)
    return total / n / (len(z) - 1)


@pytest.mark.parametrize(("views", "passes"), [(2, 1), (2, 2), (3, 1), (3, 2), (3, 3)])
def test_the_term_and_its_gradient_are_those_of_a_naive_loop(views, passes):
    rng, taus = np.random.default_rng(0), (0.3, 0.2)
    z, t = rng.normal(size=(views, 4, 3)), rng.normal(size=(passes, 4, 5))
    x = torch.tensor(z, requires_grad=True)
    loss = listwise(x, torch.tensor(t), taus)
    loss.backward()
    assert loss.item() == pytest.approx(naive(z.tolist(), t.tolist(), *taus), rel=1e-12)
    for place in np.ndindex(z.shape):
        ends = []
        for step in (1e-6, -1e-6):
            moved = z.copy()
            moved[place] += step
            ends.append(naive(moved.tolist(), t.tolist(), *taus))
        assert float(x.grad[place]) == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-7)


def test_a_student_like_its_teacher_has_no_gradient_and_the_entropy_as_loss():
    t = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z = t.clone().requires_grad_()
    loss = listwise(z, t, (0.1, 0.1))
    loss.backward()
    assert float(z.grad.abs().max()) < 1e-12
    unit = torch.nn.functional.normalize(t, dim=-1)
    lists = others(unit[0] @ unit[1].T) / 0.1
    entropy = -(lists.softmax(-1) * lists.log_softmax(-1)).sum(-1).mean()
    assert_close(loss.detach(), entropy)


@pytest.mark.parametrize("n", [2, 3, 7])
def test_others_are_all_but_the_diagonal(n):
    square = torch.arange(2 * n * n).view(2, n, n)
    expected = [[[int(m[i, j]) for j in range(n) if j != i] for i in range(n)] for m in square]
    assert others(square).tolist() == expected


def test_the_precision_is_at_least_float32_under_autocast():
    z, t = torch.randn(2, 2, 8, 4).unbind()
    with torch.autocast("cpu", torch.bfloat16):
        loss = listwise(z.bfloat16(), t, (0.05, 0.025))
    assert loss.dtype == torch.float32
    assert_close(loss, listwise(z.bfloat16().float(), t, (0.05, 0.025)))


def student(tokenizer):
    return Encoder(backbone("bert", len(tokenizer)), tokenizer)


def step_of(batch, views=2):
    z = torch.randn(views, batch.n, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    return Step(batch, z.detach(), z)


@pytest.mark.parametrize("where", ["", "best"])
def test_a_teacher_embeds_the_tokens_of_the_batch_as_its_checkpoint_says(tokenizer, run, where):
    term, batch = Teacher(path=str(run / where), encoder=student(tokenizer)), batch_of(slice(0, 9), 2, True)
    own = embedder_of(encoder_of(tokenizer, torch.float32), kind="mean", layers=(-2,)).eval()
    with torch.no_grad():
        expected = torch.stack([own.embed(ragged(column[:9])) for column in COLUMNS[:2]])
    t = term.vectors(batch)
    assert_close(t, expected, rtol=1e-5, atol=1e-5)
    assert not t.requires_grad and not term.embedder.training
    step = step_of(batch)
    assert_close(term(step), listwise(step.z, expected, (0.05, 0.025)), rtol=1e-4, atol=1e-4)


def test_a_teacher_computes_in_the_precision_of_the_step(tokenizer, run):
    term, batch = Teacher(path=str(run), encoder=student(tokenizer)), batch_of(slice(0, 9), 2, False)
    exact = term.vectors(batch)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = term.vectors(batch)
    assert rounded.dtype == torch.float32
    assert 1e-4 < float((rounded - exact).norm() / exact.norm()) < 0.1


def test_a_teacher_is_no_part_of_what_is_trained(tokenizer, run):
    plain = module_of(encoder_of(tokenizer), "dense")
    term = Teacher(path=str(run), encoder=plain.embedder.encoder)
    taught = module_of(encoder_of(tokenizer), "dense", terms={"teacher": term})
    assert taught.state_dict().keys() == plain.state_dict().keys()
    assert len(list(taught.parameters())) == len(list(plain.parameters()))
    taught.train()
    before = deepcopy(term.embedder.state_dict())
    taught.training_step(batch_of(slice(0, N), 2, False), 0).backward()
    assert not term.embedder.training
    assert all(p.grad is None and not p.requires_grad for p in term.embedder.parameters())
    after = term.embedder.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_teacher_changes_the_step_by_its_weight(tokenizer, run):
    batch, losses = batch_of(slice(0, N), 2, False), []
    plain = module_of(encoder_of(tokenizer), "dense")
    for weight in (1.0, 3.0):
        term = Teacher(path=str(run), encoder=plain.embedder.encoder, weight=weight)
        losses.append(module_of(encoder_of(tokenizer), "dense", terms={"t": term}).training_step(batch, 0))
    own, one, three = (loss.item() for loss in (plain.training_step(batch, 0), *losses))
    assert three - own == pytest.approx(3 * (one - own), rel=1e-6) and one - own > 0.1


def test_a_teacher_of_other_words_is_refused(tokenizer, run):
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    other = deepcopy(tokenizer)
    other.add_tokens(["zebra"])
    with pytest.raises(ValueError, match=r"teacher .*run has another tokenizer \(45 entries.*encoder's 46\)"):
        Teacher(path=str(run), encoder=Encoder(backbone("bert", 46), other))
    core = deepcopy(tokenizer.backend_tokenizer)
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]", "sep_token": "[SEP]"}
    special = PreTrainedTokenizerFast(tokenizer_object=core, cls_token=words[7], **names)
    assert special.get_vocab() == tokenizer.get_vocab()
    with pytest.raises(ValueError, match=r"another tokenizer .* use one with the tokenizer of the encoder"):
        Teacher(path=str(run), encoder=Encoder(backbone("bert", len(words)), special))


def test_a_teacher_without_a_path_is_asked_for(bert):
    with pytest.raises(ValueError, match="path is null: TEACHER=outputs/NAME"):
        Teacher(path=None, encoder=bert)


@pytest.mark.parametrize("name", ["weight", "temperature", "teacher_temperature"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_numbers_of_a_teacher_are_above_0(tokenizer, run, name, value):
    with pytest.raises(ValueError, match=f"{name}={value} of the teacher .* above 0"):
        Teacher(path=str(run), encoder=student(tokenizer), **{name: value})


def test_sentences_that_a_teacher_cannot_read_are_refused(tokenizer, run):
    term = Teacher(path=str(run), encoder=student(tokenizer))
    term.embedder.encoder.max_length = 5
    with pytest.raises(
        ValueError, match=r"of 7 tokens, but the teacher .*run takes 5: use data\.max_length=5"
    ):
        term(step_of(batch_of(slice(0, N), 2, False)))


def test_the_digest_of_a_teacher_is_of_its_weights_and_of_how_it_pools(tokenizer, run, tmp_path):
    def digest(path):
        return identity.of_embedder(Teacher(path=str(path), encoder=student(tokenizer)).embedder)

    encoder, known = encoder_of(tokenizer, torch.float32), {digest(run)}
    embedder_of(encoder, kind="mean", layers=(-2,)).save(tmp_path / "same")
    assert digest(tmp_path / "same") in known
    embedder_of(encoder, kind="cls", layers=(-2,)).save(tmp_path / "cls")
    encoder.backbone.embeddings.word_embeddings.weight.data[7, 0] += 1e-3
    embedder_of(encoder, kind="mean", layers=(-2,)).save(tmp_path / "moved")
    assert len(known | {digest(tmp_path / "cls"), digest(tmp_path / "moved")}) == 3


def taught(tokenizer, run, **settings):
    """The training module of the distributed tests, with a teacher."""
    encoder = encoder_of(tokenizer)
    term = Teacher(path=str(run), encoder=encoder, weight=2.0)
    return module_of(encoder, "shuffled_group", 3, terms={"teacher": term}, **settings)


def one_of_two(rank, tokenizer, run):
    together(rank, 2, run, "taught", seconds=60)
    for gather in (True, False):
        module = taught(tokenizer, run, gather=gather)
        loss = stepped(module, batch_of(share_of(rank, 2), 3, True))
        torch.save((loss, gradient(module)), run / f"{gather}{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_have_one_list_of_all_sentences_or_each_its_own(tokenizer, run):
    """Teachers compute in float32, where the numbers of a sentence depend on those beside it in a batch."""
    finish(started(one_of_two, 2, tokenizer, run))
    module, parts = taught(tokenizer, run), []
    expected = stepped(module, batch_of(slice(0, N), 3, True))
    for rank in (0, 1):
        loss, slope = torch.load(run / f"True{rank}.pt", weights_only=False)
        assert_close(loss, expected, rtol=1e-5, atol=0)
        assert apart(slope, gradient(module)) < 1e-4
        own = taught(tokenizer, run)
        alone = stepped(own, batch_of(share_of(rank, 2), 3, True))
        parts.append(gradient(own))
        assert_close(torch.load(run / f"False{rank}.pt", weights_only=False)[0], alone, rtol=1e-5, atol=0)
        assert abs(float(alone - expected)) > 0.1
    for rank in (0, 1):
        slope = torch.load(run / f"False{rank}.pt", weights_only=False)[1]
        assert apart(slope, (parts[0] + parts[1]) / 2) < 1e-4


@pytest.mark.slow
def test_a_run_with_a_teacher_is_another_with_another_teacher(tmp_path):
    """As a user starts it; the teacher is a run of the same encoder's kind, whose best/ then changes."""
    few = [*TINY, "trainer.max_steps=2", "tasks=none", "data.sample=200"]
    system, where = ["+system=teacher", "run=taught"], {"TEACHER": "outputs/first"}
    missing = program("train.py", *few, *system, cwd=tmp_path)
    assert missing.returncode == 2 and "path is null: TEACHER=outputs/NAME" in missing.stderr
    nowhere = program("train.py", *few, *system, cwd=tmp_path, **where)
    assert nowhere.returncode == 2 and "encoder outputs/first: no directory" in nowhere.stderr
    first = program("train.py", *few, "+system=simcse", "run=first", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    done = program("train.py", *few, *system, cwd=tmp_path, **where)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "outputs/taught/versions.json").read_text())
    assert len(facts["content"]["terms.teacher.path"]) > 20
    assert "train/teacher" in (tmp_path / "outputs/taught/metrics.csv").read_text().splitlines()[0]
    (tmp_path / "outputs/taught/scores.json").unlink()
    second = program(
        "train.py", *few, "+system=simcse", "run=first", "seed=2", "hydra.run.dir=outputs/b", cwd=tmp_path
    )
    assert second.returncode == 0, second.stderr
    shutil.rmtree(tmp_path / "outputs/first")
    (tmp_path / "outputs/b").rename(tmp_path / "outputs/first")
    again = program("train.py", *few, *system, cwd=tmp_path, **where)
    assert again.returncode == 2 and "holds another run: content.terms.teacher.path=" in again.stderr
