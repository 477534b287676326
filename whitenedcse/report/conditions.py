"""The conditions under which a published row was made, and those of a run, by the same names.

A condition of training has the name of its setting, as optim.lr. The others are the encoder, whether it was
trained, the protocol with its text handling, the pooling, and the transform with what it was fitted to.
`idle` knows which settings others leave without effect, here and in the labels of a sweep.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from whitenedcse.run import Run, flat

TRAINING = (
    *("data", "pooling", "head", "loss", "terms", "optim", "mlm", "views", "embedding", "gather"),
    "encoder.lora",
    *("trainer.max_epochs", "trainer.max_steps", "trainer.gradient_clip_val"),
    *("trainer.accumulate_grad_batches", "monitor.dev", "monitor.every"),
)
FREE = ("seed", "run", "checkpoint_every", "trainer.timeout")  # by which runs of one group may differ
DEVICES = ("trainer.devices", "trainer.num_nodes")  # by these too, unless gather=false
BUILT = ("from", "row", "file", "where")  # of a published row: what it is built from, and where scores are
UNUSUAL = ("prompt", "shrinkage", "power", "update", "top")  # what no published row has
ADAPTERS = ("alpha", "dropout", "modules")  # settings of adapters, which those of rank 0 do not read
COLUMNS = ("anchor", "positive", "negative")  # of a corpus with hard negatives
# settings whose defaults follow others, in conf/
FOLLOWING = ("data.passes", "data.repetition", "monitor.dev", "monitor.every", "tasks.names")
ALIASES = ("google-bert", "FacebookAI", "distilbert", "albert")  # owners of ids that had none before


def idle(named: Mapping[str, Any]) -> tuple[str, ...]:
    """How the names of the settings begin that others leave without effect, as what is below a null one.

    >>> "head.whitening.group_width" in idle({"head.whitening.kind": "zca"})
    True
    """
    return (*(f"{name}." for name, value in named.items() if value is None), *unread(named))


def unread(named: Mapping[str, Any]) -> dict[str, str]:
    """The settings of train.py that nothing reads beside the others, by name, and what each is for.

    named: settings by their dotted names, as of `reading.flat`; those of a published row may be a few.

    >>> unread({"mlm.weight": 0.0, "encoder.lora.r": 8})["mlm.probability"]
    'mlm.weight above 0'
    """
    kind = named.get("head.whitening.kind")
    whole = kind in ("pca", "zca")
    grouped = "head=group or head=shuffled_group; this head whitens all channels together"
    beside = "head.whitening" in named or named.get("head.dense") is False
    momentum = "head=zca, head=pca or embedding=head; groups are whitened by the statistics of the batch"
    rules = {
        "mlm.probability": (not named.get("mlm.weight"), "mlm.weight above 0"),
        "head.position": (beside, "a head with whitening and a dense layer, head.dense=true"),
        "head.whitening.group_width": (whole, grouped),
        "head.whitening.partition": (whole, grouped),
        "head.whitening.momentum": (
            kind is not None and not whole and named.get("embedding") != "head",
            momentum,
        ),
        "head.whitening.iterations": (
            named.get("head.whitening.transform") != "iterative",
            "head.whitening.transform=iterative",
        ),
        "loss.hard_negative_log_weight": (
            len(named.get("data.columns", COLUMNS)) < len(COLUMNS),
            "a corpus with hard negatives, data.columns=[ANCHOR,POSITIVE,NEGATIVE]",
        ),
    }
    lora = dict.fromkeys([f"encoder.lora.{name}" for name in ADAPTERS], "encoder.lora.r above 0")
    return {name: use for name, (idle, use) in rules.items() if idle} | (
        {} if named.get("encoder.lora.r") else lora
    )


def counts(name: str) -> bool:
    """Whether a setting distinguishes groups: a seed, a name or a logger does not."""
    return name not in FREE and not name.endswith(".seed") and not name.startswith("logger")


def texts(settings: Mapping[str, Any]) -> dict[str, str | None]:
    """The settings of a run that count, as texts by dotted name; None for one that is `idle`."""
    left = idle(flat(settings)) + (DEVICES if settings.get("gather", True) else ())
    every = described(settings)
    return {name: None if name.startswith(left) else text for name, text in every if counts(name)}


def described(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Each setting's dotted name and its value as text; of a mapping, the name of what it makes."""
    for key, value in config.items():
        inside = isinstance(value, Mapping)
        made = (value.get("kind") or str(value.get("_target_", "")).rpartition(".")[2]) if inside else value
        yield f"{above}{key}", made if isinstance(made, str) else json.dumps(made, default=str)
        yield from described(value, f"{above}{key}.") if inside else ()


