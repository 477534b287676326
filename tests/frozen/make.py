"""Figures that a rewrite must not move: python -m tests.frozen.make [PART ...] [--write]

It computes the parts (all of them, or those named) and compares them with the files beside it; --write
writes them. The exit status is 1 if anything differs by more than a part's tolerance. The files are of the
code of commit 438c97b, in one thread. What must be equal bit by bit is a sha256, which another kind of
CPU need not give: write the files there from a commit that is trusted, then compare.

protocols   scores of the three protocols: a tiny encoder on the bundled pairs, and on the seven tasks, for
            which WHITENEDCSE_DATA is needed
sts         scores of a real encoder on the seven tasks, minutes: FROZEN_MINILM_MLM names the folder of it
            (shared/models/minilm-mlm); those of all-MiniLM-L6-v2 are in tests/test_published.py
heads       kinds of whitening, gradients and partitions: outputs and gradients in float64, and in eval mode
losses      each form of loss on a fixed batch: value and gradient in float64
quickstart  weights of the quick start after 40 steps, and of the same run killed and resumed
ranks       losses and weights of 2 ranks against 1, in float64
exports     vectors of each export, read by the library that it is for
reports     what `whitenedcse report` prints for the committed runs, and the published tables

Speed is not here: results/speed/cores-*.json (bench.cores, the machine alone) are the ratios to hold.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "300"}

import argparse
import csv
import hashlib
import itertools
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from tests.exported import by_onnxruntime, by_sentence_transformers

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TRAIN = [sys.executable, str(ROOT / "train.py")]
CORPUS = ROOT / "data" / "quickstart" / "sentences.txt"
SEVEN = ["STS12", "STS13", "STS14", "STS15", "STS16", "STS-B", "SICK-R"]
TOLERANCE = {"protocols": 1e-6, "sts": 2e-5, "ranks": 1e-9, "exports": 1e-5}  # else 1e-11
Json = Any


# what is computed


def protocols() -> Json:
    """Scores of a tiny encoder under each protocol."""
    found, white = {}, {"k": 8, "fit": str(CORPUS), "sample": None}
    with folder() as here:
        tiny(here / "tiny")
        sets = {"bundled": ["quickstart/test"]}
        sets |= {"seven": SEVEN} if os.environ.get("WHITENEDCSE_DATA") else {}
        for protocol, more in {"simcse": {}, "whiteningbert": {}, "bert_whitening": white}.items():
            for name, tasks in sets.items():
                made = scores(here / "tiny", here / protocol / name, tasks, protocol, **more)
                found[f"{protocol}, {name}"] = made
    return found


def sts() -> Json:
    """Scores of a real encoder on the seven tasks; those frozen where its folder is not named."""
    if not (path := os.environ.get("FROZEN_MINILM_MLM")):
        sys.stderr.write("sts: not computed, as FROZEN_MINILM_MLM does not name the encoder\n")
        return read("sts")
    with folder() as here:
        return {"minilm-mlm, simcse": scores(path, here / "run", SEVEN, "simcse")}


def scores(model: str | Path, output: Path, tasks: list[str], protocol: str, **settings: Any) -> Json:
    """What whitenedcse.evaluate gives: scores by row and task, intervals of the average, and geometry."""
    import whitenedcse

    settings |= {"protocol": protocol, "draws": 50}
    run = whitenedcse.evaluate(model, tasks=tasks, output=output, settings=settings)
    return {row["name"].replace(str(CORPUS), "CORPUS"): numbers(row) for row in run.results["rows"]}


def numbers(row: Json) -> Json:
    """The numbers of a row of scores.json that a rewrite must keep."""
    kinds = ("all", "mean", "wmean")
    found = {name: [task[kind] for kind in kinds] for name, task in row["sts"]["tasks"].items()}
    found |= {f"{name}, Pearson": task["pearson"]["all"] for name, task in row["sts"]["tasks"].items()}
    average = row["sts"]["avg"]
    found["average"] = [average[kind] for kind in kinds]
    found["interval of the average"] = average["interval"]["all"]
    names = ("alignment", "uniformity", "mean_cosine", "isotropy", "effective_rank")
    found["geometry"] = [row["geometry"][name] for name in names] if row.get("geometry") else []
    return found


def heads() -> Json:
    """Projection heads on a fixed batch (3, 64, 24) in float64: z and gradients, then z in eval mode."""
    import torch

    from whitenedcse import ProjectionHead
    from whitenedcse.model.whitener import WhiteningSettings

    found = {}
    for name, settings in whitenings():
        whitening = None if settings is None else WhiteningSettings(**settings)
        for position in ("before", "both") if name == "shuffled_group" else ("before",):
            torch.manual_seed(7)
            head = ProjectionHead(24, whitening=whitening, position=position).double()
            x = fixed(1, 3, 64, 24, mixed=True).requires_grad_()
            torch.manual_seed(11)  # of the permutations
            z = head(x)
            (z * fixed(2, 3, 64, 24)).sum().backward()
            head(fixed(3, 3, 64, 24, mixed=True))  # the running statistics follow
            head.eval()
            weights = sum(p.grad.norm().item() ** 2 for p in head.parameters() if p.grad is not None)
            found[f"{name}, {position}"] = {
                "z": few(z),
                "gradient": few(x.grad),
                "of the weights": weights**0.5,
                "eval": few(head(fixed(4, 1, 8, 24, mixed=True))),
            }
    return found


def whitenings() -> Iterator[tuple[str, Json]]:
    """Settings of each whitening that is kept, by name; None is no whitening."""
    yield "none", None
    for kind, width in {"pca": None, "zca": None, "group": 6, "shuffled_group": 2}.items():
        for gradient in ("full", "centre", "none"):
            if (kind, gradient) != ("pca", "full"):
                yield f"{kind}, {gradient}", {"kind": kind, "group_width": width, "gradient": gradient}
    yield "shuffled_group", {}
    for width, gradient in itertools.product((2, 6), ("full", "centre")):
        common = {"kind": "shuffled_group", "group_width": width, "gradient": gradient}
        yield f"official_slice, {width}, {gradient}", common | {"partition": "official_slice"}
        yield f"iterative, {width}, {gradient}", common | {"transform": "iterative"}
    yield "eps", {"kind": "group", "group_width": 3, "eps": 1e-2, "momentum": 0.5}


def losses() -> Json:
    """Losses of z (v, 16, 12) in float64: value and gradient."""
    found = {}
    for name, views, negatives, loss in every_loss():
        z = fixed(5, views, 16, 12, mixed=True).requires_grad_()
        hard = fixed(6, 16, 12).requires_grad_() if negatives else None
        value = loss(z, hard)
        value.backward()
        found[name] = {"value": value.item(), "gradient": few(z.grad)}
        if hard is not None and hard.grad is not None:
            found[name]["of the negatives"] = few(hard.grad)
    return found


def every_loss() -> Iterator[tuple[str, int, bool, Callable[..., Any]]]:
    """Name, views, whether there are hard negatives, and the loss of z and these."""
    from whitenedcse import ContrastiveLoss, Matryoshka

    grid = itertools.product(("l1", "l2"), ("view", "symmetric"), (2, 3), (False, True))
    for form, denominator, views, negatives in grid:
        loss = ContrastiveLoss(form=form, denominator=denominator, hard_negative_log_weight=0.5)
        yield f"{form}, {denominator}, {views} views, negatives {negatives}", views, negatives, loss
    yield "weights", 3, False, ContrastiveLoss(weights=[1.0, 0.8], temperature=0.1)
    yield "weights, l2", 3, False, ContrastiveLoss(form="l2", weights=[1.0, 0.8], temperature=0.1)
    cut = Matryoshka(dims=[4, 8], dim_weights=[1.0, 0.5])
    yield "matryoshka", 2, False, cut
    yield "matryoshka of x", 2, True, lambda z, hard: cut(z, hard, x=z * 2 + 1, x_negatives=hard)
    for name, loss in own_losses().items():
        yield name, 2, False, loss


def own_losses() -> dict[str, Callable[..., Any]]:
    """Losses and penalties without negatives, by name, as functions of z: (v, n, d)."""
    import torch

    from examples.losses import SIGReg, VICReg
    from whitenedcse import CovariancePenalty
    from whitenedcse.training.loss import Step

    def sigreg(z: Any, _: Any) -> Any:
        torch.manual_seed(13)  # of its directions
        return SIGReg()(z)

    penalty = CovariancePenalty(weight=1.0, of="x")
    return {"vicreg": VICReg(), "sigreg": sigreg, "covariance": lambda z, _: penalty(Step(None, z, z))}


def quickstart() -> Json:
    """sha256 of the weights of best/ after 40 steps, and of the same run after a kill, resumed."""
    words = ["trainer.max_steps=40", "tasks=none", "checkpoint_every=1", "trainer.devices=1"]
    with folder() as here:
        train(here, "run=whole", *words)
        process = subprocess.Popen([*TRAIN, "run=killed", *words], cwd=here, stdout=-3, stderr=-3)
        while not list((here / "outputs/killed").rglob("*.ckpt")) and process.poll() is None:
            time.sleep(0.05)
        process.kill()
        assert process.wait() == -9, "the run ended before it could be killed"
        said = train(here, "run=killed", *words)
        assert re.search(r"resum|step \d+", said), said
        found = {name: weights(here / "outputs" / name / "best") for name in ("whole", "killed")}
        losses = {name: column(here / "outputs" / name / "metrics.csv", "train/loss") for name in found}
    assert found["whole"] == found["killed"] and losses["whole"] == losses["killed"], found
    return {"weights": found["whole"], "loss": losses["whole"]}


def ranks() -> Json:
    """Losses of 2 ranks in float64 without dropout, and whether they differ from those of 1."""
    import torch
    from safetensors.torch import load_file

    words = f"data=file data.corpus={CORPUS} encoder=pretrained encoder.path=tiny monitor=held_out tasks=none"
    words += " trainer.max_steps=6 trainer.log_every_n_steps=1 trainer.precision=64-true data.batch_size=32"
    with folder() as here:
        tiny(here / "tiny", dropout=0.0)
        for count in (1, 2):
            train(here, f"run=r{count}", f"trainer.devices={count}", *words.split())
        losses = [column(here / f"outputs/r{count}/metrics.csv", "train/loss") for count in (1, 2)]
        states = [load_file(here / f"outputs/r{count}/best/model.safetensors") for count in (1, 2)]
    most = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    difference = max(torch.dist(states[0][name], states[1][name], p=torch.inf).item() for name in states[0])
    sys.stderr.write(f"2 ranks against 1: losses differ by {most:.1e}, weights by {difference:.1e}\n")
    return {
        "loss": losses[1],
        "losses differ by less than 1e-12": most < 1e-12,
        "weights differ by less than 1e-7": difference < 1e-7,  # they are stored in float32
    }


def by_transformers(out: Path, texts: list[str]) -> Any:
    """The last hidden states of the first token by Transformers."""
    from transformers import AutoModel, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(out)(texts, padding=True, return_tensors="pt")
    return AutoModel.from_pretrained(out).eval()(**tokens).last_hidden_state[:, 0]


def exports() -> Json:
    """Vectors of each export of a tiny embedder, plain and with a whitening, read by its own library."""
    import whitenedcse

    texts = ["a man is playing a guitar", "The old river is near the town.", "word"]
    lines, found = CORPUS.read_text().splitlines()[:400], {}
    with folder() as here:
        tiny(here / "tiny")
        plain = whitenedcse.Embedder.load(here / "tiny", "mean")
        fit = whitenedcse.Postprocess("whitening").fit(plain.encode(lines))
        for name, embedder in {"plain": plain, "whitened": whitenedcse.whitened(plain, fit, k=12)}.items():
            found[f"mean, {name}, embedder"] = few(embedder.encode(texts))
            for to, read in READERS.items():
                if (name, to) != ("whitened", "transformers"):  # whose directory holds the encoder alone
                    whitenedcse.export(embedder, out := here / f"{name}-{to}", to)
                    found[f"mean, {name}, {to}"] = few(read(out, texts))
    return found


READERS = {
    "sentence-transformers": by_sentence_transformers,
    "transformers": by_transformers,
    "onnx": by_onnxruntime,
}


def reports() -> Json:
    """The printed tables of the committed runs in each form, and published tables without runs."""
    found = {}
    with folder() as here:
        for name in ("lab", "study"):
            with tarfile.open(ROOT / "results" / name / "runs.tar.xz") as tar:
                tar.extractall(here, filter="data")
            for to in ("table", "markdown", "csv"):
                found[f"{name}-{to}"] = report(here, name, "--to", to, "--out", f"{name}.html")
        (here / "none").mkdir()
        keys = [line.partition(": ")[0] for line in report(here, "--list").splitlines()]
        found["published-list"] = report(here, "--list")
        said = {key: report(here, key, "none", "--to", "csv") for key in keys}
        found["published-csv"] = "\n".join(f"== {key}\n{text}" for key, text in said.items())
    return found


def report(here: Path, *words: str) -> str:
    """What `whitenedcse report WORDS` prints, where files were written left out."""
    from whitenedcse.app.cli import main

    said = StringIO()
    with chdir(here), redirect_stdout(said):
        assert main(["report", *words]) == 0
    lines = (line.rstrip() for line in said.getvalue().splitlines() if not line.startswith("written: "))
    return "\n".join(lines)


# what it is made of


@contextmanager
def folder() -> Iterator[Path]:
    """A temporary folder, where the cache is too."""
    with tempfile.TemporaryDirectory(prefix="frozen-", ignore_cleanup_errors=True) as name:
        os.environ["WHITENEDCSE_CACHE"] = f"{name}/cache"
        yield Path(name)


def tiny(path: Path, dropout: float = 0.1) -> None:
    """Write a random BERT of 3 layers x 32, with the 2,000 most frequent words of the bundled sentences."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    path.mkdir(parents=True)
    words = Counter(re.findall(r"\w+|[^\w\s]", CORPUS.read_text().lower()))
    letters = sorted({letter for word in words for letter in word})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{one}" for one in letters)]
    kept = [word for word, _ in sorted(words.items(), key=lambda pair: (-pair[1], pair[0]))[:2000]]
    vocabulary += [word for word in kept if word not in letters]
    (path / "vocab.txt").write_text("\n".join(vocabulary))
    torch.manual_seed(0)
    shape: Any = {"vocab_size": len(vocabulary), "hidden_size": 32, "num_hidden_layers": 3}
    shape |= {"num_attention_heads": 2, "intermediate_size": 64, "initializer_range": 0.2}
    shape |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    BertModel(BertConfig(**shape)).save_pretrained(path)
    BertTokenizerFast(vocab=str(path / "vocab.txt"), model_max_length=512).save_pretrained(path)


