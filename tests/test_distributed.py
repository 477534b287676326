"""W processes of n sentences compute what one of W n does, and chunks of a batch what the batch does."""

import copy
import itertools
import os
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from encoders import WORDS, backbone, embedder_of, whitening
from test_training import DEV
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from whitenedcse.data.datamodule import Batch, SentenceData
from whitenedcse.model import embedder as encoding
from whitenedcse.model.encoder import Encoder
from whitenedcse.model.head import ProjectionHead
from whitenedcse.ragged import concatenate, ragged, split
from whitenedcse.training import parallel
from whitenedcse.training.loss import ContrastiveLoss
from whitenedcse.training.module import ContrastiveTraining, reseed, seed_of
from whitenedcse.training.monitor import Monitor
from whitenedcse.training.parallel import agreed, equal_sizes, everyones, from_first, gathered, place, summed
from whitenedcse.training.trainer import Trainer

N, WIDTH, SEED, STEP = 64, 16, 5, 3
WORLDS = (2, 4)
WHITE = {
    "pca": {"kind": "pca", "momentum": 0.5, "eps": 1e-2},  # float32 is good to 1e-5 at a mild condition only
    "zca": {"kind": "zca", "momentum": 0.5, "eps": 1e-2, "gradient": "full"},
    "group": {"kind": "group", "group_width": 4, "gradient": "full"},
    "shuffled_group": {"kind": "shuffled_group"},
}
HEADS = ("none", "dense", *WHITE)
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
LOSSES = [("l1", True), ("l2", False)]  # of a case: the form, and whether there are hard negatives
FITS = ("zca", "shuffled_group")


def sentences(count, seed):
    """Rows of four to seven token ids."""
    rng = np.random.default_rng(seed)
    return [[2, *rng.integers(5, 5 + len(WORDS), size=rng.integers(2, 6)).tolist(), 3] for _ in range(count)]


COLUMNS = [sentences(N, seed) for seed in range(5)]


def batch_of(share, views, negatives):
    """Some rows of the one global batch; each view is another sentence."""
    columns = [column[share] for column in COLUMNS]
    positives = ragged([row for column in columns[:views] for row in column])
    return Batch(positives, ragged(columns[4]) if negatives else None, len(columns[0]))


def share_of(rank, world, n=N):
    return slice(rank * n // world, (rank + 1) * n // world)


def encoder_of(tokenizer, dtype=torch.float64, dropout=0.0):
    """A BERT whose vectors spread in all directions: a new one gives nearly the same vector to everything."""
    encoder = Encoder(backbone("bert", len(tokenizer)), tokenizer)
    for part in encoder.modules():
        if hasattr(part, "dropout_prob"):  # where older releases of Transformers keep attention's
            part.dropout_prob = dropout
        if isinstance(part, nn.Dropout):
            part.p = dropout
        elif isinstance(part, nn.LayerNorm):
            nn.init.uniform_(part.weight, 0.5, 2.0)  # else the channels of a vector sum to zero
        elif isinstance(part, (nn.Linear, nn.Embedding)):
            part.weight.data *= 10
    return encoder.to(dtype)


def module_of(encoder, head="none", views=2, form="l1", layers=(-2, -1), **settings):  # noqa: PLR0913
    """The real training module around a copy of this encoder; without a trainer its log goes nowhere."""
    white = whitening(**WHITE[head]) if head in WHITE else None
    torch.manual_seed(1)
    embedder = embedder_of(
        Encoder(copy.deepcopy(encoder.backbone), encoder.tokenizer),
        layers=layers,
        head=ProjectionHead(width=WIDTH, whitening=white, dense=head != "none", position="before"),
    ).to(encoder.backbone.dtype)
    loss = ContrastiveLoss(form=form, hard_negative_log_weight=0.5)
    settings = {"mlm": None, "seed": SEED, "optimizer": sgd} | settings
    if masked := settings["mlm"]:
        settings["mlm"] = masked(encoder=embedder.encoder).to(encoder.backbone.dtype)
    module = ContrastiveTraining(embedder=embedder, loss=loss, views=views, **settings)
    module.log = module.log_dict = lambda *args, **kwargs: None
    for weight in module.idle():  # as a run does
        weight.requires_grad_(False)
    return module


def sgd(parameters, *, total_steps):
    optimizer = torch.optim.SGD(parameters, lr=0.5)  # Adam would hide a factor
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def gradient(module):
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.requires_grad])


