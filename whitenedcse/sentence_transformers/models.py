"""SentenceTransformer models: scored as here, computed without padding, ending with a whitening.

n: texts    t: tokens of all of them    l: tokens of the longest    d: width    k: components kept
"""

from __future__ import annotations

import csv
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.evaluation.evaluator import BaseEvaluator
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Transformer
from torch import Tensor, nn

from whitenedcse.compute import autocast_type, cores, each
from whitenedcse.data.corpus import blocks
from whitenedcse.data.sources import given
from whitenedcse.data.tokens import worded
from whitenedcse.evaluation.classifiers import classifier
from whitenedcse.evaluation.postprocess import Postprocess, check_components
from whitenedcse.evaluation.suite import Plan, System, evaluated, plan, whitened_scores
from whitenedcse.evaluation.tasks import STS, short, subsets
from whitenedcse.files import naming
from whitenedcse.model import packed
from whitenedcse.model.attention import way
from whitenedcse.ragged import Ragged, offsets, places
from whitenedcse.training.parallel import cut

TEST_SETS = tuple(name for name in STS if "/" not in name)  # the seven
BLOCK = 20_000  # texts encoded at a time


class STSEvaluator(BaseEvaluator):  # type: ignore[misc]  # their class has no types
    """An evaluator for the library's trainer: Spearman x 100 with bootstrap intervals, raw and whitened.

    tasks: one or more names of scored pairs (TEST_SETS are the papers' seven), or files of own pairs with the
        columns sentence1, sentence2 and score. No test set should choose checkpoints.
    corpus: texts, or a file, directory, URL or name of one, to which a whitening is fitted for the inductive
        baselines; none without. The transductive baselines are fitted to the sentences of each task itself.
    columns: those of the texts where the corpus is a table.
    name: a prefix of every metric and of the file. draws: of the bootstrap.

    The metrics are TASK_spearman, TASK_low and TASK_high, the ends of the 95 % interval; the same of avg, the
    mean over the tasks; and avg_whitened_on_own_kK and avg_whitened_on_corpus_kK for K components: what
    whitening alone makes of the same vectors. The primary metric is avg_spearman. Each call adds a row to
    sts_evaluation_NAME_results.csv in the folder that the trainer gives. An undefined value is NaN, as
    that of a whitening to K components fitted to K texts or fewer, of which a warning tells.
    """

    def __init__(
        self,
        tasks: str | Sequence[str] = ("STS-B/dev",),
        *,
        corpus: Sequence[str] | str | Path | None = None,
        columns: Sequence[str] = (),
        name: str = "sts",
        draws: int = 1000,
        batch_size: int = 32,
    ) -> None:
        super().__init__()
        self.name, self.draws, self.batch_size = name, draws, batch_size
        tasks = [tasks] if isinstance(tasks, str) else tasks
        pairs = dict(zip(short(tasks), map(subsets, tasks), strict=True))
        every = [] if corpus is None else list(given(corpus, columns))
        self.plan = plan(pairs, ["corpus"] if every else [], lambda _: every)
        self.primary_metric, self.greater_is_better = "avg_spearman", True
        self.csv_file = f"sts_evaluation_{name}_results.csv" if name else "sts_evaluation_results.csv"

    def __call__(
        self, model: Any, output_path: str | None = None, epoch: float = -1, steps: int = -1
    ) -> dict[str, float]:
        """The metrics by name; epoch and steps are written beside them, -1 after training."""
        x = model.encode(self.plan.sentences, batch_size=self.batch_size, show_progress_bar=False)
        x = np.asarray(x, np.float32)
        scores = evaluated(System(x), self.plan, classifier("lbfgs"), self.draws).scores["sts"]
        values: dict[str, float | None] = {}
        for task, result in {**scores["tasks"], "avg": scores["avg"]}.items():
            low, high = result["interval"]["all"] or (None, None)
            values |= {f"{task}_spearman": result["all"], f"{task}_low": low, f"{task}_high": high}
        for fit in ("own", *self.plan.fits):
            values |= {f"avg_whitened_on_{fit}_k{k}": v for k, v in baselines(x, self.plan, fit).items()}
        few = [key for key, value in values.items() if value is None and "_whitened_" in key]
        if few and values["avg_spearman"] is not None:
            said = "the texts that the whitening is fitted to are too few for so many components"
            warnings.warn(f"{', '.join(few)}: NaN, as {said}", stacklevel=2)
        metrics = {key: math.nan if value is None else value for key, value in values.items()}
        if output_path is not None:
            add_row(Path(output_path) / self.csv_file, {"epoch": epoch, "steps": steps} | metrics)
        metrics = self.prefix_name_to_metrics(metrics, self.name)
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics


