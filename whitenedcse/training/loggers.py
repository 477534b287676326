"""Loggers beside metrics.csv."""

from __future__ import annotations

import netrc
import os
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import ParseResult, urlparse

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger


def csv_logger(run: Path) -> CSVLogger:
    """metrics.csv in the run directory: the record that every run has."""
    return CSVLogger(run.parent, name=run.name, version="")


def wandb_logger(*, project: str, run: Path) -> WandbLogger:
    """One Weights & Biases run, offline unless there is a key and the server answers: it never hangs."""
    os.environ.setdefault("WANDB_INIT_TIMEOUT", "30")
    mode = os.environ.get("WANDB_MODE")
    offline = mode in ("offline", "dryrun") or (mode is None and not (has_key() and answers()))
    return WandbLogger(project=project, name=run.name, save_dir=run, offline=offline)


def tensorboard_logger(*, run: Path) -> TensorBoardLogger:
    """TensorBoard event files in the run directory."""
    return TensorBoardLogger(save_dir=run.parent, name=run.name, version="", sub_dir="tensorboard")


def has_key() -> bool:
    """Whether an account's key is set for this process, or stored by `wandb login`."""
    with suppress(OSError, netrc.NetrcParseError):
        if netrc.netrc().authenticators(server().hostname or ""):
            return True
    return bool(os.environ.get("WANDB_API_KEY"))


def server() -> ParseResult:
    """The address of the Weights & Biases server."""
    return urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))


def answers(seconds: float = 3.0) -> bool:
    """Whether the Weights & Biases server takes a connection."""
    url = server()
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
        with socket.create_connection((url.hostname or "", port), timeout=seconds):
            return True
    except OSError:
        return False