def fixed(seed: int, *shape: int, mixed: bool = False) -> Any:
    """Random numbers in float64; mixed: of unlike and correlated channels, off the origin."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    if not mixed:
        return x
    d = shape[-1]
    matrix = torch.randn(d, d, generator=generator, dtype=torch.float64) / d**0.5 + torch.eye(d)
    return x @ matrix * torch.linspace(0.3, 2.0, d, dtype=torch.float64) + torch.linspace(-1, 1, d)


def few(x: Any) -> list[float]:
    """The length of a tensor or array, its sum, and three of its numbers."""
    import torch

    flat = torch.as_tensor(x).detach().double().flatten()
    picked = flat[[0, len(flat) // 3, len(flat) - 1]]
    return [float(value) for value in (flat.norm(), flat.sum(), *picked)]


def weights(path: Path) -> str:
    """sha256 of all tensors of a folder, whatever they and their files are called."""
    from safetensors.torch import load_file

    tensors = [tensor for file in sorted(path.glob("*.safetensors")) for tensor in load_file(file).values()]
    contents = (x.contiguous().numpy().tobytes() for x in tensors if x.numel() > 1)
    parts = sorted(hashlib.sha256(content).hexdigest() for content in contents)
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def column(file: Path, name: str) -> list[float]:
    """The numbers of a column of a csv file."""
    with file.open() as stream:
        return [float(row[name]) for row in csv.DictReader(stream) if row.get(name)]


def train(here: Path, *words: str) -> str:
    """What train.py prints in a folder. Raises RuntimeError where it fails."""
    done = subprocess.run([*TRAIN, *words], cwd=here, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"train.py {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


# how it is compared

PARTS = {one.__name__: one for one in (protocols, sts, heads, losses, quickstart, ranks, exports, reports)}


def differences(frozen: Json, now: Json, tolerance: float, place: str = "") -> list[str]:
    """What differs between two nested values, by place; numbers, by more than a share of their size."""
    if isinstance(frozen, str) and "\n" in f"{frozen}{now}":
        frozen, now = (dict(enumerate(text.splitlines(), 1)) for text in (frozen, str(now)))
    elif isinstance(frozen, list) and isinstance(now, list):
        frozen, now = (dict(enumerate(value)) for value in (frozen, now))
    if isinstance(frozen, dict) and isinstance(now, dict):
        places = {name: (frozen.get(name, "none"), now.get(name, "none")) for name in frozen | now}
        found = (differences(*both, tolerance, f"{place} / {name}") for name, both in places.items())
        return [line for lines in found for line in lines]
    numbers = isinstance(frozen, float) and isinstance(now, float | int)
    equal = frozen == now or (numbers and abs(frozen - now) <= tolerance * max(abs(frozen), 1e-3))
    return [] if equal else [f"{place}: {frozen!r} frozen, {now!r} now"]


def rounded(value: Json, tolerance: float) -> Json:
    """Nested numbers with digits enough for a tolerance, and one more."""
    if isinstance(value, dict):
        return {name: rounded(one, tolerance) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one, tolerance) for one in value]
    digits = len(f"{round(1 / tolerance)}") + 1
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def written(key: str, value: Json) -> None:
    """Write a part: text as it is, else JSON with a list of numbers on a line."""
    if isinstance(value, str):
        (HERE / f"{key}.txt").write_text(value + "\n")
        return
    text = json.dumps(value, indent=0, sort_keys=True, ensure_ascii=False)
    lines = re.sub(r"\[[^\[\]\"]*\]", lambda found: " ".join(found[0].split()), text)
    (HERE / f"{key}.json").write_text(lines + "\n")


def read(key: str) -> Json:
    """The frozen value of a part."""
    text = HERE / f"{key}.txt"
    return text.read_text().rstrip("\n") if text.exists() else json.loads((HERE / f"{key}.json").read_text())


def main() -> int:
    """Compute the parts named, and compare or write them."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--write", action="store_true", help="write the files, compare nothing")
    given, wrong = parser.parse_args(), 0
    for name in given.parts or PARTS:
        tolerance = TOLERANCE.get(name, 1e-11)
        with redirect_stdout(sys.stderr):
            now = rounded(json.loads(json.dumps(PARTS[name]())), tolerance)
        several = {f"{name}-{key}": now[key] for key in now} if name == "reports" else {name: now}
        for key, value in several.items():
            if given.write:
                written(key, value)
            found = [] if given.write else differences(read(key), value, tolerance)
            wrong += len(found)
            sys.stdout.write(f"{key}: {'written' if given.write else f'{len(found)} differences'}\n")
            sys.stdout.writelines(f"  {line}\n" for line in found[:20])
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
