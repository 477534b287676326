"""What bench/step.py runs: the work that all variants share, our training loop, and the peers' own loops.

A loop trains `work.steps` steps on the same sentences in the same order, from the same weights, and calls
`turn(loss)` at the end of each step, where the next variant takes over.
"""

from __future__ import annotations

import bz2
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import lightning
import numpy as np
import torch
import transformers
from hydra import compose, initialize_config_dir  # noqa: TID251  our step is what train.py builds
from hydra.utils import instantiate  # noqa: TID251
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from whitenedcse.app.config import CONF
from whitenedcse.app.train import built
from whitenedcse.data.corpus import Corpus, read
from whitenedcse.data.sources import located, roots
from whitenedcse.model.encoder import quiet
from whitenedcse.training.loggers import Metrics, PlainProgress, Record

SEED, LR, CLIP, TEMPERATURE = 0, 3e-5, 1.0, 0.05

BERTS = {
    "base": {},
    "small": {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    },
    "tiny": {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 64},
}

Turn = Callable[[Tensor], None]
Loop = Callable[[Turn], None]


@dataclass(frozen=True)
class Work:
    """One training job. encoder: a directory of Transformers. corpus: a file of one sentence a line.

    passes: of ours through the encoder. length: tokens that a sentence is cut to. steps: one more than turns.
    device: "cpu" or "cuda".
    """

    encoder: Path
    corpus: Path
    batch: int
    views: int
    passes: int
    length: int
    steps: int
    device: str = "cpu"

    @property
    def texts(self) -> list[str]:
        """The sentences of all steps, in the order in which SentenceData brings them."""
        rows, _ = read(Corpus(str(self.corpus)))
        order = np.random.default_rng([SEED, 0]).permutation(len(rows))
        if self.batch * self.steps > len(rows):
            raise ValueError(f"{self.steps} steps of {self.batch} are more than {len(rows)} sentences")
        return [rows[row][0] for row in order[: self.batch * self.steps]]


def encoder(shape: str, folder: Path) -> Path:
    """A directory that Transformers loads: a trained encoder, or a BERT of random weights."""
    models = roots()[0].parent / "models"
    if shape not in BERTS:
        return models / "minilm-mlm"
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(models / "bert-base-uncased-tokenizer")
    tokenizer.save_pretrained(folder)
    transformers.BertModel(transformers.BertConfig(**BERTS[shape]), add_pooling_layer=False).save_pretrained(
        folder
    )
    return folder


def corpus(folder: Path) -> Path:
    """A file of one sentence a line: 20,000 of Wikipedia."""
    with bz2.open(located("wiki1m_like"), "rt") as stream:
        lines = [line for line in islice(stream, 20_000) if line.strip()]
    path = folder / "wiki.txt"
    path.write_text("".join(lines))
    return path


class HandOver(lightning.Callback):
    """The end of our step."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        """After the optimiser and the schedule."""
        self.turn(outputs["loss"].detach())


def ours(work: Work, *, precision: str, head: str = "dense", passes: int | None = None) -> Loop:
    """train.py's module, data and trainer, with its callbacks but evaluation and checkpoints.

    Checkpoints listen to signals, which only the main thread may.
    """
    return trained(settings(work, precision, f"head={head}", f"data.passes={passes or work.passes}"))


def settings(work: Work, precision: str, *more: str) -> list[str]:
    """The words of train.py for this work."""
    given = {
        "encoder.path": work.encoder,
        "data.corpus": work.corpus,
        "data.max_length": work.length,
        "data.batch_size": work.batch,
        "data.passes": work.passes,
        "views": work.views,
        "seed": SEED,
        "optim.lr": LR,
        "trainer.accelerator": work.device,
        "trainer.devices": 1,
        "trainer.precision": precision,
        "trainer.max_steps": work.steps,
    }
    options = ["encoder=pretrained", "pooling=cls", "data=file"]
    return [*options, *(f"{key}={value}" for key, value in given.items()), *more]


def composed(words: list[str]) -> Any:
    """The configuration of train.py with these words."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", words)


def trained(words: list[str], more: Sequence[lightning.Callback] = ()) -> Loop:
    """train.py's module, data and trainer with these words, as `ours`; more: callbacks beside."""
    cfg = composed(words)
    module, data = built(cfg)

    def run(turn: Turn) -> None:
        callbacks = [Record(), PlainProgress(say=lambda text: None), *more, HandOver(turn)]
        with tempfile.TemporaryDirectory() as folder:
            logger = [Metrics(Path(folder) / "metrics.csv", None)]
            instantiate(cfg.trainer)(logger=logger, callbacks=callbacks).fit(module, data)

    return run


