"""Places: the names of runs, near misses, one where nothing can be written, a full disk with its free bytes.

Space is reserved before it is mapped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from whitenedcse.files import nearest


def label(hydra: Any, encoder: str | None, corpus: str | None) -> str:
    """What a run is named after: its experiment, or another encoder than the experiment's, or its corpus.

    hydra: Hydra's own settings, None where they are not part of the configuration.
    """
    experiment = hydra.runtime.choices.get("experiment") if hydra else None
    if experiment and not own_encoder(hydra.overrides.task):
        return str(experiment)
    return Path(encoder).name if encoder else Path(str(corpus)).stem


def own_encoder(overrides: Iterable[str]) -> bool:
    """Whether a command line names an encoder, in place of the experiment's."""
    return any(text.startswith(("encoder=", "encoder.path=")) for text in overrides)


def refuse_name(name: Any, run: Path) -> None:
    """Raise ValueError for a run= that is no name of a directory in outputs/; an interpolation makes one.

    run: the directory that Hydra makes of it, which is refused where it was meant as a URL.
    """
    if meant := next((part for part in run.parts[1:] if part.endswith(":")), None):
        raise ValueError(
            f"a run is written to this machine, not to {meant}//: give the name of a directory, and copy the "
            f"trained encoder by whitenedcse export RUN {meant}//BUCKET/NAME --to transformers"
        )
    path = Path(str(name or ""))
    if path.is_absolute() or ".." in path.parts or not path.parts:
        where = f"hydra.run.dir={path if path.parts else 'DIR'}"
        raise ValueError(f"run={name or ''} is no name for a directory in outputs/; elsewhere is {where}")


def did_you_mean(error: BaseException, argv: Iterable[str]) -> str:
    """The end of the message of a FileNotFoundError: the existing path nearest to the one it names, or "".

    argv: the command line that has the missing path, as a word or as the value of a setting. A path without
    slash and dot could be any word, and is one only if the message begins with it.
    """
    text = str(error)
    if not isinstance(error, FileNotFoundError) or "did you mean" in text:
        return ""
    values = [word.partition("=")[2] if re.match(r"[\w.+~/@-]+=", word) else word for word in argv]
    given = [part for value in values for part in re.findall(r"[^\s\[\],'\"]+", value)]
    for name in (*given, *(part.partition(":")[0] for part in given)):
        start = r"(^|[\s'\"])" if re.search("[./]", name) else "^(encoder )?"
        if re.search(rf"{start}{re.escape(name)}([\s:;,'\"]|$)", text) and (said := nearest(Path(name))):
            return said
    return ""