def baselines(x: NDArray[Any], plan: Plan, fit: str) -> dict[int, float | None]:
    """By number of components, the average Spearman x 100 of vectors (n, d) that are only whitened.

    fit: "own" whitens each task by its own sentences, "corpus" all of them by those of the corpus. None where
    there are too few sentences to vary by so many components.
    """
    every = []
    for name, pairs in plan.pairs.items():
        rows = np.concatenate([rows.ravel() for _, rows in pairs])
        sample, own = (rows, len(np.unique(rows))) if fit == "own" else (plan.fits[fit][name], None)
        every.append(whitened_scores(x, x[sample], {name: list(pairs)}, own))
    scores = {k: [by_k[k] for by_k in every] for k in every[0]}
    return {k: None if None in s else float(np.mean(np.array(s, float))) for k, s in scores.items()}


def add_row(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a CSV file, or to NAME-2 and so on if that has other columns; the first is its header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        file = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        with naming(file), file.open("a+", newline="", encoding="utf-8") as stream:
            stream.seek(0)
            header = next(csv.reader(stream), [])
            if header in ([], list(row)):
                writer = csv.DictWriter(stream, list(row), lineterminator="\n")
                if not header:
                    writer.writeheader()
                writer.writerow(row)
                return


def accelerate(model: Any) -> Any:
    """The same SentenceTransformer, changed to compute its tokens alone, where it computed padding too.

    Vectors equal those before to 1e-5 of their size, and so do gradients without dropout: every way to call
    the model stays as it was, and what it saves. Attention and dropout are those of `model.packed`; without
    gradient a batch is divided among the cores of a CPU. For BERT, RoBERTa, XLM-R and CamemBERT. The library
    computes by itself a batch that is not of texts padded on the right, and with gradient checkpointing.
    `undo` takes the change back. Raises ValueError for a model that this cannot compute, and leaves it as it
    was.
    """
    transformer = model[0]
    if not isinstance(transformer, Transformer) or transformer.backend != "torch":
        raise ValueError(f"{type(transformer).__name__}: only a Transformer module of PyTorch is accelerated")
    backbone = transformer.model
    if not packed.fits(backbone) or transformer.transformer_task != "feature-extraction":
        raise ValueError(
            f"{type(backbone).__name__} is not accelerated: its layers are not those of"
            f" {', '.join(packed.KINDS)}, which can be computed without padding"
        )
    transformer.forward = partial(computed, transformer)  # a partial is copied and pickled with the model
    return model


def undo(model: Any) -> Any:
    """The same model as it was before `accelerate`; unchanged if it was not accelerated."""
    vars(model[0]).pop("forward", None)
    return model


def computed(transformer: Any, features: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """The features with token embeddings, (n, l, d), computed on tokens alone where they can be."""
    backbone = transformer.model
    other = settings or backbone.config.output_hidden_states  # as a loss over layers sets it
    saving = any(getattr(module, "gradient_checkpointing", False) for module in backbone.modules())
    batch = None if other or saving else unpadded(backbone, features)
    if batch is None:
        return type(transformer).forward(transformer, features, **settings)
    hidden, sentence, place = states(backbone, batch)
    padded = hidden.new_zeros(*features["input_ids"].shape, hidden.shape[-1])
    features[transformer.module_output_name] = padded.index_put((sentence, place), hidden)
    return features


def unpadded(backbone: Any, features: Mapping[str, Any]) -> Ragged | None:
    """A batch of texts padded on the right as a `Ragged`; None for any other, or on another device."""
    ids, mask, kinds = (features.get(name) for name in ("input_ids", "attention_mask", "token_type_ids"))
    config = backbone.config
    if mask is None or ids is None or mask.shape != ids.shape or ids.ndim != 2:
        return None
    width = config.hidden_size // config.num_attention_heads
    if way(ids.device.type, width, next(backbone.parameters()).dtype) == "padded":
        return None
    lengths, real = mask.sum(dim=1), mask.bool()
    right = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(1)
    sound = (right == real).all() & (lengths > 0).all()
    if not bool(sound if kinds is None else sound & (kinds == 0).all()):
        return None
    on_host = offsets(lengths.cpu())
    return Ragged(ids[real], on_host.to(ids.device), int(on_host.diff().max()), on_host)


def states(backbone: Any, batch: Ragged) -> tuple[Tensor, Tensor, Tensor]:
    """The last hidden states (t, d), and the sentence and the position (t,) of each."""

    def run(some: Ragged) -> Tensor:
        return packed.hidden(backbone, some, [backbone.config.num_hidden_layers], first=False)[0]

    if torch.is_grad_enabled() or batch.ids.device.type != "cpu" or min(cores(), batch.n) == 1:
        return run(batch), *places(batch)
    pieces, order = cut(batch, cores())
    hidden = torch.cat(each(run, pieces, partial(modes, autocast_type("cpu"))))
    lengths = batch.lengths[order]
    sentence, place = places(Ragged(hidden[:, 0], offsets(lengths), batch.longest))
    return hidden, order[sentence], place


@contextmanager
def modes(autocast: torch.dtype | None) -> Iterator[None]:
    """A thread's modes of inference; autocast: its type, None for off.

    Only the thread's own flags are set: to leave the outermost `torch.autocast` discards the cast weights of
    all threads, which would then be cast for each batch.
    """
    torch.set_autocast_enabled("cpu", autocast is not None)
    torch.set_autocast_dtype("cpu", autocast or torch.bfloat16)
    torch.autocast_increment_nesting()
    try:
        with torch.no_grad():
            yield
    finally:
        torch.autocast_decrement_nesting()
        torch.set_autocast_enabled("cpu", False)


def whitened(
    model: Any, corpus: Sequence[str] | str | Path, k: int | None = 256, columns: Sequence[str] = ()
) -> Any:
    """A SentenceTransformer that ends with a whitening fitted to a corpus, and keeps k components.

    corpus: texts, or a file, directory, URL or name of one. columns: those of the texts where the corpus is a
    table. k: None for all. The whitening is a Dense module of the library (arXiv:2103.15316, Algorithm 1):
    the model is saved and loaded without this package. Where the given model ends with division by the
    length, the whitening comes before it. Both models share their encoder. Raises ValueError for fewer than
    two texts, too large a k, or a model in less than float32.
    """
    parts = list(model)
    last = [parts.pop()] if isinstance(parts[-1], Normalize) else []
    plain, fit = ending(model, parts), Postprocess("whitening", k=k)
    for block in blocks(worded(given(corpus, columns), model.tokenizer), BLOCK):
        x = plain.encode(block, convert_to_tensor=True, show_progress_bar=False)
        if x.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"a whitening fitted to vectors in {x.dtype} is rounded; use model.float()")
        fit.partial_fit(x.numpy(force=True))
    bias = fit.transform(np.zeros((1, len(fit.mean))))[0]
    if k is not None:
        check_components(k, fit.most)
    dense = Dense(*fit.matrix[:, : len(bias)].shape, activation_function=nn.Identity())
    with torch.no_grad():
        dense.linear.weight.copy_(torch.from_numpy(fit.matrix[:, : len(bias)].T))
        dense.linear.bias.copy_(torch.from_numpy(bias))
    return ending(model, [*parts, dense.to(model.device, model.dtype), *last])


def ending(model: Any, parts: Sequence[nn.Module]) -> Any:
    """A SentenceTransformer of these modules with the prompts and the similarity of another."""
    settings = {name: getattr(model, name) for name in ("prompts", "default_prompt_name")}
    return SentenceTransformer(
        modules=parts, device=model.device, similarity_fn_name=model.similarity_fn_name, **settings
    )