def ready(module):
    """The module with its step as its forward, wrapped by DDP where there are several processes."""
    module.forward = module.training_step
    return DistributedDataParallel(module) if place()[1] > 1 else module


def stepped(module, batch, step=None):
    """The loss of one step; its gradient is left in the parameters."""
    module.zero_grad()
    step = step or ready(module)  # DDP forgets to average once it is gone
    loss = step(batch, STEP)
    loss.backward()
    return loss.detach()


def every_case(tokenizer):
    """Loss, gradient, clipped gradient and running statistics of each case and precision."""
    outcomes = {}
    encoders = {dtype: encoder_of(tokenizer, dtype) for dtype in TOLERANCE}
    for dtype, head, views in itertools.product(TOLERANCE, HEADS, (2, 3)):
        if dtype == torch.float32 and (head not in FITS or views == 2):
            continue
        module = module_of(encoders[dtype], head, views)
        step = ready(module)
        for form, negatives in LOSSES:
            module.loss = replace(module.loss, form=form)
            loss = stepped(module, batch_of(share_of(*place()), views, negatives), step)
            outcome = {"loss": loss, "gradient": gradient(module)}
            outcome["norm"] = nn.utils.clip_grad_norm_(module.parameters(), 0.01)
            outcome["clipped"] = gradient(module)
            statistics = [torch.zeros(1), *(buffer.flatten() for buffer in module.embedder.head.buffers())]
            outcomes[dtype, head, views, form, negatives] = outcome | {"statistics": torch.cat(statistics)}
    return outcomes


def own_statistics(tokenizer):
    """The step of gather=false."""
    module = module_of(encoder_of(tokenizer), "shuffled_group", 3, gather=False)
    loss = stepped(module, batch_of(share_of(*place()), 3, True))
    return {"loss": loss, "gradient": gradient(module)}


def dropped_out(tokenizer):
    """Pooled vectors of the same sentences at two steps, one of them twice, with dropout on."""
    module, batch = module_of(encoder_of(tokenizer, dropout=0.3)), batch_of(slice(0, 8), 2, False)
    seen = []
    module.embedder.head.project = lambda x, **_: seen.append(x.detach()) or (x, None)
    for index in (0, 1, 0):
        torch.rand(7 * place()[0])
        module.training_step(batch, index)
    own = share_of(*place(), n=8 * place()[1])
    return [x[:, own] for x in seen]


def collectives():
    """What each function of gather.py gives on this rank."""
    rank, world = place()
    made = []
    x = vectors(rank).transpose(0, 1).requires_grad_()  # not contiguous
    y = gathered(x)
    (y.sin() * weights(rank, world)).sum().backward()
    plain = vectors(rank).transpose(0, 1).requires_grad_()
    gathered(plain).sum().backward()  # a gradient that is an expanded scalar
    equal_sizes(7)
    return {
        "place": (rank, world),
        "gathered": y.detach(),
        "gradient": x.grad,
        "plain": plain.grad,
        "agreed": agreed(rank, 10 * rank, -(2**40)),
        "summed": torch.from_numpy(summed(np.full((2, 3), 10.0**rank, np.float32))),
        "first": from_first(lambda: made.append(rank) or {"from": rank, "none": None}),
        "made": made,
        "everyones": everyones({"rank": rank, "text": "x" * rank}),
    }


