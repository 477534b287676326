"""The manifest of a directory of encoded vectors: which job fills it, and which files it will hold."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

FORMS, DTYPES = ("npy", "parquet"), ("float32", "float16")
FREE = ("source", "embedding", "input", "threads")  # may be another when a job resumes
OTHER = {
    "fingerprint": "the input is another, or has changed",
    "embedder": "the encoder, its pooling, its final transform, a prompt, or the kind of device is another",
}


class Form(NamedTuple):
    """How vectors are written: the file format, the type of a number, and the rows per file."""

    to: str = "npy"
    dtype: str = "float32"
    shard: int = 20_000


@dataclass(frozen=True)
class Manifest:
    """The description of the files, as plain JSON, written before the first of them.

    embedding: settings of the embedder, for a reader. embedder: a digest of all that decides a vector.
    fingerprint: of the input. threads: per process; another number may change the last bits.
    """

    source: str
    embedding: dict[str, Any]
    embedder: str
    bf16: bool
    input: str
    columns: list[str]
    fingerprint: str
    rows: int
    width: int
    to: str
    dtype: str
    shard: int
    threads: int

    def __post_init__(self) -> None:
        for name, value, known in (("to", self.to, FORMS), ("dtype", self.dtype, DTYPES)):
            if value not in known:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(known)}")
        for name in ("rows", "width", "shard", "threads"):
            if not (isinstance(value := getattr(self, name), int) and value > 0):
                raise ValueError(f"{name}={value!r} must be 1 or more")

    @property
    def shards(self) -> int:
        """The number of files."""
        return -(-self.rows // self.shard)

    def count(self, number: int) -> int:
        """The number of rows of a file: `shard`, or fewer for the last."""
        return min(self.shard, self.rows - number * self.shard)

    def name(self, number: int) -> str:
        """The name of a file."""
        return f"shard-{number:05}.{self.to}"


def refuse_other(out: Path, then: Manifest, now: dict[str, Any]) -> None:
    """Raise ValueError if the job that was started here is another one."""
    for name, value in asdict(then).items():
        if name in now and name not in FREE and value != now[name]:
            why = OTHER.get(name, f"{name} was {value!r} and is now {now[name]!r}")
            raise ValueError(f"{out} holds another job: {why}; repeat its command, or name a new directory")
