"""What evaluation sees, what the loss sees, and that a checkpoint says the same everywhere."""

import logging
from contextlib import nullcontext
from io import StringIO
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from encoders import SENTENCES, architecture, embedder_of, projected, whitening
from numpy.testing import assert_allclose
from omegaconf import OmegaConf
from programs import ROOT
from scipy.spatial.distance import cdist
from sentence_transformers import SentenceTransformer
from torch.testing import assert_close

from whitenedcse.app import cli
from whitenedcse.data.tokens import token_ids
from whitenedcse.model import checkpoint
from whitenedcse.model import embedder as encoding
from whitenedcse.model.embedder import Embedder, by_length
from whitenedcse.model.encoder import Encoder
from whitenedcse.model.head import Pooling, ProjectionHead
from whitenedcse.ragged import concatenate, ragged, rows
from whitenedcse.serving.encode import arrays


def tokens(embedder, sentences=SENTENCES):
    return ragged(token_ids(sentences, embedder.encoder.tokenizer, 32))


def trained(embedder):
    """Running statistics that are not the initial ones."""
    with torch.no_grad():
        for _ in range(3):
            projected(embedder.train(), tokens(embedder), n=8, views=1)
    return embedder.eval()


def test_encoding_is_each_sentence_alone_in_the_order_given(encoder, monkeypatch):
    monkeypatch.setattr(encoding, "BLOCK", 7)  # tokenised in ten blocks
    monkeypatch.setattr(encoding, "BATCH_TOKENS", 100)
    embedder = embedder_of(encoder, kind="mean", layers=[1, -1])
    many = [f"{a} {b}" for a in SENTENCES for b in SENTENCES]
    alone = np.concatenate([embedder.encode([sentence]) for sentence in many])
    assert_allclose(embedder.encode(many), alone, atol=2e-6)


def test_batches_hold_every_row_once_within_the_budget():
    lengths = [*map(int, np.random.default_rng(0).integers(0, 600, 500)), 8193]
    some = np.arange(0, 501, 2)
    batches = by_length(ragged([[1] * length for length in lengths]), some, 8192)
    assert sorted(row for batch in batches for row in batch) == some.tolist()
    longest = [max(lengths[row] for row in batch) for batch in batches]
    assert longest[0] == 8193 and len(batches[0]) == 1  # too long for any batch: one of its own
    assert longest == sorted(longest, reverse=True)
    sizes = [longest[i] * len(batch) for i, batch in enumerate(batches)]
    assert max(sizes[1:]) <= 8192 < min(sizes[1:-1]) + 600  # full, too
    assert [batch.tolist() for batch in by_length(ragged([[], []]), np.arange(2), 8192)] == [[0, 1]]


@pytest.fixture
def seen(encoder, monkeypatch):
    """Sentences that the encoder was given."""
    given, forward = [], encoder.forward
    noted = lambda batch, *rest, **more: given.extend(rows(batch)) or forward(batch, *rest, **more)  # noqa: E731
    monkeypatch.setattr(encoder, "forward", noted)
    return given


def test_equal_sentences_are_encoded_once_and_shares_of_them_add_up(encoder, seen, monkeypatch):
    monkeypatch.setattr(encoding, "BATCH_TOKENS", 20)
    embedder = embedder_of(encoder, kind="mean").eval()
    texts = [*SENTENCES, *SENTENCES[::-1], "The  CAT sees a bird", SENTENCES[2]]  # equal as tokens
    every, distinct = (token_ids(some, encoder.tokenizer, 32) for some in (texts, SENTENCES))
    whole = embedder.encode(texts)
    assert sorted(seen) == sorted(distinct)
    assert (whole[8:16] == whole[7::-1]).all() and (whole[16] == whole[0]).all()
    assert (whole[17] == whole[2]).all() and len(np.unique(whole, axis=0)) == 8
    seen.clear()
    parts = [embedder.encode_rows(ragged(every), share=(rank, 3)) for rank in range(3)]
    assert sorted(seen) == sorted(distinct)
    assert (sum(parts) == whole).all() and all(part.any() for part in parts)


