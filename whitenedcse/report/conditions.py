"""The conditions under which a published row was made, and those of a run, by the same names.

A condition of training has the name of its setting, as optim.lr. The others are the encoder, whether it was
trained, the protocol with its text handling, the pooling, and the transform with what it was fitted to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from whitenedcse.app.reading import flat
from whitenedcse.app.run import Run
from whitenedcse.evaluation.tasks import OWN, particular

TRAINING = (
    *("data", "pooling", "head", "loss", "terms", "optim", "mlm", "views", "embedding", "gather"),
    "encoder.lora",
    *("trainer.max_epochs", "trainer.max_steps", "trainer.gradient_clip_val"),
    *("trainer.accumulate_grad_batches", "monitor.dev", "monitor.every"),
)
BUILT = ("from", "row", "file", "where")  # of a published row: what it is built from, and where scores are
UNUSUAL = ("prompt", "shrinkage", "power", "update", "top")  # what no published row has
ALIASES = ("google-bert", "FacebookAI", "distilbert", "albert")  # owners of ids that had none before


@cache
def content() -> dict[str, Any]:
    """The content of published.json."""
    return json.loads(Path(__file__).with_name("published.json").read_text())


class Evaluation(NamedTuple):
    """A run of evaluate.py, or of train.py with tests: its directory, scores, and the run of its model.

    trained: the run of train.py that made the model; None for an encoder as it was published.
    """

    path: Path
    scores: dict[str, Any]
    trained: Run | None


def training(model: str, path: Path) -> Run | None:
    """The run of train.py that made a model, or None; its path may be relative to a parent of `path`."""
    runs = (Run.of(base / model) for base in (Path(), *path.resolve().parents))
    return next((run for run in runs if run and run.trains), None)


def conditions(row: Mapping[str, Any]) -> dict[str, Any]:
    """The conditions of a published row, by name; those below a null setting are left out."""
    own = row["conditions"]
    named: dict[str, Any] = {"transform": None, "fit": ""}
    for name in own["from"]:
        named |= content()["conditions"][name]
    return without_idle(named | {key: value for key, value in own.items() if key not in BUILT})


def without_idle(named: Mapping[str, Any]) -> dict[str, Any]:
    """Conditions by name, without those that have no effect, as what is below a null setting."""
    idle = [f"{name}." for name, value in named.items() if value is None] + ["data.seed"]
    idle += ["mlm.probability"] if not named.get("mlm.weight") else []
    unset = ("prompt", "data.prompt", "data.crop", "data.cutoff")
    idle += [name for name in unset if not named.get(name)]
    idle += [] if named.get("encoder.lora.r") else ["encoder.lora"]
    idle += ["head.position"] if "head.whitening" in named else []
    return {name: value for name, value in named.items() if not name.startswith(tuple(idle))}


def found(run: Evaluation, row: Mapping[str, Any]) -> dict[str, Any]:
    """The conditions under which a row of a run's scores was made, by the names of published.json."""
    scores, transform = run.scores, row["postprocess"] or {}
    named = {name: scores.get(name) for name in ("protocol", "case", "max_length", "extra", "bf16")}
    named |= {"encoder": scores.get("encoder"), "trained": run.trained is not None}
    named |= {"pooling": row["pooling"], "transform": transform.get("kind"), "fit": row["fit"]}
    named |= {"prompt": scores.get("prompt")}
    named |= {"k": transform.get("k"), **particular(transform)} if transform else {}
    named |= {"sample": scores.get("sample")} if row["fit"] and row["fit"] not in OWN else {}
    named |= {"classifier": scores.get("classifier")} if "transfer" in row else {}
    if run.trained:
        settings = flat(run.trained.settings).items()
        named |= {name: value for name, value in settings if is_of_training(name)}
    return without_idle(named)


def is_of_training(name: str) -> bool:
    """Whether a setting decides what is trained."""
    inside = any(name == part or name.startswith(f"{part}.") for part in TRAINING)
    return inside and not name.rpartition(".")[2].startswith("_")


def differences(wanted: Mapping[str, Any], here: Mapping[str, Any], aliases: Mapping[str, str]) -> list[str]:
    """What differs between the conditions of a published row and those found, in words."""
    said = [] if is_encoder(wanted["encoder"], here["encoder"], aliases) else [other_encoder(wanted, here)]
    absent = "not recorded"
    more = [name for name in here if name not in wanted and (is_of_training(name) or name in UNUSUAL)]
    for name in [*wanted, *more]:
        parents = [name.rsplit(".", i)[0] for i in range(1, name.count(".") + 1)]
        below = any(other.get(parent, "") is None for parent in parents for other in (wanted, here))
        if name != "encoder" and not below and wanted.get(name, absent) != here.get(name, absent):
            said.append(
                f"{name}={shown(here.get(name, absent))}, the row has {shown(wanted.get(name, absent))}"
            )
    return said


def shown(value: Any) -> str:
    """A value as it is written in a setting."""
    return value if isinstance(value, str) and value else json.dumps(value)


def other_encoder(wanted: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """What an encoder is, if it is not the one of a row."""
    own = here["encoder"] or {"path": "not recorded", "architecture": None}
    return f"encoder={own['path']} ({own['architecture']}), the row has {wanted['encoder']}"


def is_encoder(name: str, here: Mapping[str, Any] | None, aliases: Mapping[str, str]) -> bool:
    """Whether an encoder is the one with this hub id: from the hub, or a directory of that architecture.

    The directory has the id's last part as its name, or is the alias of the id.
    """
    if not here:
        return False
    path = str(here["path"])
    if here["commit"]:
        return path in (name, *(f"{owner}/{name}" for owner in ALIASES))
    same = Path(path).name == Path(name).name
    if alias := aliases.get(name):
        same |= Path(alias).resolve() == Path(path).resolve()
    return same and here["architecture"] == content()["encoders"][name]