def same_content(runs: Iterable[Run], beginning: str) -> bool:
    """Whether the files in settings with this beginning had the same content in all runs that noted it."""
    noted = {item for run in runs for item in run.facts.get("content", {}).items()}
    found = [name for name, _ in noted if name.startswith(beginning)]
    return len(found) == len(set(found))


def place(name: str, words: Sequence[str]) -> int:
    """The position of the first word that names a setting, or one above or below it; of none, the end."""
    pairs = ((f"{name}.", f"{word}.") for word in words)
    return next((i for i, (a, b) in enumerate(pairs) if a.startswith(b) or b.startswith(a)), len(words))


def follows(name: str, own: Sequence[str | None], typed: Mapping[str, Sequence[str | None]]) -> bool:
    """Whether the values of a setting follow those of the option of its group, or its default others'.

    typed: the values of the options and settings of the command lines.
    """
    above = [name.partition(".")[0], *(typed if name in FOLLOWING else ())]
    return any(decides(typed[word], own) for word in above if word in typed and word != name)


def telling(named: Sequence[Any], columns: Sequence[Sequence[str]]) -> int | None:
    """The first column that tells groups apart whose names are equal; None where no column does."""
    same = [[i for i, other in enumerate(named) if other == name] for name in named]
    apart = (c for c, column in enumerate(columns) if any(len({column[i] for i in i_s}) > 1 for i_s in same))
    return next(apart, None)


def parts(name: str, own: Sequence[str | None], above: Sequence[str | None], typed: bool) -> list[str]:
    """What the label of each group says of a setting; "" for nothing.

    own, above: the texts of the setting and of the one above it, by group. What the one above says is not
    repeated: its kind or class, and settings that only one class has, unless they are `typed`.
    """
    alone = len({*own} - {"", None}) == 1 and not typed
    if (alone or (name.endswith((".kind", "._target_")) and not typed)) and decides(above, own):
        return [""] * len(own)
    pairs = list(zip(above, own, strict=True))
    lacking: dict[Any, str] = {(other, ""): f"no {name}" for other, text in pairs if text}
    return [f"{name}={pair[1]}" if pair[1] else lacking.get(pair, "") for pair in pairs]


def bases(runs: Sequence[Run]) -> list[str]:
    """For each run the name of its system; also of its experiment, where these differ or it has no system.

    Of runs without either, one beside others that have some is named by its encoder, and a single one, which
    stands for all, "all runs".
    """
    pairs = [(run.facts.get("experiment"), run.facts.get("system")) for run in runs]
    same = len({experiment for experiment, _ in pairs}) == 1
    shown = [[system] if system and same else [experiment, system] for experiment, system in pairs]
    texts = [" ".join(filter(None, names)) for names in shown]
    if not any(texts):
        return texts if len(texts) > 1 else ["all runs"]
    return [
        text or Path(encoder_of(run) or "encoder=small").name for text, run in zip(texts, runs, strict=True)
    ]


def encoder_of(run: Run) -> str | None:
    """The encoder that a run started from; None for a new one."""
    with suppress(KeyError, TypeError):
        return str(run.settings["encoder"]["path"])
    return None


def label(base: str, parts: Sequence[str], more: int, shared: bool) -> str:
    """The parts and the number of those left out, after the base unless all groups share it."""
    shown = ", ".join([*parts, *([f"and {more} more"] if more else [])])
    return (shown if shown and shared else f"{base} {shown}".strip()) or "default settings"


def decides(one: Sequence[str | None], other: Sequence[str | None]) -> bool:
    """Whether the values of one setting, by group, imply those of another."""
    return len({(a, b or "") for a, b in zip(one, other, strict=True)}) == len(set(one))