def test_batches_that_a_gpu_has_no_memory_for_are_halved_and_said_once(encoder, monkeypatch, capsys):
    """A stub of a GPU: batches above 40 padded tokens do not fit, and copies are waited for."""
    embedder, texts = embedder_of(encoder, kind="mean").eval(), [*SENTENCES, "a cat", "the old dog"]
    wanted, embed, tried = embedder.encode(texts), embedder.embed, []

    def limited(batch):
        tried.append(batch.n * int(batch.lengths.max()))
        if tried[-1] > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return embed(batch)

    monkeypatch.setattr(embedder, "embed", limited)
    encoding.say_halved.cache_clear()
    assert_allclose(embedder.encode(texts), wanted, atol=1e-6)
    assert capsys.readouterr().out.count("they are halved, and encoding goes on") == 1
    assert sum(count > 40 for count in tried) <= 3  # learnt, not tried again for each
    done = []
    monkeypatch.setattr(
        torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: 0, synchronize=lambda: done.append(1))
    )
    rows_, out = ragged(token_ids(texts, encoder.tokenizer, 128)), np.zeros_like(wanted)
    batches = encoding.Halving(rows_, lambda batch: [embed(batch)], torch.device("cpu"), 1000)
    counts = encoding.overlapped([out], np.array_split(np.arange(10), 4), batches, torch.inference_mode)
    assert list(counts) == [3, 3, 2, 2] and len(done) == 4
    assert_allclose(out, wanted, atol=1e-6)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * 2**30, 0))
    assert encoding.batch_tokens(torch.device("cuda"), 768, alone=True) == 54613
    shared = set()  # GPUs with more or less memory cut the same batches, of which each takes its own
    for free in (1, 10, 80):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free * 2**30, 0))
        shared.add(encoding.batch_tokens(torch.device("cuda"), 768, alone=False))
    assert len(shared) == 1
    monkeypatch.setattr(embedder, "embed", lambda _: limited(ragged([[1] * 41])))
    with pytest.raises(torch.OutOfMemoryError):  # a single sentence
        embedder.encode(["a cat"])


