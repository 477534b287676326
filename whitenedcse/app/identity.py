"""What makes two starts the same run: equal settings, and content of what they name. Its name and words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from whitenedcse.files import checksum
from whitenedcse.run import SCRATCH, command

if TYPE_CHECKING:
    from whitenedcse.model.embedder import Embedder

WEIGHTS = ("config.json", "*.safetensors", "*.bin")  # the files of an encoder beside those of its tokenizer


def content(
    config: Any, encoder: Any, terms: Mapping[str, Any], tasks: Iterable[Any], dev: Any
) -> dict[str, dict[str, str]]:
    """The digests of what the settings name beside the corpus: encoder, teachers, tasks, dev; by setting.

    An encoder of the hub has its commit. One with random weights has none: settings and corpus decide it.
    """
    digests = {} if dev is None else {"monitor.dev": of_texts(dev)}
    digests |= {f"tasks.{name}": of_texts(task) for name, task in zip(config.tasks.names, tasks, strict=True)}
    if "path" in config.encoder:
        commit = encoder.provenance(config.encoder.path)["commit"]
        digests["encoder.path"] = commit or of_weights(encoder.source)
    return {"content": digests}


def of_texts(task: Any) -> str:
    """The digest of a task as `tasks.task` gives it: texts in their order, with their scores or labels."""
    return checksum(json.dumps(task, default=lambda array: array.tolist()).encode())


def of_weights(folder: Path) -> str:
    """The digest of an encoder's configuration and weights in a local directory."""
    files = sorted(file for pattern in WEIGHTS for file in folder.glob(pattern))
    return checksum(json.dumps([(file.name, checksum(file)) for file in files]).encode())


def of_embedder(embedder: Embedder) -> str:
    """The digest of an embedder that was loaded: its encoder's, its head's, and how it makes a vector."""
    from whitenedcse.model.checkpoint import settings

    assert embedder.encoder.source is not None
    return checksum(json.dumps([of_weights(embedder.encoder.source), settings(embedder)]).encode())


def when(value: Any, known: Any, then: Any, other: Any) -> Any:
    """A setting's value where another setting is `known`, or else `other`: ${when:${views},2,0.1,0.2}."""
    chosen = then if value == known else other
    return OmegaConf.create(chosen) if isinstance(chosen, list) else chosen  # as --resolve needs a list


def scratch(random: Any, pretrained: Any, *, _root_: Any) -> Any:
    """A setting's value for an encoder of random weights, or else of pretrained ones: ${scratch:A,B}."""
    return random if OmegaConf.select(_root_, "encoder._target_") == SCRATCH else pretrained


def encoder_passes(columns: Sequence[str], views: int) -> int:
    """How often each column of positives goes through the encoder, so that all together make `views` at most.

    columns: those of a corpus; [] for one.

    >>> [encoder_passes(columns, 3) for columns in ([], ["text"], ["anchor", "positive"])]
    [3, 3, 1]
    """
    return max(1, views // positives(columns))


def refuse_passes(config: Any) -> None:
    """Raise ValueError for more encoder passes than views, before anything is begun."""
    columns = positives(config.data.columns)
    if (passes := columns * config.data.passes) > config.views:
        of = f" of each of {columns} columns" if columns > 1 else ""
        more = f"{passes} encoder passes are more than views={config.views}"
        cure = f"lower data.passes, or give views={passes}"
        raise ValueError(f"data.passes={config.data.passes}{of}: {more}; {cure}")


def positives(columns: Sequence[str]) -> int:
    """The number of columns that hold positives: a third has hard negatives, and [] stands for one."""
    return min(2, max(1, len(columns)))


def jobs(hydras: Any) -> list[tuple[str, ...]]:
    """The words of each job of a sweep, in Hydra's order."""
    texts = [f"{key}={value}" for key, value in (hydras.sweeper.get("params") or {}).items()]
    parsed = OverridesParser.create().parse_overrides([*texts, *hydras.overrides.task])
    swept = {each.get_key_element(): each for each in parsed}  # the last of a name counts
    choices = [
        [f"{key}={text}" for text in each.sweep_string_iterator()]
        if each.is_sweep_override()
        else [f"{key}={each.get_value_element_as_str()}"]
        for key, each in swept.items()
    ]
    return list(product(*choices))


def inherited(hydras: Any) -> list[str]:
    """The overrides of Hydra's own settings that a job of a sweep inherits: where its files are found."""
    return [text for text in hydras.overrides.hydra if text.startswith("hydra.searchpath")]


def script_of(argv: list[str]) -> str:
    """The script that a command line starts, "train" or "evaluate", as train.py or `whitenedcse train`."""
    return Path(argv[0]).stem.split()[-1]


def not_on_path(found: re.Match[str], argv: list[str]) -> str:
    """What to write where Python does not find the module of a class; a file of that name may be here."""
    here = Path(f"{found[1]}.py").is_file()
    where = f"{found[1]}.py is in this folder: " if here else f"for {found[1]}.py in another folder, "
    return f"{found[0]}; {where}write PYTHONPATH={'.' if here else 'FOLDER'} {command(argv)}"
