"""Training and evaluation by a function call: train.py and evaluate.py without a command line.

The configuration is composed as the scripts compose it, so a call and the command with the same settings do
the same, to the last bit. The caller's own Hydra, if there is one, is left as it was.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from whitenedcse.app.config import CONF, message, stems, without_hydra
from whitenedcse.app.evaluate import evaluate as evaluated
from whitenedcse.app.start import quiet
from whitenedcse.app.train import train as trained
from whitenedcse.console import quoted
from whitenedcse.inputs import expanded, listed
from whitenedcse.run import Run, stamp

if TYPE_CHECKING:
    from torch import nn

    from whitenedcse.training.loss import Loss, Term

Place = str | os.PathLike[str]
Settings = Mapping[str, Any]


def train(  # noqa: PLR0913  the settings that most runs change, by name
    encoder: Place,
    corpus: Place,
    *,
    dev: Place | None = None,
    tests: Place | Sequence[Place] = (),
    output: Place | None = None,
    views: int | None = None,
    pooling: str | None = None,
    head: str | nn.Module | Callable[..., nn.Module] = "shuffled_group",
    loss: str | Loss | type = "contrastive",
    terms: Mapping[str, Term | type] | None = None,
    optimizer: Callable[..., Any] | None = None,
    temperature: float | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    max_length: int | None = None,
    epochs: int | None = None,
    seed: int = 42,
    devices: int | str = 1,
    settings: Settings | None = None,
    force: bool = False,
) -> Run:
    """Train an encoder contrastively on a corpus; returns the finished run.

    The defaults are those of WhitenedCSE (arXiv:2305.17746, section 4.1). Called again with the same output,
    it resumes an unfinished run and returns a finished one unchanged. Ctrl-C writes a checkpoint and raises
    KeyboardInterrupt. The random number generators of Python, NumPy and PyTorch are seeded.

    encoder: a Transformers model, by directory or hub id.
    corpus: a text, csv, tsv, jsonl or parquet file, a directory of such files, a URL, a hub data set, or a
        name such as "wiki1m".
    dev: scored pairs that choose the best checkpoint: a file, or a name such as "STS-B/dev". None: alignment
        and uniformity of held-out sentences of the corpus are logged, and the last checkpoint is the best.
    tests: tasks on which the best checkpoint is evaluated at the end, such as ["STS-B"] or a file.
    output: the directory of the run, by default outputs/ENCODER-TIME.
    views: the number of views of each sentence, including the anchor; 3 unless told.
    pooling: cls, mean, max, last (for decoders), first_last or pooler. None for the encoder's own, as of
        Sentence-Transformers; for one without, the first token, or a decoder's last.
    head: shuffled_group, group, zca, pca, dense or identity; or a head of your own, such as a subclass of
        `ProjectionHead`: a module, or a class or function that makes one when it is given width=.
    loss: contrastive, matryoshka or none; or a loss of your own, a function of the views z: (v, n, d) and
        negatives=None, an object with such a `__call__`, or its class.
    terms: by name, objects (or their classes) that are added to the loss; see `training.loss.Term`.
    optimizer: a function of the parameters and total_steps= that returns an optimiser and its schedule.
    temperature: of the loss, None for its own (0.05). lr: the learning rate of AdamW, which decays linearly
        to 0, None for 3e-5. Parts of your own are used as they are and have the settings that they were made
        with; of them the run notes the class and its plain attributes.
    batch_size: sentences per step, over all devices (64 unless told). max_length: the most tokens kept of a
        sentence (32). epochs: passes over the corpus (1).
    devices: a number of devices, or "auto" for every GPU; each has a process of its own, to which no object
        can go: parts of your own are then named by settings={"loss._target_": "mine.Margin"}.
    settings: any other settings by their dotted names, such as {"trainer.max_steps": 500,
        "head.whitening.group_width": 4, "mlm.weight": 0.1}, which take precedence; `whitenedcse train --help`
        lists them. What "+system" or "+experiment" sets holds where no argument or setting says otherwise.
    force: resume a run even if its settings or data have changed.

    Raises ValueError or OSError for settings or files that cannot be used, and RuntimeError if another
    process of the run failed.
    """
    options, settings = {"head": head, "loss": loss, "optim": optimizer or "adamw"}, settings or {}
    given: dict[str, Any] = {
        "encoder": "pretrained",
        "encoder.path": os.fspath(encoder),
        "data": "file",
        "pooling": pooling or "own",
        **{name: part for name, part in options.items() if isinstance(part, str)},
        "data.corpus": os.fspath(corpus),
        "data.batch_size": batch_size,
        "data.max_length": max_length,
        "views": views,
        "loss.temperature": temperature,
        "optim.lr": lr,
        "trainer.max_epochs": epochs,
        "trainer.devices": devices,
        "seed": seed,
        "force": force,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if dev is not None or "monitor" not in settings:
        given["monitor.dev"] = None if dev is None else os.fspath(dev)
    if (names := paths(tests)) or "tasks" not in settings:
        given["tasks.names"] = names
    given |= settings
    own = {name: part for name, part in options.items() if not isinstance(part, str)}
    own |= {f"terms.{name}": term for name, term in (terms or {}).items()}
    idle = [name for name in given if name.split(".")[0] in own]
    if idle:
        raise ValueError(f"{idle[0]} is not for a part of your own, which has the settings it was made with")
    path = Path(output or Path("outputs", f"{Path(encoder).name}-{stamp()}"))
    return called(trained, given, path, parts=own)


def evaluate(  # noqa: PLR0913  the settings that most evaluations change, by name
    model: Place,
    *,
    tasks: Place | Sequence[Place] = "sts",
    postprocess: str = "none",
    k: int | None = None,
    pooling: str | None = None,
    output: Place | None = None,
    settings: Settings | None = None,
) -> Run:
    """Evaluate an encoder on tasks and print the table; returns the run, which has all numbers in `results`.

    model: a run or a checkpoint; or a Transformers or Sentence-Transformers model, by directory or hub id.
    tasks: "sts" (the seven STS sets), "transfer", "rte", "quickstart" (bundled); or names of tasks and files
        with scored pairs or labelled texts.
    postprocess: none or the name of a transform, such as whitening, zca or soft_zca (see `Postprocess`),
        which is fitted to the sentences of each task unless settings={"fit": ...} names a corpus. One that is
        fitted already becomes part of a model first: whitened(model, fit).save(DIR), and evaluate(DIR). It is
        a further row: `tests()` of the run gives the scores as it is, `tests("whitening")` those whitened.
    k: the number of components that whitening, pca and prefix keep, None for all, or as a protocol has it.
    pooling: for an encoder that does not define its own; None for the first token, or a decoder's last.
    output: the directory of the run, by default outputs/evaluate-TIME.
    settings: any other settings by their dotted names; `whitenedcse evaluate --help` lists them.

    Raises ValueError or OSError for settings, models or files that cannot be used.
    """
    given: dict[str, Any] = {"model": os.fspath(model), "postprocess": postprocess}
    given |= {} if k is None else {"k": k}
    if isinstance(tasks, str) and tasks in stems("tasks"):
        given["tasks"] = tasks
    else:
        given["tasks.names"] = paths(tasks)
    if pooling:
        given["pooling"] = pooling
    path = Path(output or Path("outputs", f"evaluate-{stamp()}"))
    return called(evaluated, given | dict(settings or {}), path)


def paths(names: Place | Sequence[Place]) -> list[str]:
    """One name or several as a list of texts."""
    if isinstance(names, str | os.PathLike):
        return [os.fspath(names)]
    return [os.fspath(one) for one in listed(names, "test")]


def called(script: Callable[..., Any], given: Settings, path: Path, **more: Any) -> Run:
    """Run a script with settings in this process, in the run directory `path`; see `train` for errors."""
    words = [f"{name}={quoted(value)}" for name, value in given.items()]
    try:
        with configuration(script.__name__, words, path) as config:
            script(config, **more)
    except SystemExit as end:
        if end.code in (130, 143):  # 128 + SIGINT or SIGTERM, after a checkpoint was written
            raise KeyboardInterrupt from None
        raise RuntimeError(f"{script.__name__} ended with status {end.code}; its last lines say why") from end
    return Run(path)


@contextmanager
def configuration(script: str, words: Sequence[str], path: Path) -> Iterator[DictConfig]:
    """The configuration of a script with these words; inside, the process is as the command would have it."""
    state, argv = Singleton.get_state(), sys.argv
    try:
        sys.argv = [f"whitenedcse {script}", *words]
        with initialize_config_dir(str(CONF), version_base="1.3", job_name=script), warnings.catch_warnings():
            config = compose(script, list(words), return_hydra_config=True)
            with open_dict(config):
                config.hydra.runtime.output_dir = str(Path(expanded(path)).resolve())
                HydraConfig.instance().set_config(config)
            quiet()
            yield without_hydra(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(message(error, sys.argv)) from None
    except Exception as error:
        if type(error).__name__ != "MisconfigurationException":  # Lightning's
            raise
        raise ValueError(message(error, sys.argv)) from None
    finally:
        sys.argv = argv
        Singleton.set_state(state)