def silence() -> None:
    """Say nothing but the tables."""
    warnings.simplefilter("ignore")
    quiet()
    for name in ("lightning.pytorch", "lightning.fabric", "sentence_transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


def plain(batches: Iterable[Any], loss: Callable[[Any], Tensor], optimizer: Optimizer, turn: Turn) -> None:
    """The loop of everybody: backward, clipping, optimiser, linear schedule."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    steps = len(batches)  # type: ignore[arg-type]
    schedule = LambdaLR(optimizer, lambda step: 1 - step / steps)
    for batch in batches:
        value = loss(batch)
        value.backward()
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        turn(value.detach())


def simcse(work: Work, *, bf16: bool = False) -> Loop:
    """In SimCSE's manner: both copies tokenised by datasets.map, padded in the collator, eager attention."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(work.encoder)
    encoder = transformers.AutoModel.from_pretrained(work.encoder, attn_implementation="eager")
    encoder.pooler = None
    model = nn.ModuleDict({"encoder": encoder, "dense": nn.Linear(*[encoder.config.hidden_size] * 2)})
    model.train().to(work.device)

    def copies(rows: dict[str, list[str]]) -> dict[str, list[Any]]:
        n = len(rows["text"])
        made = tokenizer(rows["text"] * 2, truncation=True, max_length=work.length)
        return {key: [[value[i], value[i + n]] for i in range(n)] for key, value in made.items()}

    def collated(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        flat = [{key: value[copy] for key, value in row.items()} for row in rows for copy in range(2)]
        return tokenizer.pad(flat, padding=True, return_tensors="pt")

    def loss(batch: dict[str, Tensor]) -> Tensor:
        there = {key: value.to(work.device) for key, value in batch.items()}
        with torch.autocast(work.device, torch.bfloat16, enabled=bf16):
            first = model["encoder"](**there).last_hidden_state[:, 0]
            z = torch.tanh(model["dense"](first)).unflatten(0, (-1, 2))
            s = torch.cosine_similarity(z[:, None, 0], z[None, :, 1], dim=-1) / TEMPERATURE
        return nn.functional.cross_entropy(s, torch.arange(len(s), device=s.device))

    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict({"text": work.texts}).map(copies, batched=True, remove_columns="text")
    loader = DataLoader(data, batch_size=work.batch, collate_fn=collated)
    optimizer = AdamW(model.parameters(), lr=LR, weight_decay=0.0, foreach=False, fused=False)
    return partial(plain, loader, loss, optimizer)


def sentence_transformers(work: Work, *, bf16: bool) -> Loop:
    """MultipleNegativesRankingLoss on (s, s), by SentenceTransformerTrainer; sentences keep their order.

    Where both precisions run, build the bf16 one last: accelerate keeps the precision in one place for the
    whole process, and looks there when a step wants autocast.
    """
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.base.sampler import DefaultBatchSampler
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from torch.utils.data import SequentialSampler

    body = Transformer(str(work.encoder), max_seq_length=work.length)
    pooling = Pooling(body.get_embedding_dimension(), "cls")
    model = SentenceTransformer(modules=[body, pooling], device=work.device).train()
    loss, last = MultipleNegativesRankingLoss(model), list[Tensor]()
    loss.register_forward_hook(lambda module, inputs, output: last.append(output.detach()))
    arguments = SentenceTransformerTrainingArguments(
        output_dir=tempfile.gettempdir(),
        use_cpu=work.device == "cpu",
        bf16=bf16,
        max_steps=work.steps,
        per_device_train_batch_size=work.batch,
        learning_rate=LR,
        max_grad_norm=CLIP,
        batch_sampler=lambda rows, **settings: DefaultBatchSampler(SequentialSampler(rows), **settings),
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # else it divides each batch among all GPUs

    class Passing(transformers.TrainerCallback):
        turn: Turn

        def on_step_end(self, *_: Any, **more: Any) -> None:
            self.turn(last.pop())

    passing, texts = Passing(), work.texts
    data = datasets.Dataset.from_dict({"anchor": texts, "positive": texts})
    trainer = SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=loss, callbacks=[passing])

    def run(turn: Turn) -> None:
        passing.turn = turn
        trainer.train()

    return run
