"""Weights & Biases is online only where it can be; TensorBoard writes into the run directory."""

import socket

import pytest
from conftest import nowhere

from whitenedcse.training.loggers import Metrics, tensorboard_logger, wandb_logger


@pytest.fixture
def server():
    """A socket that takes connections, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Whether a logger made in this environment is offline."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # where ~/.netrc is

    def made(**environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return wandb_logger(project="p", run=tmp_path / "run")._offline

    return made


def test_without_a_key_it_is_offline_even_if_the_server_answers(offline, server):
    assert offline(WANDB_BASE_URL=server)


def test_with_a_key_and_a_server_it_is_online(offline, server):
    assert not offline(WANDB_BASE_URL=server, WANDB_API_KEY="k" * 40)


def test_a_key_stored_by_login_counts(offline, server, tmp_path):
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login user password " + "k" * 40 + "\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert not offline(WANDB_BASE_URL=server)


def test_with_a_key_and_no_server_it_is_offline(offline):
    assert offline(WANDB_BASE_URL=nowhere(), WANDB_API_KEY="k" * 40)


def test_the_mode_that_the_user_set_wins(offline, server):
    assert offline(WANDB_BASE_URL=server, WANDB_API_KEY="k" * 40, WANDB_MODE="offline")


def test_files_lie_in_the_run_directory(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    record, board = Metrics(run / "metrics.csv", None), tensorboard_logger(run=run)
    for logger in (record, board):
        logger.log_metrics({"dev/spearman": 50.0}, step=1)
        logger.finalize("success")
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    assert (run / "metrics.csv").read_text().split() == ["step,dev/spearman", "1,50.0"]