def test_each_module_has_its_own_mode_again_after_encoding_also_if_that_is_broken_off(bert, monkeypatch):
    embedder = embedder_of(bert).train()
    bert.backbone.eval()
    before = [module.training for module in embedder.modules()]
    assert {*before} == {True, False}
    embedder.encode(SENTENCES)
    assert [module.training for module in embedder.modules()] == before
    monkeypatch.setattr(bert, "forward", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        embedder.encode(SENTENCES)
    assert [module.training for module in embedder.modules()] == before


def test_in_bf16_the_backbone_rounds_and_pooling_and_head_do_not(encoder):
    exact = embedder_of(encoder, kind="mean").encode(SENTENCES)
    rounded = embedder_of(encoder, kind="mean").encode(SENTENCES, bf16=True)
    assert_allclose(rounded, exact, atol=1e-3)
    assert np.abs(rounded - exact).mean() > 5e-6
    assert (torch.from_numpy(rounded).bfloat16().float().numpy() != rounded).mean() > 0.9
    dense = embedder_of(encoder, kind="mean", embedding="dense")
    linear = dense.head.linear.double()
    expected = torch.tanh(linear(torch.from_numpy(rounded).double())).detach().numpy()
    linear.float()
    assert_allclose(dense.encode(SENTENCES, bf16=True), expected, atol=1e-6)


@torch.no_grad()
def test_encoding_and_what_follows_a_pooler_is_in_float32_whatever_the_caller_computes_in(bert):
    embedder = embedder_of(bert, kind="pooler", embedding="dense").eval()
    precise, wanted = embedder.embed(tokens(embedder)), embedder.encode(SENTENCES)
    with torch.autocast("cpu", torch.bfloat16):
        assert (embedder.encode(SENTENCES) == wanted).all()
        x = embedder.embed(tokens(embedder))
        assert embedder.pool(tokens(embedder)).dtype == x.dtype == torch.float32
    assert_close(x, precise, atol=0.02, rtol=0.02)


def test_a_view_has_its_own_dropout_one_pass_serves_many_views_and_hard_negatives_are_apart(bert):
    embedder = embedder_of(bert, head=ProjectionHead(16, whitening=None, dense=False)).train()
    batch = tokens(embedder)
    z, _ = projected(embedder, concatenate([batch] * 3), n=8, views=3)
    assert len({tuple(view.flatten().tolist()) for view in z}) == 3
    one, _ = projected(embedder, batch, n=8, views=3)
    assert torch.equal(one[0], one[1]) and torch.equal(one[0], one[2])
    two, _ = projected(embedder, concatenate([batch] * 2), n=8, views=3)
    assert torch.equal(two[0], two[2]) and not torch.equal(two[0], two[1])
    shuffled, _ = projected(embedder_of(bert).train(), batch, n=8, views=3)
    assert not torch.allclose(shuffled[0], shuffled[1], atol=1e-3)  # by whitening, of one pass
    with pytest.raises(ValueError, match="3 encoder passes for 2 views"):
        projected(embedder, concatenate([batch] * 3), n=8, views=2)
    embedder, other = embedder.eval(), tokens(embedder, SENTENCES[::-1])
    z, negatives = projected(embedder, concatenate([batch] * 2), other, n=8, views=2)
    x = embedder.pool(concatenate([batch, other]))
    assert_close(z, x[:8].expand(2, 8, 16), atol=1e-6, rtol=1e-5)
    assert_close(negatives, x[8:], atol=1e-6, rtol=1e-5)  # hard negatives, apart


@torch.no_grad()
def test_the_embedding_is_what_the_setting_says(bert):
    pooled = embedder_of(bert).eval().pool(tokens(embedder_of(bert)))
    for embedding in ("encoder", "dense", "head"):
        embedder = trained(embedder_of(bert, embedding=embedding))
        head = embedder.head
        matrices = head.before.matrix(head.before.mean, head.before.covariance)
        white = (pooled - head.before.mean) @ torch.block_diag(*matrices)
        expected = {
            "encoder": pooled,
            "dense": torch.tanh(head.linear(pooled)),
            "head": torch.tanh(head.linear(white)),
        }
        assert_close(embedder.embed(tokens(embedder)), expected[embedding], atol=1e-5, rtol=1e-4)


def test_how_far_it_is_is_told_if_asked(bert, monkeypatch):
    numbers, total = [], []
    monkeypatch.setattr(encoding, "pace", lambda *given: total.append(given) or nullcontext(total.append))
    for progress in (False, True, numbers.append):
        embedder_of(bert).encode(SENTENCES * 2, progress=progress)
    assert total == [("encoded", len(SENTENCES)), *numbers] and sum(numbers) == len(SENTENCES)


CASES = [("cls", "encoder"), ("cls", "dense"), ("last", "encoder"), ("mean", "encoder"), ("mean", "head")]


@pytest.mark.parametrize(("kind", "embedding"), [*CASES, ("pooler", "encoder"), ("max", "encoder")])
@pytest.mark.slow(but=3)
def test_a_checkpoint_says_the_same_in_two_libraries(bert, tmp_path, kind, embedding):
    embedder, best = trained(embedder_of(bert, kind=kind, embedding=embedding)), tmp_path / "best"
    checkpoint.save(embedder, best)
    ours = embedder.encode(SENTENCES)
    for place in (tmp_path, best):  # the run directory, too
        assert_allclose(Embedder.load(place).encode(SENTENCES), ours, atol=1e-6)
    theirs = SentenceTransformer(str(best), device="cpu").encode(SENTENCES)
    assert_allclose(theirs, ours, atol=1e-5 * max(1, abs(ours).max()))
    assert not {path.suffix for path in best.rglob("*")} & {".bin", ".pt", ".pkl", ".ckpt"}
    both = embedder_of(bert, kind="max", layers=[1, -1])  # which that library cannot express
    checkpoint.save(both, best)
    assert not (best / "modules.json").exists()
    assert_allclose(Embedder.load(best).encode(SENTENCES), both.encode(SENTENCES), atol=1e-6)


def test_pooling_belongs_to_the_checkpoint_and_is_free_for_a_plain_encoder(bert, tmp_path):
    best = tmp_path / "best"
    checkpoint.save(embedder_of(bert), best)
    mean = Pooling(kind="mean", layers=[1, -1])
    with pytest.raises(ValueError, match="carries its own pooling .whitenedcse.json."):
        Embedder.load(str(tmp_path), mean)
    for name in ("whitenedcse.json", "modules.json", "digests.json"):
        (best / name).unlink()
    wanted = embedder_of(bert, kind="mean", layers=[1, -1]).encode(SENTENCES)
    for pooling in (mean, "first_last"):
        assert_allclose(Embedder.load(str(best), pooling).encode(SENTENCES), wanted, atol=1e-6)
    for name, expected in ((None, "cls over layers [-1]"), ("mean", "mean over layers [-1]")):
        assert str(Embedder.load(best, name).pooling) == expected
    with pytest.raises(ValueError, match="pooling.kind='avg' is not one of"):
        Embedder.load(best, "avg")
    (tmp_path / "x.txt").write_text("\n".join(SENTENCES))
    words = ["encode", str(best), str(tmp_path / "x.txt"), str(tmp_path / "out")]
    assert cli.main([*words, "--pooling", "first_last"]) == 0
    assert_allclose(np.concatenate([*arrays(tmp_path / "out")]), wanted, atol=1e-6)
    for file in {*(ROOT / "conf/pooling").glob("*.yaml")} - {ROOT / "conf/pooling/own.yaml"}:
        option, named = OmegaConf.load(file), Pooling.named(file.stem)  # the same names, of the same poolings
        assert (named.kind, [*named.layers]) == (option.kind, option.layers), file


def test_sentence_transformers_misses_no_weights(bert, tmp_path, monkeypatch):
    """It reports those of a pooler that the encoder came without, unless told that there is none."""
    bert.backbone.pooler = None
    checkpoint.save(embedder_of(bert, kind="mean"), tmp_path / "best")
    told = logging.StreamHandler(StringIO())
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [told])
    model = SentenceTransformer(str(tmp_path / "best"), device="cpu")
    assert model[0].model.pooler is None
    assert "MISSING" not in told.stream.getvalue()


