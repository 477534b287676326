"""The trainer takes its place among the processes that others started, and writes durable checkpoints."""

from datetime import timedelta

import pytest

from whitenedcse.training.checkpoints import Checkpoints
from whitenedcse.training.trainer import SYNCED, Trainer

ALONE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "GROUP_RANK")


def trainer(**settings):
    given = {"accelerator": "cpu", "logger": False}
    return Trainer(**(given | {"enable_progress_bar": False} | settings))


@pytest.mark.parametrize(("rank", "world", "local"), [(0, 2, 2), (5, 8, 4), (0, 1, 1)])
def test_without_a_number_it_is_what_was_started(monkeypatch, rank, world, local):
    values = [rank, world, rank % local, local, "x", rank // local]
    for name, value in zip(ALONE, values, strict=True):
        monkeypatch.setenv(name, str(value))
    made = trainer()
    assert (made.num_devices, made.num_nodes, made.world_size) == (local, world // local, world)
    assert (made.global_rank, made.local_rank) == (rank, rank % local)


def test_alone_it_is_one_and_a_number_is_that_number_with_checkpoints_of_ours():
    assert trainer().num_devices == 1
    assert trainer(devices=2).num_devices == 2
    assert isinstance(trainer(devices=1).strategy.checkpoint_io, Checkpoints)


def test_collectives_wait_for_the_time_that_is_set():
    made = trainer(devices=2, timeout=7.5)
    assert made.strategy._timeout == timedelta(seconds=7.5)  # given to init_process_group
    ours = {"gradient_as_bucket_view": True, SYNCED: False}
    assert made.strategy._ddp_kwargs == ours | {"find_unused_parameters": False}
    made = trainer(devices=2, strategy="ddp_find_unused_parameters_true")
    assert made.strategy._ddp_kwargs == ours | {"find_unused_parameters": True}


def test_a_run_has_a_last_step_even_if_its_time_ends_it():
    hour = {"max_time": "00:01:00:00"}
    with pytest.raises(ValueError, match="there is no last step"):
        trainer(**hour)
    assert (trainer(**hour, max_steps=9).max_steps, trainer(**hour, max_epochs=2).max_epochs) == (9, 2)