def vectors(rank):
    return torch.randn(4, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def weights(rank, world):
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(3, 4 * world, 2, dtype=torch.float64, generator=generator)


def fitted(tokenizer, folder, head, **settings):
    """Weights after four clipped steps of the real trainer, on the real data, and the evaluations.

    Pooling reads one layer of three: a rank would wait for ever for a gradient of the others.
    """
    rank, world = place()
    if world > 1:
        keys = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "TORCHELASTIC_RUN_ID": "x"}
        os.environ |= {name: str(value) for name, value in keys.items()}
    sizes = {"max_length": 12, "batch_size": 32, "passes": 1, "seed": 1, "tokenizer": tokenizer}
    data = SentenceData(corpus=str(folder / "corpus.tsv"), columns=["a", "b", "c"], **sizes)
    best = {"directory": folder / f"best{world}", "say": lambda text: None}
    monitor = Monitor(dev=[DEV], every=2, patience=None, **best)
    module = module_of(encoder_of(tokenizer), head, 2, layers=(1,), **settings)
    many = {"devices": world, "accelerator": "cpu", "strategy": "ddp" if world > 1 else "auto"}
    quiet = {"logger": False, "enable_progress_bar": False, "callbacks": [monitor]}
    Trainer(max_epochs=2, gradient_clip_val=0.01, **many, **quiet).fit(module, data)
    return {"weights": module.state_dict(), "rows": [tuple(row) for row in monitor.rows]}


def everything(tokenizer, folder):
    """All that is to be compared, as this world computes it."""
    os.environ["WHITENEDCSE_CACHE"] = str(folder / f"cache{place()[1]}")
    encoding.BATCH_TOKENS = 32  # several batches even of a tiny dev set
    outcome = {
        "collectives": collectives(),
        "cases": every_case(tokenizer),
        "own": own_statistics(tokenizer),
        "dropped_out": dropped_out(tokenizer),
    }
    if place()[1] < 4:
        outcome["fits"] = {head: fitted(tokenizer, folder, head) for head in FITS}
        outcome["apart"] = fitted(tokenizer, folder, "zca", gather=False)["weights"]
    return outcome


def together(rank, world, folder, name, seconds=120):
    """Join a group of processes that meet at a file, not at a port."""
    meeting = (folder / f"{name}{world}").as_uri()
    wait = timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=wait)


def one_of_many(rank, tokenizer, folder):
    """Four processes first, then two of them."""
    for world in sorted(WORLDS, reverse=True):
        if rank < world:
            together(rank, world, folder, "meeting")
            torch.save(everything(tokenizer, folder), folder / f"{world}-{rank}.pt")
            dist.barrier()
            dist.destroy_process_group()


def small(rank, tokenizer, folder):
    """One of two ranks: steps with half of a batch, then one for which the second brings a sentence less."""
    together(rank, 2, folder, "small", seconds=60)
    steps = []
    for chunk in (None, 5):
        module = module_of(encoder_of(tokenizer), "shuffled_group", 3, chunk=chunk)
        loss = stepped(module, batch_of(share_of(rank, 2), 3, True))
        steps.append((loss, gradient(module)))
    torch.save(steps, folder / f"steps{rank}.pt")
    module = module_of(encoder_of(tokenizer), "dense")
    try:
        ready(module)(batch_of(slice(0, 8 - rank), 2, False), 0)
    except ValueError as error:
        (folder / f"error{rank}").write_text(str(error))
    dist.barrier()
    dist.destroy_process_group()


def test_the_hosts_wait_for_each_other_as_long_as_the_devices_do(monkeypatch):
    made = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda *_: "nccl")
    monkeypatch.setattr(dist, "new_group", lambda **settings: made.append(settings) or "hosts")
    monkeypatch.setattr(parallel, "HOSTS", {})
    parallel.meet(90.0)
    assert parallel._hosts() == "hosts" == parallel._hosts()
    assert made == [{"backend": "gloo", "timeout": timedelta(seconds=90)}]


def started(function, count, *args):
    """Processes with this function, forks of this one, which has imported all that is slow."""
    return mp.start_processes(function, args, count, join=False, start_method="fork")


def finish(processes):
    while not processes.join():
        pass