def test_embeddings_that_do_not_exist_are_refused(bert):
    with pytest.raises(ValueError, match="'mlp' is not one of encoder, dense, head"):
        embedder_of(bert, embedding="mlp")
    with pytest.raises(ValueError, match="no dense layer"):
        embedder_of(bert, embedding="dense", head=ProjectionHead(16, dense=False, whitening=whitening()))
    bert.backbone.pooler = None
    with pytest.raises(ValueError, match="no pooler of its own"):
        embedder_of(bert, kind="pooler")


def test_similarity_is_the_cosine_of_every_two():
    x, y = np.random.default_rng(0).normal(size=(5, 7)) * 1e-9, np.random.default_rng(1).normal(size=(3, 7))
    got = Embedder.similarity(x, y.astype(np.float32))
    np.testing.assert_allclose(got, 1 - cdist(x, y.astype(np.float32), "cosine"), rtol=0, atol=1e-7)
    assert got.shape == (5, 3) and got.dtype == np.float32
    assert not Embedder.similarity(np.zeros((1, 7)), y).any()


def test_a_default_embedder_computes_nothing_of_a_bert_and_little_of_others(encoder, seen, tokenizer):
    Embedder(encoder=encoder)
    assert seen == []
    other = Encoder(architecture("distilbert", len(tokenizer)), tokenizer)
    forward, calls = other.forward, []
    other.forward = lambda *given, **more: calls.append(1) or forward(*given, **more)
    Embedder(encoder=other), Embedder(encoder=other, pooling="cls")
    assert len(calls) == 2  # two sentences, once
