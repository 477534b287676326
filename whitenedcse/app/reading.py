"""Files that others may have written or damaged: each is read, or refused by name, and none runs code.

One function for each format. Whatever the class of the library's error is, a file is refused with ValueError.
JSON is read by `durable.read_json`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whitenedcse.app.durable import DEPTH, Named, inside, parsing, read_json, whole_lines

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

DAMAGED = "copy or download it again"
MOST_LAYERS, MOST = 1000, 2**24  # in a config.json: layers, and other numbers; more take minutes to build


def tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name."""
    from safetensors.torch import load_file

    with parsing(file, DAMAGED):
        return load_file(file)


def metadata(file: Path) -> dict[str, str]:
    """The metadata of a safetensors file, after all its header was checked."""
    from safetensors import safe_open

    with parsing(file, DAMAGED), safe_open(file, "numpy") as opened:
        return opened.metadata() or {}


def array(file: Path) -> NDArray[Any]:
    """The array of a .npy file, memory-mapped; never one of objects, which would be a pickle."""
    import numpy as np

    with parsing(file, DAMAGED):
        return np.lib.format.open_memmap(file, mode="r")


def vectors(file: Path) -> NDArray[Any]:
    """The vectors (n, k) of a .npy file, or of the column `vector` of a .parquet file, memory-mapped."""
    if file.suffix == ".npy":
        return array(file)
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    with parsing(file, DAMAGED):
        column = pq.read_table(file, columns=["vector"], memory_map=True)["vector"].combine_chunks()
        return column.flatten().to_numpy().reshape(len(column), -1)


def arrays(file: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a .npz file by name; none of objects."""
    import numpy as np

    with parsing(file, DAMAGED), np.load(file, allow_pickle=False) as content:
        found = Named(content)
        found.path = file
        return found


def table(file: Path) -> list[dict[str, str]]:
    """The lines of a CSV file that is appended to, by column; without a last one that a kill cut short."""
    with parsing(file, "delete its damaged lines"):
        header, *lines = [*csv.reader(whole_lines(file))] or [["step"]]
        for number, cells in enumerate(lines, 2):
            if len(cells) != len(header):
                raise ValueError(f"{file}:{number}: {len(cells)} fields, {len(header)} expected")
        return [dict(zip(header, cells, strict=True)) for cells in lines]


def refuse_vast(file: Path) -> None:
    """Raise ValueError for an encoder's config.json with numbers so large that building it does not end."""
    level = [("", read_json(file))] if file.is_file() else []
    while level:
        for name, value in level:
            most = MOST_LAYERS if re.search("layer|depth|block|expert|num_labels", name) else MOST
            if isinstance(value, (int, float)) and value > most and "theta" not in name:
                raise ValueError(f"{file}: {name}={value!s:.30} is above {most:,}; {DAMAGED}")
        level = [pair for name, value in level for pair in named(name, value)]


def named(name: str, value: Any) -> list[tuple[str, Any]]:
    """The values inside a value of JSON, each with its name, in a list that of the list."""
    return list(value.items()) if isinstance(value, dict) else [(name, one) for one in inside(value)]


def checkpoint(file: Path) -> dict[str, Any]:
    """The content of a file of torch.save: tensors and plain values; anything else in it is refused."""
    import torch

    with parsing(file, "delete it, and the run resumes from the one before"):
        content = torch.load(file, map_location="cpu", weights_only=True)
        return {**content}


def settings(file: Path) -> dict[str, Any]:
    """The content of a YAML file, unresolved.

    Aliases (*) of other parts are refused: a few lines of them may stand for billions of values.
    """
    import yaml  # type: ignore[import-untyped]
    from omegaconf import OmegaConf

    with parsing(file, "copy it again, or name a new run"):
        text = file.read_text(encoding="utf-8")
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):  # lazily
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEPTH or isinstance(event, yaml.AliasEvent):
                raise ValueError(f"it has an alias (*), or values inside each other, over {DEPTH} deep")
        content = OmegaConf.to_container(OmegaConf.create(text)) if text.strip() else {}
        if not isinstance(content, Mapping):
            raise ValueError("it is not a mapping of names and values")
        return {str(name): value for name, value in content.items()}