@pytest.fixture(scope="module")
def worlds(tokenizer, tmp_path_factory):
    """What 1, 2 and 4 processes computed: {world: [of rank 0, of rank 1 ...]}."""
    folder = tmp_path_factory.mktemp("worlds")
    words = [[" ".join(np.array(WORDS)[np.array(row[1:-1]) - 5]) for row in column] for column in COLUMNS[:3]]
    lines = ["\t".join(line) for line in zip(*words, strict=True)]
    (folder / "corpus.tsv").write_text("\n".join(["a\tb\tc", *lines]) + "\n")
    processes = started(one_of_many, max(WORLDS), tokenizer, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHITENEDCSE_CACHE", "")
        patch.setattr(encoding, "BATCH_TOKENS", 0)  # `everything` sets both
        outcomes = {1: [everything(tokenizer, folder)]}
    finish(processes)
    for world in WORLDS:
        parts = (folder / f"{world}-{rank}.pt" for rank in range(world))
        outcomes[world] = [torch.load(part, weights_only=False) for part in parts]
    return outcomes


def apart(a, b):
    """Distance over length."""
    return float((a - b).norm() / b.norm())


@pytest.mark.slow
def test_any_number_of_processes_gives_the_same_loss_and_gradient(worlds):
    cases = worlds[1][0]["cases"]
    assert {key[1] for key in cases} == {*HEADS} and len(cases) == 28
    for key, one in cases.items():
        near = TOLERANCE[key[0]]
        assert one["norm"] > 0.1  # so that clipping cuts
        for many in (rank["cases"][key] for world in WORLDS for rank in worlds[world]):
            far = {name: apart(many[name], one[name]) for name in one if name != "statistics"}
            assert max(far.values()) < near, (key, far)
            assert_close(many["statistics"], one["statistics"], rtol=near, atol=near)


@pytest.mark.slow
def test_the_trainer_ends_at_the_same_weights_in_two_processes_which_evaluate_as_one_does(worlds):
    for head, fit in worlds[1][0]["fits"].items():
        for name, weight in fit["weights"].items():
            for many in worlds[2]:
                other = many["fits"][head]["weights"][name]
                assert_close(other, weight, rtol=1e-8, atol=1e-9, msg=name)
        one, first, second = (outcome["fits"][head]["rows"] for outcome in (worlds[1][0], *worlds[2]))
        assert first == second
        assert first[0] == one[0]  # of equal weights, to the last bit
        assert [step for step, _ in first] == [0, 2, 4]
        for mine, theirs in zip(first, one, strict=True):
            assert mine[1] == pytest.approx(theirs[1], abs=1e-4)
        assert one[0][1]["dev/uniformity"] != one[2][1]["dev/uniformity"]


@pytest.mark.slow
def test_without_gathering_each_device_has_its_own_statistics_and_negatives(worlds, tokenizer):
    for world in WORLDS:
        parts = []
        for rank in range(world):
            module = module_of(encoder_of(tokenizer), "shuffled_group", 3)
            loss = stepped(module, batch_of(share_of(rank, world), 3, True))
            assert_close(worlds[world][rank]["own"]["loss"], loss)
            parts.append(gradient(module))
        mean = sum(parts) / world
        for rank in worlds[world]:
            assert apart(rank["own"]["gradient"], mean) < 1e-10
        assert apart(mean, worlds[1][0]["own"]["gradient"]) > 0.1  # gather=true gives that of one process


@pytest.mark.slow
def test_without_gathering_all_ranks_evaluate_by_the_running_statistics_of_the_first(worlds):
    first, second = (outcome["apart"] for outcome in worlds[2])
    assert {"embedder.head.before.mean", "embedder.head.before.covariance"} < first.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_dropout_is_a_function_of_seed_step_and_rank(worlds, tokenizer):
    embedder, world = module_of(encoder_of(tokenizer, dropout=0.3)).embedder, WORLDS[-1]
    batch, seen = batch_of(slice(0, 8), 2, False), set()
    for rank, index in itertools.product(range(world), (0, 1)):
        seed = seed_of(SEED, 0, index, rank, 0)  # seed, epoch, batch, rank, piece
        expected = embedder.pool(batch.positives, seed).detach().unflatten(0, (2, 8))
        first, second, again = worlds[world][rank]["dropped_out"]
        assert torch.equal(second if index else first, expected)
        assert torch.equal(first, again)
        seen.add(round(float(expected.sum()), 9))
    assert len(seen) == 2 * world


def test_two_processes_step_as_one_does_and_refuse_batches_of_unequal_size(tokenizer, tmp_path):
    finish(started(small, 2, tokenizer, tmp_path))
    module = module_of(encoder_of(tokenizer), "shuffled_group", 3)
    expected = stepped(module, batch_of(slice(0, N), 3, True))
    for rank in (0, 1):
        for loss, slope in torch.load(tmp_path / f"steps{rank}.pt", weights_only=False):
            assert_close(loss, expected)
            assert apart(slope, gradient(module)) < 1e-9
        said = (tmp_path / f"error{rank}").read_text()
        assert said == "ranks bring batches of [8, 7] sentences; all must be of one size"


@pytest.mark.slow
def test_gathering_is_a_concatenation_with_gradient_and_every_rank_knows_the_same(worlds):
    for world in WORLDS:
        ranks = range(world)
        parts = [vectors(rank).transpose(0, 1).requires_grad_() for rank in ranks]
        whole = torch.cat(parts, dim=1)
        sum((whole.sin() * weights(rank, world)).sum() for rank in ranks).backward()
        for rank in ranks:
            outcome = worlds[world][rank]["collectives"]
            assert torch.equal(outcome["gathered"], whole)
            assert_close(outcome["gradient"], parts[rank].grad, rtol=0, atol=1e-12)
            assert torch.equal(outcome["plain"], torch.full((3, 4, 2), float(world), dtype=torch.float64))
            assert outcome["place"] == (rank, world)
            assert outcome["agreed"] == [[r, 10 * r, -(2**40)] for r in ranks]
            assert torch.equal(outcome["summed"], torch.full((2, 3), float(sum(10**r for r in ranks))))
            assert outcome["first"] == {"from": 0, "none": None}
            assert outcome["made"] == ([0] if rank == 0 else [])  # no other rank works
            assert outcome["everyones"] == [{"rank": r, "text": "x" * r} for r in ranks]


def test_chunks_have_the_gradient_of_their_own_dropout(tokenizer):
    for chunk in (11, None):
        module = module_of(encoder_of(tokenizer, dropout=0.3), "shuffled_group", 2, chunk=chunk)
        loss = stepped(module, batch := batch_of(slice(0, N), 2, True))
        cached = gradient(module)
        module.zero_grad()
        x = []
        for i, part in enumerate(split(concatenate([batch.positives, batch.negatives]), chunk or 3 * N)):
            x.append(module.embedder.pool(part, seed_of(SEED, 0, STEP, 0, i)))
        reseed(SEED, 0, STEP)
        z, hard = module.embedder.head.project(torch.cat(x).unflatten(0, (3, N)), passes=2, views=2)
        (plain := module.loss(z, hard)).backward()
        assert_close(loss, plain.detach(), rtol=1e-12, atol=0)
        assert apart(cached, gradient(module)) < 1e-10


def test_chunks_lose_nothing_in_bfloat16(tokenizer):
    batch, gradients, kinds = Batch(ragged(sentences(256, 0)), None, 128), [], set()
    for chunk in (None, 4):
        module = module_of(encoder_of(tokenizer, torch.float32), "dense", chunk=chunk)
        query = module.embedder.encoder.backbone.encoder.layer[0].attention.self.query
        query.register_forward_hook(lambda _, given, out: kinds.add(out.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            loss = module.training_step(batch, STEP)
        loss.backward()
        gradients.append(gradient(module))
    assert apart(gradients[1], gradients[0]) < 2**-9  # not growing with the number of chunks
    assert kinds == {torch.bfloat16}
